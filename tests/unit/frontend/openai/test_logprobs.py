"""Log-probabilities in OpenAI's shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ouro_sgl.frontend.openai.logprobs import CompletionLogprobs, chat_logprobs
from ouro_sgl.frontend.tokenizer import Tokenizer
from tests.models import byte_ids, byte_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path, 259)


def triples(tokenizer: Tokenizer, ids: list[int]) -> list[list[Any]]:
    return [[-i / 4, token_id, tokenizer.token_text(token_id)] for i, token_id in enumerate(ids)]


def empty() -> dict[str, list[Any]]:
    return {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}


def test_completions(tokenizer: Tokenizer) -> None:
    given = triples(tokenizer, byte_ids("aé<b"))
    shape = empty()
    logprobs = CompletionLogprobs(tokenizer, 10, skip_special_tokens=True)
    logprobs.add(shape, given[:2], [given[:2], None])
    logprobs.add(shape, given[2:], [])
    assert shape == {
        "tokens": ["a", "Ã", "©", "<", "b"],  # the two bytes of é, one by one
        "token_logprobs": [0.0, -0.25, -0.5, -0.75, -1.0],
        "top_logprobs": [{"a": 0.0, "Ã": -0.25}, None],
        "text_offset": [10, 11, 11, 12, 13],
    }


def test_special_tokens_take_room_only_where_they_are_shown(tokenizer: Tokenizer) -> None:
    for skip, offsets in ((True, [0, 0, 1]), (False, [0, 10, 11])):
        shape = empty()
        CompletionLogprobs(tokenizer, 0, skip).add(shape, triples(tokenizer, [2, *byte_ids("ab")]), [])
        assert shape["text_offset"] == offsets


def test_tokens_that_read_alike_keep_the_likeliest(tokenizer: Tokenizer) -> None:
    shape = empty()
    best = [[-1.0, 5, "x"], [-2.0, 6, "x"]]
    CompletionLogprobs(tokenizer, 0, True).add(shape, best[:1], [best])
    assert shape["top_logprobs"] == [{"x": -1.0}]


def test_chat(tokenizer: Tokenizer) -> None:
    given = triples(tokenizer, byte_ids("é"))
    shape = chat_logprobs(given, [given, given[:1]], tokenizer)
    first, second = shape["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("\ufffd", [0xC3], 0.0)
    assert [top["bytes"] for top in first["top_logprobs"]] == [[0xC3], [0xA9]]
    assert len(second["top_logprobs"]) == 1
    assert chat_logprobs(given, [], tokenizer)["content"][0]["top_logprobs"] == []
