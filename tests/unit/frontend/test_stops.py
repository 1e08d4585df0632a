"""Stop strings are found where a search in the whole text would find them."""

from __future__ import annotations

import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ouro_sgl.errors import RequestError
from ouro_sgl.frontend.stops import REGEX_WINDOW, StopMatch, StopMatcher, StopRegexes

LETTERS = st.text(alphabet="ab", max_size=6)


def feed_all(matcher: StopMatcher, pieces: list[str]) -> tuple[StopMatch | None, int]:
    """The first match and the number of tokens that it took."""
    for number, piece in enumerate(pieces, start=1):
        match = matcher.feed(piece, number)
        if match is not None:
            return match, number
    return None, len(pieces)


def test_a_stop_across_tokens() -> None:
    match, tokens = feed_all(StopMatcher(["DEF"], 0), ["a", "bD", "E", "Fx", "y"])
    assert match == StopMatch("DEF", 2, 5)
    assert tokens == 4


def test_a_stop_inside_a_token() -> None:
    for stop, start in (("Pari", 0), ("ari", 1)):
        match, _ = feed_all(StopMatcher([stop], 0), ["Paris"])
        assert match == StopMatch(stop, start, start + len(stop))
    assert feed_all(StopMatcher(["Paris!"], 0), ["Paris"])[0] is None


def test_the_first_in_the_list_wins_within_a_token() -> None:
    match, _ = feed_all(StopMatcher(["world", "hello"], 0), ["hello world"])
    assert match == StopMatch("world", 6, 11)


def test_an_earlier_token_wins_over_the_order_of_the_list() -> None:
    match, tokens = feed_all(StopMatcher(["world", "hello"], 0), ["hello", " world"])
    assert (match, tokens) == (StopMatch("hello", 0, 5), 1)


def test_the_first_place_is_cut() -> None:
    assert feed_all(StopMatcher(["aa"], 0), ["aaaa"])[0] == StopMatch("aa", 0, 2)


def test_what_may_become_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["DEF", "bDX"], 0)
    held = []
    for number, piece in enumerate(["a", "b", "D", "E", "x"], start=1):
        assert matcher.feed(piece, number) is None
        held.append(matcher.held_back())
    assert held == [0, 1, 2, 2, 0]


def test_matches_of_early_tokens_are_ignored() -> None:
    match, tokens = feed_all(StopMatcher(["a"], 3), ["a", "a", "b", "a"])
    assert (match, tokens) == (StopMatch("a", 3, 4), 4)
    match, tokens = feed_all(StopMatcher(["ab"], 2), ["a", "b"])
    assert (match, tokens) == (StopMatch("ab", 0, 2), 2)


@given(stops=st.lists(LETTERS.filter(bool), min_size=1, max_size=3), pieces=st.lists(LETTERS, max_size=12))
@settings(max_examples=500, deadline=None)
def test_equals_a_plain_search(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops, 0)
    text = ""
    for number, piece in enumerate(pieces, start=1):
        match = matcher.feed(piece, number)
        text += piece
        first = next((stop for stop in stops if stop in text), None)
        if first is None:
            assert match is None
            longest = max(n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))
            assert matcher.held_back() == longest
        else:
            assert match == StopMatch(first, text.find(first), text.find(first) + len(first))
            return


def test_a_long_stop_costs_linear_time() -> None:
    stop = "a" * 100_000 + "b"
    matcher = StopMatcher([stop], 0)
    start = time.perf_counter()
    assert matcher.feed("a" * 100_000, 1) is None
    assert matcher.feed("a" * 10, 2) is None
    assert matcher.feed("b", 3) == StopMatch(stop, 10, 100_011)
    assert time.perf_counter() - start < 10


def regexes(*patterns: str, stops: list[str] | None = None, min_tokens: int = 0) -> StopMatcher:
    return StopMatcher(stops or [], min_tokens, StopRegexes(list(patterns)))


def test_a_regex_across_tokens_counts_characters() -> None:
    match, tokens = feed_all(regexes("é[0-9]{2}"), ["😀a", "é1", "x", "é", "4", "2", "y"])
    assert (match, tokens) == (StopMatch("é[0-9]{2}", 5, 8), 6)


def test_strings_go_before_regexes_and_regexes_in_their_order() -> None:
    pieces = ["one two three"]
    assert feed_all(regexes("o[a-z]e", stops=["three"]), pieces)[0] == StopMatch("three", 8, 13)
    assert feed_all(regexes("t[a-z]+", "o[a-z]+"), pieces)[0] == StopMatch("t[a-z]+", 4, 7)


def test_regex_matches_of_early_tokens_are_ignored() -> None:
    match, tokens = feed_all(regexes("a", min_tokens=3), ["a", "a", "b", "a"])
    assert (match, tokens) == (StopMatch("a", 3, 4), 4)


def test_anchors_and_borders_look_at_the_whole_output() -> None:
    filler = ["x" * 100] * (4 * REGEX_WINDOW // 100)
    assert feed_all(regexes("^b"), [*filler, "b"])[0] is None
    assert feed_all(regexes("^x+b$"), ["xx", "b"])[0] == StopMatch("^x+b$", 0, 3)
    assert feed_all(regexes(r"\bb"), [*filler, "b"])[0] is None
    long = sum(map(len, filler))
    assert feed_all(regexes(r"\bb"), [*filler, " ", "b"])[0] == StopMatch(r"\bb", long + 1, long + 2)


def test_a_match_as_long_as_the_window_is_found_late_in_a_text() -> None:
    pieces = ["é" * 50] * 300 + ["a"] * (REGEX_WINDOW - 1) + ["b"]
    pattern = "a+b"
    match, tokens = feed_all(regexes(pattern), pieces)
    assert (match, tokens) == (StopMatch(pattern, 15000, 15000 + REGEX_WINDOW), len(pieces))


@given(
    pattern=st.sampled_from(["ab+a", "(a|bb)b", "b{3}", "a.a", "ba$", "^bb", "é?aa|ba"]),
    pieces=st.lists(st.text(alphabet="abé", max_size=5), max_size=10),
)
@settings(max_examples=300, deadline=None)
def test_regexes_equal_a_plain_search(pattern: str, pieces: list[str]) -> None:
    matcher = regexes(pattern)
    text = ""
    for number, piece in enumerate(pieces, start=1):
        match = matcher.feed(piece, number)
        text += piece
        # Python's $ also matches before a last newline, of which there is none here
        found = re.search(pattern, text)
        assert match == (None if found is None else StopMatch(pattern, *found.span()))
        if match is not None:
            return


@pytest.mark.parametrize(
    "pattern", ["(", "[", "a" * 257, "a*", "(a{100}){100}", r"(a)\1", "(?!a)", r"\pL{150}"]
)
def test_bad_regexes_are_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match="stop_regex"):
        StopRegexes([pattern])


def test_regexes_of_a_request_are_limited_together() -> None:
    StopRegexes(["a{400}"])
    with pytest.raises(RequestError, match="too complex"):
        StopRegexes(["a{400}", "b{400}", "c{400}"])


def test_a_hard_regex_ends_its_request() -> None:
    compiled = StopRegexes(["[ab]*a[ab]{240}c"])
    matcher, other = StopMatcher([], 0, compiled), StopMatcher([], 0, compiled)
    assert feed_all(matcher, ["x"] * 5000)[0] is None  # quick looks do not count in favour of slow ones
    rng = random.Random(1)
    pieces = [rng.choice("ab") for _ in range(20000)]
    start = time.thread_time()
    with pytest.raises(RequestError, match="takes too long"):
        feed_all(matcher, pieces)
    assert time.thread_time() - start < 2.5  # 0.5 s at the most on an idle machine
    with pytest.raises(RequestError, match="takes too long"):  # the request's other samples end with it
        other.feed("a", 1)


def test_usual_regexes_never_run_out_of_time() -> None:
    matcher = regexes(r"\n\n+[0-9]+\.", r"(?i)answer: *\d", "[.!?] [A-Z]")
    for number in range(5000):
        assert matcher.feed("some words, ", number) is None
