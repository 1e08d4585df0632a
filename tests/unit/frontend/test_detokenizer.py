"""Pieces join to the final text, are whole characters, and cost the same however the ids are cut."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RawTokenizer

from ouro_sgl.errors import ConfigError
from ouro_sgl.frontend.detokenizer import Detokenizer
from ouro_sgl.frontend.tokenizer import Tokenizer
from tests.models import byte_ids, byte_tokenizer, metaspace_tokenizer

VOCAB = 400
SPECIAL_ID = 2
FAMILY = "👩\u200d👩\u200d👧 é ñ 한 𝄞"


def load(folder: Path, raw: RawTokenizer) -> Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    raw.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder, VOCAB)


@pytest.fixture(scope="module")
def raw() -> RawTokenizer:
    return byte_tokenizer(("Paris", " the", "世界", "💡"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, raw: RawTokenizer) -> Tokenizer:
    return load(tmp_path_factory.mktemp("bytes"), raw)


def fallback_tokenizer() -> RawTokenizer:
    """Byte tokens that are not byte-level, as in tokenizers made by SentencePiece."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257, "▁": 258}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return raw


def pieces_of(detokenizer: Detokenizer, groups: list[list[int]]) -> list[str]:
    return [detokenizer.feed(group) for group in groups] + [detokenizer.finish()]


def one_by_one(ids: list[int]) -> list[list[int]]:
    return [[token_id] for token_id in ids]


@pytest.mark.parametrize("character", ["a", "é", "한", "𝄞", "👩\u200d👩\u200d👧", "\x00", "\uffff"])
def test_a_character_appears_whole(tokenizer: Tokenizer, character: str) -> None:
    pieces = pieces_of(tokenizer.detokenizer(True), one_by_one(byte_ids(f"<{character}>")))
    assert "".join(pieces) == f"<{character}>"
    assert "\ufffd" not in "".join(pieces)
    assert [piece for piece in pieces if piece] == list(f"<{character}>")


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_equals_the_tokenizers_decode(tokenizer: Tokenizer, raw: RawTokenizer, data: st.DataObject) -> None:
    known = raw.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, known - 1), max_size=30))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    for skip in (False, True):
        text = "".join(pieces_of(tokenizer.detokenizer(skip), groups))
        assert text == raw.decode(ids, skip_special_tokens=skip)
        assert text == tokenizer.decode(ids, skip)


@given(data=st.binary(max_size=12))
@settings(max_examples=500, deadline=None)
def test_any_bytes(tokenizer: Tokenizer, raw: RawTokenizer, data: bytes) -> None:
    pieces = pieces_of(tokenizer.detokenizer(True), one_by_one(byte_ids(data)))
    assert "".join(pieces) == raw.decode(byte_ids(data))


def test_every_pair_of_bytes_decodes_as_the_tokenizer_does(tokenizer: Tokenizer, raw: RawTokenizer) -> None:
    for first in range(256):
        for second in (0x00, 0x41, 0x7F, 0x80, 0x9F, 0xA0, 0xBF, 0xC2, 0xE0, 0xED, 0xF0, 0xF4, 0xFF):
            ids = byte_ids(bytes([first, second, 0x6B]))
            assert "".join(pieces_of(tokenizer.detokenizer(True), one_by_one(ids))) == raw.decode(ids)


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    ids = [*byte_ids("a"), SPECIAL_ID, *byte_ids("b")]
    assert "".join(pieces_of(tokenizer.detokenizer(True), [ids])) == "ab"
    assert "".join(pieces_of(tokenizer.detokenizer(False), [ids])) == "a<|im_end|>b"


def test_a_special_token_inside_a_character_does_not_tear_it(tokenizer: Tokenizer) -> None:
    head, tail = byte_ids("😀")[:2], byte_ids("😀")[2:]
    assert "".join(pieces_of(tokenizer.detokenizer(True), one_by_one([*head, SPECIAL_ID, *tail]))) == "😀"


def test_ids_beyond_the_tokenizer_show_nothing(tokenizer: Tokenizer) -> None:
    assert "".join(pieces_of(tokenizer.detokenizer(False), [[VOCAB - 1, *byte_ids("a")]])) == "a"


def test_an_unfinished_character_is_marked_at_the_end_only(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer(True)
    assert detokenizer.feed(byte_ids("ok😀")[:-1]) == "ok"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_metaspace_keeps_the_spaces_between_words(tmp_path: Path) -> None:
    raw = metaspace_tokenizer()
    tokenizer = load(tmp_path, raw)
    ids = [raw.token_to_id(token) for token in ("▁the", "▁cat", "s", "▁sat")]
    streamed = pieces_of(tokenizer.detokenizer(True), one_by_one(ids))
    assert streamed == [" the", " cat", "s", " sat", ""]
    assert "".join(pieces_of(tokenizer.detokenizer(True), [ids])) == " the cats sat"


@given(ids=st.lists(st.integers(0, 258), max_size=12), cut=st.integers(0, 12))
@settings(max_examples=200, deadline=None)
def test_fallback_bytes_do_not_depend_on_the_cut(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], cut: int
) -> None:
    tokenizer = load(tmp_path_factory.getbasetemp() / "fallback", fallback_tokenizer())
    whole = "".join(pieces_of(tokenizer.detokenizer(True), [ids]))
    assert "".join(pieces_of(tokenizer.detokenizer(True), [ids[:cut], ids[cut:]])) == whole


def test_fallback_bytes_make_whole_characters(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, fallback_tokenizer())
    ids = [*FAMILY.encode(), 256, 257]
    pieces = pieces_of(tokenizer.detokenizer(True), one_by_one(ids))
    assert "".join(pieces) == f"{FAMILY} ab"
    assert not any("\ufffd" in piece for piece in pieces)


def test_fallback_gives_up_on_bytes_that_cannot_become_a_character(tmp_path: Path) -> None:
    detokenizer = load(tmp_path, fallback_tokenizer()).detokenizer(True)
    assert "".join(detokenizer.feed([0xFF]) for _ in range(4)).count("\ufffd") == 4


@pytest.mark.parametrize("make", [byte_tokenizer, metaspace_tokenizer])
def test_tokens_that_show_nothing_cost_linear_time(tmp_path: Path, make: object) -> None:
    tokenizer = load(tmp_path, make())  # type: ignore[operator]

    def seconds(count: int) -> float:
        detokenizer = tokenizer.detokenizer(True)
        start = time.thread_time()  # what others do meanwhile does not count
        for _ in range(count):
            assert detokenizer.feed([SPECIAL_ID]) == ""
        return time.thread_time() - start

    seconds(100)
    # Quadratic work would take 400 times as long.
    assert seconds(10_000) < 100 * max(seconds(500), 1e-3)


def test_encode_adds_nothing_and_knows_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("ab") == byte_ids("ab")
    assert tokenizer.encode("a<|im_end|>") == [*byte_ids("a"), SPECIAL_ID]
    assert tokenizer.encode("") == []


@given(text=st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), False) == text


def test_text_of_single_tokens(tokenizer: Tokenizer, raw: RawTokenizer) -> None:
    assert tokenizer.token_text(raw.token_to_id("Paris")) == "Paris"
    assert tokenizer.token_text(SPECIAL_ID) == "<|im_end|>"
    assert tokenizer.token_text(byte_ids("😀")[0]) == "\ufffd"


def test_the_longest_token_is_known_only_where_it_bounds_a_prompt(tmp_path: Path) -> None:
    assert load(tmp_path / "a", byte_tokenizer(("Paris",))).longest_token == len("<|endoftext|>")
    assert load(tmp_path / "b", metaspace_tokenizer()).longest_token is None


@pytest.mark.parametrize(("content", "reason"), [(None, "does not exist"), ("{", "not a readable tokenizer")])
def test_a_broken_file_is_named(tmp_path: Path, content: str | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"tokenizer\.json.*{reason}"):
        Tokenizer(tmp_path, VOCAB)


def test_ids_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="258 is not below the model's vocab_size 258"):
        Tokenizer(tmp_path, 258)


@pytest.mark.parametrize("make", [byte_tokenizer, metaspace_tokenizer])
def test_markers_are_shown_on_demand(tmp_path: Path, make: Callable[[], RawTokenizer]) -> None:
    raw = make()
    raw.add_special_tokens([AddedToken("<think>", special=True), AddedToken("</think>", special=True)])
    tokenizer = load(tmp_path, raw)
    ids = [*tokenizer.encode("<think>"), *tokenizer.encode("ab"), SPECIAL_ID, *tokenizer.encode("</think>")]
    for skip, keep, shown in (
        (True, False, "ab"),
        (True, True, "<think>ab</think>"),
        (False, True, "<think>ab<|im_end|></think>"),
        (False, False, "<think>ab<|im_end|></think>"),
    ):
        text = "".join(pieces_of(tokenizer.detokenizer(skip, keep), one_by_one(ids)))
        assert text.replace(" ", "") == shown
    assert tokenizer.special_id("<|im_end|>") == SPECIAL_ID
    assert tokenizer.special_id("<think>") == ids[0]
    assert tokenizer.special_id("a") is None
    assert tokenizer.special_id("nothing like it") is None
    assert tokenizer.token_bytes(SPECIAL_ID) == b"<|im_end|>"


def test_bytes_of_a_token(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_bytes(token_id) for token_id in byte_ids("é")] == [b"\xc3", b"\xa9"]
