"""Text while it grows: never half a character, never more or less than the final text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.reports.conftest import Serve
from tests.e2e.reports.support import (
    CHAT,
    CHAT_ANSWER,
    COMPLETIONS,
    LONG,
    NATIVE,
    SCRIPT_TOKENIZER,
    TURN_END,
    TURN_START,
    Client,
    Stream,
    digits,
    greedy,
    message,
    resident_bytes,
)
from tests.frontend_server import VOCAB_SIZE, running_frontend, write_echo_checkpoint
from tests.mock_scheduler import MockScheduler
from tests.models import byte_ids, chain_of, metaspace_tokenizer, script_checkpoint

HELD_UP = 5 * 1.0  # seconds without a token that no stream may see
LEFT_BEHIND = 5 << 16  # bytes of resident memory that may stay of 60 streams


def test_det_01_a_character_of_four_tokens(script: Client) -> None:
    plain = script.generate("x", greedy(16))
    assert plain["output_ids"] == [*byte_ids("😀k"), TURN_END]
    assert plain["text"] == "😀k" == SCRIPT_TOKENIZER.decode(plain["output_ids"])
    stream = script.stream_text("x", greedy(16))
    assert stream.text() == plain["text"]
    assert not any("\ufffd" in chunk["text"] for chunk in stream.chunks)
    body = {"prompt": "x", "temperature": 0, "max_tokens": 16}
    assert script.stream(COMPLETIONS, body).deltas() in (["😀", "k"], ["😀k"])  # never a part of the first
    # One that ends inside the character shows nothing before its end.
    cut = script.stream_text("x", greedy(3))
    assert cut.text() == script.generate("x", greedy(3))["text"]
    assert {chunk["text"] for chunk in cut.chunks[:-1]} <= {""}


def test_det_04_tokens_that_show_nothing(script: Client) -> None:
    """Nothing to show for hundreds of tokens: neither these requests nor another are held up on the way.

    That the cost is linear is measured without a server, with the tests of the detokenizer.
    """
    silent = {"input_ids": [TURN_START], "sampling_params": greedy(300, ignore_eos=True)}
    silent_streams = [script.stream(NATIVE, silent) for _ in range(6)]
    plain = script.stream_text(LONG, greedy(280))
    for stream in silent_streams:
        last = stream.finish()[-1]
        assert last["text"] == ""
        assert last["meta_info"]["completion_tokens"] == 300
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 300}
    for stream in (plain, silent_streams[0]):
        stream.finish()
        gaps = [after - before for before, after in zip(stream.times, stream.times[1:], strict=False)]
        assert max(gaps) < HELD_UP


def test_det_06_a_prompt_that_ends_inside_a_character(script: Client) -> None:
    body = {"input_ids": [*byte_ids("Hello "), *byte_ids("😀")[:3]], "sampling_params": greedy(2)}
    plain = script.post(NATIVE, body).json()
    assert plain["output_ids"] == [*byte_ids("😀")[3:], *byte_ids("k")]
    assert plain["text"] in ("k", "\ufffdk")
    assert script.stream(NATIVE, body).text() == plain["text"]


WORDS = metaspace_tokenizer()
THE, CAT, SAT, S = (WORDS.token_to_id(word) for word in ("▁the", "▁cat", "▁sat", "s"))


@pytest.fixture(scope="module")
def metaspace(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Client:
    """Words begin with "▁", which only the decoder makes a space."""
    the, space, question = (WORDS.token_to_id(token) for token in ("the", "▁", "q"))
    chain = chain_of([question, THE, CAT, S, SAT, TURN_END], [space, WORDS.token_to_id("t")], [the, CAT])
    chain |= chain_of([WORDS.token_to_id("t"), CAT])
    path: Path = tmp_path_factory.mktemp("metaspace") / "script"
    return serve(script_checkpoint(path, chain, tokenizer=WORDS), "--num-slots", "4096")


@pytest.mark.parametrize("prompt", ["q", "q "])
def test_det_07_spaces_between_words(metaspace: Client, prompt: str) -> None:
    plain = metaspace.generate(prompt, greedy(8))
    ids = WORDS.encode(prompt, add_special_tokens=False).ids
    whole = WORDS.decode([*ids, *plain["output_ids"]])
    assert plain["text"] == whole.removeprefix(prompt if prompt == "q" else "q ")
    assert plain["text"] == {"q": " the cats sat", "q ": "t cats sat"}[prompt]
    assert metaspace.stream_text(prompt, greedy(8)).text() == plain["text"]
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8}
    assert "".join(metaspace.stream(COMPLETIONS, body).deltas()) == plain["text"]


def test_det_09_whole_text_or_pieces(script: Client, rand: Client) -> None:
    # Random bytes: characters of all lengths, and what is none.
    plain = rand.generate("hello", greedy(120, ignore_eos=True))
    stream = rand.stream_text("hello", greedy(120, ignore_eos=True))
    assert stream.text() == plain["text"]
    counts = [chunk["meta_info"]["completion_tokens"] for chunk in stream.chunks]
    assert counts == [len(chunk["output_ids"]) for chunk in stream.chunks]
    assert counts[-1] == plain["meta_info"]["completion_tokens"]
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 120, "ignore_eos": True}
    assert "".join(rand.stream(COMPLETIONS, body).deltas()) == plain["text"]
    chat = {"messages": message(), "temperature": 0, "max_tokens": 24}
    templated = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert script.stream_text(templated, greedy(24)).text() == CHAT_ANSWER
    assert "".join(script.stream(CHAT, chat).deltas()) == CHAT_ANSWER
    pieces = script.stream(CHAT, {**chat, "input_ids": byte_ids(LONG), "max_tokens": 100}).deltas()
    assert len(pieces) > 1
    assert "".join(pieces) == digits(100)


def test_det_10_nothing_stays_of_streams_that_ended(tmp_path: Path) -> None:
    """Streams that ended, that were closed and that were aborted: the frontend does not grow with them."""
    prompt = "abcdefghij" * 20
    with running_frontend(write_echo_checkpoint(tmp_path)) as frontend:
        scheduler = MockScheduler(frontend.ipc_dir, VOCAB_SIZE)
        scheduler.start()
        try:
            frontend.wait_healthy()
            with frontend.client() as client:

                def batch(number: int) -> None:
                    names = [f"{number}-{index}" for index in range(12)]
                    # Six samples each, so that more would stay of a call that is kept.
                    params = {"max_new_tokens": 30, "n": 6}
                    streams = [
                        Stream(frontend.url, NATIVE, {"text": prompt, "rid": name, "sampling_params": params})
                        for name in names
                    ]
                    for index, (name, stream) in enumerate(zip(names, streams, strict=True)):
                        stream.wait_chunks()
                        if index % 3 == 1:
                            stream.close()
                            continue
                        if index % 3 == 2:
                            client.post("/abort_request", json={"rid": name})
                        ends = [chunk for chunk in stream.finish() if chunk["meta_info"]["finish_reason"]]
                        assert sorted(chunk["index"] for chunk in ends) == list(range(6))
                        assert all(prompt[:30].startswith(chunk["text"]) for chunk in ends)
                        if index % 3 == 0:
                            assert {chunk["text"] for chunk in ends} == {prompt[:30]}

                for number in range(5):
                    batch(number)
                # What stays of streams grows with every 60 of them; the allocator grows now and then.
                grown = []
                while not grown or (grown[-1] >= LEFT_BEHIND and len(grown) < 6):
                    before = resident_bytes(frontend.process.pid)
                    for index in range(5):
                        batch(5 + 5 * len(grown) + index)
                    grown.append(resident_bytes(frontend.process.pid) - before)
                assert grown[-1] < LEFT_BEHIND, grown
                assert frontend.process.poll() is None
                answer = client.post(NATIVE, json={"text": prompt, "sampling_params": {"max_new_tokens": 9}})
                assert answer.json()["text"] == prompt[:9]
        finally:
            scheduler.stop()
