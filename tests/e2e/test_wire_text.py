"""Text over the wire: whatever bytes the model makes, streams join to the text of the plain answer.

The models write one byte after the other. A regex of the wanted text makes them write it, in tokens of
one byte or, where the vocabulary has them, of several bytes that end anywhere in a character.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers import models as tokenizer_models

from tests.models import SPECIAL_TOKENS, byte_tokenizer, script_checkpoint
from tests.server import Server, running_server

REPLACEMENT = "\ufffd"
# Merged from left to right, so tokens end after every byte of these.
WORDS = ("😀", "👩\u200d", "한국", "é", "e\u0301", " é", "\u2028")
BYTE_TOKENIZER = byte_tokenizer(WORDS)

TEXTS = {
    "lengths": "\x01\x7f\x80\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff",
    "mixed lengths": "aé€😀" * 6 + "😀€éa" * 6,
    "joined": "👩\u200d💻👨\u200d👩\u200d👧\u200d👦🏳\ufe0f\u200d🌈👍🏽🇫🇷1\ufe0f\u20e3",
    "combining": "e\u0301o\u0308\u0323Z\u0351\u036b\u0343\u1112\u1161\u11ab\u0915\u094d\u0937",
    "directions": "abc \u05e9\u05dc\u05d5\u05dd \u202eright\u202c \u0645\u0631\u062d\u0628\u0627",
    "line breaks": "a\nb\r\nc\rd\x0be\x0cf\x1cg\x85h\u2028i\u2029j\n\nk",
    "odd ones": '\ufeff\ufeffdata: [DONE]\n\n"\\\u00a0\u200b\ufdd0<|im_end|>',
    "a replacement of its own": f"a{REPLACEMENT}b{REPLACEMENT}",
}


def fallback_tokenizer() -> Tokenizer:
    """Tokens of one byte that are not byte-level, as in vocabularies made by SentencePiece."""
    names = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "x", "y", "▁x", "é"]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[("▁", "x")], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


@pytest.fixture(scope="module", params=[BYTE_TOKENIZER, fallback_tokenizer()], ids=["level", "fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.param


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """After each byte the next larger one, after the last one the first."""
    chain: dict[int, int | list[int]] = {token_id: [] for token_id in range(tokenizer.get_vocab_size())}
    chain |= {3 + byte: 3 + (byte + 1) % 256 for byte in range(256)}
    folder = script_checkpoint(tmp_path_factory.mktemp("script"), chain, tokenizer=tokenizer)
    with running_server(folder, "--max-running-requests", "16", "--num-slots", "65536") as running:
        yield running


# --------------------------------------------------------------------------- reading


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    answer = server.post(path, body)
    assert answer.status == 200, answer.body
    return answer.json()


def events(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    """The JSON of all events of a stream."""
    answer = server.post(path, {**body, "stream": True})
    assert answer.status == 200, answer.body
    lines = answer.body.decode("utf-8").splitlines()  # as clients do that know more ends of a line
    assert set(lines[1::2]) == {""}
    assert all(line.startswith("data: ") for line in lines[::2])
    *data, last = [line.removeprefix("data: ") for line in lines[::2]]
    assert last == "[DONE]"
    return [json.loads(one) for one in data]


def native_text(server: Server, body: dict[str, Any]) -> str:
    """The text of a ``/generate`` stream and of the same plain call, which must agree."""
    plain = post(server, "/generate", body)
    texts = [event["text"] for event in events(server, "/generate", body)]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert texts[-1] == plain["text"]
    return str(plain["text"])


def completion_text(server: Server, body: dict[str, Any]) -> str:
    """The same of ``/v1/completions``."""
    plain = post(server, "/v1/completions", body)["choices"][0]["text"]
    chunks = events(server, "/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == plain
    return str(plain)


def chat_text(server: Server, body: dict[str, Any]) -> str:
    """The same of ``/v1/chat/completions``."""
    plain = post(server, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
    deltas = [chunk["choices"][0]["delta"] for chunk in events(server, "/v1/chat/completions", body)]
    assert "".join(delta["content"] or "" for delta in deltas) == plain
    return str(plain)


def exactly(text: str) -> str:
    """A regex of this text alone."""
    return "".join(f"\\x{{{ord(character):x}}}" for character in text)


# --------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("name", TEXTS)
def test_streams_join_to_the_text(server: Server, name: str) -> None:
    text = TEXTS[name]
    calls = []
    # Another seed takes other tokens for the same bytes.
    for seed in range(2):
        sampling = {"regex": exactly(text), "max_new_tokens": 400, "temperature": 1000.0}
        native = {"input_ids": [4], "sampling_params": {**sampling, "sampling_seed": seed}}
        slow = {**native, "sampling_params": {**native["sampling_params"], "stream_interval": 7}}
        openai = {"regex": exactly(text), "max_tokens": 400, "temperature": 1000.0, "seed": seed}
        message = {"role": "user", "content": "x"}
        calls += [
            (native_text, native),
            (native_text, slow),
            (completion_text, {**openai, "prompt": [4]}),
            (chat_text, {**openai, "messages": [message], "separate_reasoning": False}),
        ]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda call: call[0](server, call[1]), calls)) == [text] * len(calls)


def test_all_bytes_in_order(server: Server) -> None:
    """Half of the bytes are no text: U+FFFD stands for them, in the stream as in the plain answer."""
    native = {"input_ids": [3 + 255], "sampling_params": {"temperature": 0, "max_new_tokens": 256}}
    text = native_text(server, native)
    assert completion_text(server, {"prompt": [3 + 255], "temperature": 0, "max_tokens": 256}) == text
    assert text.startswith(bytes(range(128)).decode())
    assert set(text[128:]) == {REPLACEMENT}


def test_a_cut_within_a_character_shows_at_the_end_alone(server: Server) -> None:
    text = "aé€😀"
    for count in (2, 4, 5, 7, 9):
        sampling = {"regex": exactly(text), "max_new_tokens": count, "sampling_seed": 1}
        body = {"input_ids": [4], "sampling_params": sampling}
        whole = native_text(server, body).rstrip(REPLACEMENT)
        assert text.startswith(whole)
        for event in events(server, "/generate", body)[:-1]:
            assert REPLACEMENT not in event["text"]


def test_random_bytes(server: Server, tokenizer: Tokenizer) -> None:
    """Bytes at random, cut into tokens at random, six streams at a time."""

    def check(seed: int) -> None:
        sampling = {"temperature": 1000.0, "max_new_tokens": 120, "ignore_eos": True, "sampling_seed": seed}
        body = {"input_ids": [4], "sampling_params": sampling}
        text = native_text(server, body)
        openai = {"prompt": [4], "max_tokens": 120, "temperature": 1000.0, "ignore_eos": True, "seed": seed}
        assert completion_text(server, openai) == text
        ids = post(server, "/generate", body)["output_ids"]
        assert len(set(ids)) > 60
        if tokenizer is BYTE_TOKENIZER:
            assert text == tokenizer.decode(ids)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(check, range(5)))
