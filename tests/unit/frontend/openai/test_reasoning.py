"""Reasoning and content of a text, however it is cut into pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ouro_sgl.frontend.openai.reasoning import ReasoningSplitter

CASES = [
    # inside, text, reasoning, content
    (False, "plain", "", "plain"),
    (False, "<think>a</think>b", "a", "b"),
    (False, "\n <think>\na\n</think>\n\nb", "\na\n", "\n\nb"),
    (False, "a <think>b</think>", "", "a <think>b</think>"),
    (False, "<thin", "", "<thin"),
    (False, " \n", "", " \n"),
    (False, "<think>cut", "cut", ""),
    (False, "<think>cut</thi", "cut</thi", ""),
    (False, "<think></think>", "", ""),
    (False, "<think>a</think>b</think>c", "a", "b</think>c"),
    (True, "a</think>b", "a", "b"),
    (True, "<think>a</think>b", "a", "b"),
    (True, "cut", "cut", ""),
    (True, "</think>b", "", "b"),
    (True, "<", "<", ""),
]


def split(pieces: list[str], inside: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(inside)
    parts = [splitter.feed(piece) for piece in pieces] + [splitter.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(("inside", "text", "reasoning", "content"), CASES)
def test_the_parts(inside: bool, text: str, reasoning: str, content: str) -> None:
    assert split([text], inside) == (reasoning, content)
    assert split(list(text), inside) == (reasoning, content)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", "a", " ", "\n"]), max_size=8),
    st.lists(st.integers(0, 40), max_size=6),
    st.booleans(),
)
def test_cutting_a_text_changes_nothing(words: list[str], cuts: list[int], inside: bool) -> None:
    text = "".join(words)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert split(pieces, inside) == split([text], inside)


def test_nothing_waits_that_is_no_part_of_a_marker() -> None:
    splitter = ReasoningSplitter(False)
    assert splitter.feed("<think>ab") == ("ab", "")
    assert splitter.feed("c</t") == ("c", "")
    assert splitter.feed("d") == ("</td", "")
    assert splitter.feed("</think>e<") == ("", "e<")
