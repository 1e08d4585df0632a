"""One sequence, fed by hand: texts, stops, truncation, the shape of the answer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ouro_sgl.frontend.sampling import parse_sampling_params
from ouro_sgl.frontend.sequence import LOWEST_LOGPROB, Sequence, SequenceLogprobs
from ouro_sgl.frontend.tokenizer import Tokenizer
from ouro_sgl.messages import Finished, FinishReason, OutputLogprobs, PromptLogprobs, TopLogprobs
from tests.models import byte_ids, byte_tokenizer
from tests.unit.frontend.test_sampling import LIMITS

END = 2
VOCAB = 300


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(("Paris",)).save(str(folder / "tokenizer.json"))
    return Tokenizer(folder, VOCAB)


LIMITS_300 = replace(LIMITS, vocab_size=VOCAB)


def make(tokenizer: Tokenizer, *, logprobs: bool = False, texts: bool = False, **raw: Any) -> Sequence:
    sampling = parse_sampling_params(raw, LIMITS_300)
    params = sampling.row_params(3, 0, logprobs=logprobs, top_logprobs_num=1, token_ids_logprob=[5])
    collected = SequenceLogprobs(tokenizer if texts else None, params) if logprobs else None
    return Sequence(1, "r", 0, byte_ids("abc"), params, sampling, tokenizer, collected, False)


def end(sequence: Sequence, reason: FinishReason, count: int, **fields: Any) -> dict[str, Any]:
    sequence.finish(Finished(1, reason, count, **fields))
    return sequence.answer()


def feed(sequence: Sequence, ids: list[int]) -> int | None:
    return sequence.add(ids, [4] * len(ids), None)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("eager", [True, False])
def test_a_matched_end_id_is_cut(tokenizer: Tokenizer, skip: bool, eager: bool) -> None:
    for end_id in (0, END):
        stop = ["zzz"] if eager else []
        sequence = make(tokenizer, skip_special_tokens=skip, stop=stop)
        ids = [*byte_ids("hi"), end_id]
        feed(sequence, ids)
        assert sequence.answer()["text"] == "hi"
        answer = end(sequence, FinishReason.STOP_ID, 3, matched=end_id)
        assert (answer["text"], answer["output_ids"]) == ("hi", ids)
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": end_id}
        assert answer["meta_info"]["completion_tokens"] == 3


@pytest.mark.parametrize("eager", [True, False])
def test_a_matched_end_id_is_kept_on_demand(tokenizer: Tokenizer, eager: bool) -> None:
    for skip, text in ((True, "hi"), (False, "hi<|im_end|>")):
        stop = ["zzz"] if eager else []
        sequence = make(tokenizer, skip_special_tokens=skip, no_stop_trim=True, stop=stop)
        feed(sequence, [*byte_ids("hi"), END])
        assert end(sequence, FinishReason.STOP_ID, 3, matched=END)["text"] == text


def test_an_ordinary_stop_id_is_never_shown(tokenizer: Tokenizer) -> None:
    (dot,) = byte_ids(".")
    sequence = make(tokenizer, stop_token_ids=[dot])
    feed(sequence, [*byte_ids("hi"), dot])
    assert sequence.answer()["text"] == "hi"
    assert end(sequence, FinishReason.STOP_ID, 3, matched=dot)["text"] == "hi"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("eager", [True, False])
def test_length_comes_before_an_end_id(tokenizer: Tokenizer, skip: bool, eager: bool) -> None:
    stop = ["zzz"] if eager else []
    for last, trimmed, kept in ((END, "hi", "hi" if skip else "hi<|im_end|>"), (*byte_ids("."), "hi", "hi.")):
        for keep, text in ((False, trimmed), (True, kept)):
            sequence = make(
                tokenizer,
                max_new_tokens=3,
                skip_special_tokens=skip,
                stop=stop,
                stop_token_ids=[last],
                no_stop_trim=keep,
            )
            feed(sequence, [*byte_ids("hi"), last])
            assert sequence.answer()["text"] == "hi"
            answer = end(sequence, FinishReason.LENGTH, 3)
            assert answer["text"] == text
            assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


def test_a_stop_string_cuts_text_and_tokens(tokenizer: Tokenizer) -> None:
    sequence = make(tokenizer, stop=["DEF"])
    assert feed(sequence, byte_ids("abcDE")) is None
    assert sequence.answer()["text"] == "abc"
    assert feed(sequence, byte_ids("Fxyz")) == 6
    assert feed(sequence, byte_ids("more")) is None
    answer = end(sequence, FinishReason.STOP_STRING, 6)
    assert (answer["text"], answer["output_ids"]) == ("abc", byte_ids("abcDEF"))
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "DEF"}
    assert answer["meta_info"]["exit_depths"] == [4] * 6


def test_a_kept_stop_string_ends_the_text(tokenizer: Tokenizer) -> None:
    sequence = make(tokenizer, stop=["ari"], no_stop_trim=True)
    assert feed(sequence, tokenizer.encode("Paris")) == 1
    assert end(sequence, FinishReason.STOP_STRING, 1)["text"] == "Pari"


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP_ID, FinishReason.ABORT])
def test_a_stop_string_wins_over_what_the_scheduler_saw_later(
    tokenizer: Tokenizer, reason: FinishReason
) -> None:
    sequence = make(tokenizer, stop=["b"])
    assert feed(sequence, byte_ids("abcd")) == 2
    answer = end(sequence, reason, 4)
    assert (answer["text"], answer["output_ids"]) == ("a", byte_ids("ab"))
    assert answer["meta_info"]["finish_reason"]["matched"] == "b"


def test_held_text_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    sequence = make(tokenizer, stop=["DEX"])
    feed(sequence, byte_ids("abDE"))
    assert sequence.answer()["text"] == "ab"
    assert end(sequence, FinishReason.LENGTH, 4)["text"] == "abDE"


def test_an_aborted_text_is_a_prefix(tokenizer: Tokenizer) -> None:
    sequence = make(tokenizer)
    feed(sequence, byte_ids("ok😀")[:-1])
    answer = end(sequence, FinishReason.ABORT, 5, message="aborted")
    assert answer["text"] == "ok"
    assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "aborted"}


def test_the_scheduler_may_cut_tokens_that_were_shown(tokenizer: Tokenizer) -> None:
    sequence = make(tokenizer)
    feed(sequence, byte_ids("hello"))
    assert sequence.answer()["text"] == "hello"
    answer = end(sequence, FinishReason.ABORT, 2)
    assert (answer["text"], answer["output_ids"]) == ("he", byte_ids("he"))


def test_errors(tokenizer: Tokenizer) -> None:
    for fields, status in (({"status": 503, "message": "full"}, 503), ({"message": "not finite"}, 500)):
        sequence = make(tokenizer)
        sequence.finish(Finished(1, FinishReason.ERROR, 0, **fields))
        assert sequence.error is not None
        assert (sequence.error.status, sequence.error.message) == (status, fields["message"])


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_streamed_texts_grow_to_the_plain_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    output = data.draw(st.text(alphabet="abDEF😀é.", max_size=12))
    stops = data.draw(st.lists(st.sampled_from(["DEF", "😀", "a.", "EF", "bb"]), max_size=2))
    ids = byte_ids(output)[: data.draw(st.integers(0, 20))]
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=len(ids), max_size=len(ids)))
    texts = []
    for asked in (True, False):
        sequence, position, stopped, seen = make(tokenizer, stop=stops), 0, None, [""]
        for size in sizes:
            stopped = stopped or feed(sequence, ids[position : position + size])
            position += size
            if asked:
                seen.append(sequence.answer()["text"])
        answer = end(sequence, FinishReason.LENGTH, stopped or len(ids))
        seen.append(answer["text"])
        assert all(after.startswith(before) for before, after in itertools.pairwise(seen))
        assert not any("\ufffd" in text for text in seen[:-1])
        texts.append(answer["text"])
    assert texts[0] == texts[1]
    whole = bytes(i - 3 for i in ids).decode("utf-8", "replace")
    assert whole.startswith(texts[0])
    assert not any(stop in texts[0] for stop in stops)


def test_logprobs_have_the_shape_of_triples(tokenizer: Tokenizer) -> None:
    sequence = make(tokenizer, logprobs=True, texts=True)
    top = TopLogprobs([-0.5], [byte_ids("z")[0]], [float("-inf")])
    sequence.start(1, PromptLogprobs(0, [None, -1.0, float("nan")], [None, top, top]))
    ids = byte_ids("hi")
    sequence.add(ids, [4, 1], OutputLogprobs([-0.25, float("-inf")], [top, top]))
    meta = end(sequence, FinishReason.LENGTH, 2)["meta_info"]
    a, b, c = byte_ids("abc")
    z, five = [-0.5, byte_ids("z")[0], "z"], [LOWEST_LOGPROB, 5, "\x02"]
    assert meta["input_token_logprobs"] == [[None, a, "a"], [-1.0, b, "b"], [LOWEST_LOGPROB, c, "c"]]
    assert meta["output_token_logprobs"] == [[-0.25, ids[0], "h"], [LOWEST_LOGPROB, ids[1], "i"]]
    assert meta["output_token_logprobs_length"] == 2
    assert meta["input_top_logprobs"] == [None, [z], [z]]
    assert meta["output_top_logprobs"] == [[z], [z]]
    assert meta["input_token_ids_logprobs"] == [None, [five], [five]]
    assert meta["output_token_ids_logprobs"] == [[five], [five]]


def test_logprobs_are_cut_with_the_tokens(tokenizer: Tokenizer) -> None:
    sequence = make(tokenizer, logprobs=True, stop=["b"])
    assert sequence.add(byte_ids("abcd"), [4, 1, 2, 3], OutputLogprobs([-1.0, -2.0, -3.0, -4.0])) == 2
    sequence.add(byte_ids("e"), [4], OutputLogprobs([-5.0]))
    meta = end(sequence, FinishReason.STOP_STRING, 2)["meta_info"]
    assert [value for value, _, _ in meta["output_token_logprobs"]] == [-1.0, -2.0]
    assert meta["output_token_logprobs"][0][2] is None
    assert meta["exit_depths"] == [4, 1]
    assert meta["mean_exit_depth"] == 2.5


def test_a_regex_takes_back_what_was_shown_of_its_match(tokenizer: Tokenizer) -> None:
    sequence = make(tokenizer, stop_regex="b[0-9]+c")
    assert feed(sequence, byte_ids("ab1")) is None
    assert sequence.answer()["text"] == "ab1"
    assert feed(sequence, byte_ids("2cde")) == 5
    answer = end(sequence, FinishReason.STOP_STRING, 5)
    assert answer["text"] == "a"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "b[0-9]+c"}
    assert answer["output_ids"] == byte_ids("ab12c")
    kept = make(tokenizer, stop_regex=["x", "b[0-9]+c"], no_stop_trim=True)
    feed(kept, byte_ids("ab12cde"))
    assert end(kept, FinishReason.STOP_STRING, 5)["text"] == "ab12c"


def test_a_complete_grammar_is_a_stop_without_a_token(tokenizer: Tokenizer) -> None:
    sequence = make(tokenizer, regex="hi", ignore_eos=True)
    feed(sequence, byte_ids("hi"))
    answer = end(sequence, FinishReason.STOP_GRAMMAR, 2)
    assert answer["text"] == "hi"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}


def test_exit_gate_values_are_cut_with_the_tokens(tokenizer: Tokenizer) -> None:
    sampling = parse_sampling_params({"stop": "b"}, LIMITS_300)
    params = sampling.row_params(3, 0, exit_lambdas=True)
    sequence = Sequence(1, "r", 0, byte_ids("abc"), params, sampling, tokenizer, None, False)
    values = [[0.1, 0.2, 0.3, 0.4], [0.5], [0.6, 0.7]]
    assert sequence.add(byte_ids("abc"), [4, 1, 2], None, values) == 2
    meta = end(sequence, FinishReason.STOP_STRING, 2)["meta_info"]
    assert meta["exit_logprobs"] == values[:2]
    assert "exit_logprobs" not in end(make(tokenizer), FinishReason.ABORT, 0)["meta_info"]


def test_weight_versions_are_told_when_they_changed(tokenizer: Tokenizer) -> None:
    sequence = make(tokenizer)
    assert sequence.answer()["meta_info"]["weight_version"] == "default"
    sequence.start(0, None, ["7"])
    assert sequence.answer()["meta_info"]["weight_version"] == "7"
    meta = end(sequence, FinishReason.ABORT, 0, weight_versions=["7"])["meta_info"]
    assert "weight_versions" not in meta
    changed = end(make(tokenizer), FinishReason.ABORT, 0, weight_versions=["7", "8"])["meta_info"]
    assert (changed["weight_version"], changed["weight_versions"]) == ("8", ["7", "8"])
