"""Constrained requests: masks, endings, and the engine that makes the masks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from llguidance import LLMatcher

from ouro_sgl.messages import FinishReason, GenerateReq, RoundEvents, RowParams
from ouro_sgl.scheduler.grammar import CACHED_GRAMMARS, GrammarEngine, NextTokens
from tests.models import byte_ids, byte_tokenizer, metaspace_tokenizer
from tests.utils_scheduler import VOCAB, Simulation, grammar_ids, make_config, make_scheduler

PROMPT = [5, 6, 7, 8, 9]


# --------------------------------------------------------------------------- the scheduler


@pytest.mark.parametrize("layout", ["last_exited", "shared"])
def test_constrained_and_free_requests_answer_as_alone(layout: str) -> None:
    sim = Simulation(make_config(kv_layout=layout, num_slots=4000), seed=4)
    for i in range(6):
        sim.submit([1, 2, 3, i], max_new_tokens=12, grammar="7 20")
        sim.submit([1, 2, 3, i], max_new_tokens=12)
        sim.submit([4, 2, i], max_new_tokens=12, end_ids=[14, 21], grammar="7 20")
    sim.run_until_done()


def test_a_complete_grammar_ends_with_an_end_id_or_by_itself() -> None:
    sim = Simulation(make_config(), seed=1)
    with_end = sim.submit(PROMPT, max_new_tokens=20, end_ids=[1], grammar="7 3")
    without = sim.submit(PROMPT, max_new_tokens=20, grammar="7 3")
    empty = sim.submit(PROMPT, max_new_tokens=20, grammar="7 0")
    cut = sim.submit(PROMPT, max_new_tokens=3, grammar="7 3")
    sim.run_until_done()
    ends = {uid: sim.answers[uid].finished for uid in (with_end, without, empty, cut)}
    assert [(e.reason, e.num_tokens) for e in ends.values() if e] == [
        (FinishReason.STOP_ID, 4),
        (FinishReason.STOP_GRAMMAR, 3),
        (FinishReason.STOP_GRAMMAR, 0),
        (FinishReason.LENGTH, 3),
    ]


def test_end_ids_that_must_wait_do_not_leave_a_complete_grammar_without_tokens() -> None:
    sim = Simulation(make_config(), seed=1)
    uid = sim.submit(PROMPT, max_new_tokens=20, min_new_tokens=10, end_ids=[1], grammar="7 3")
    for _ in range(100_000):
        if sim.scheduler.idle:
            break
        sim.tick()
    finished = sim.answers[uid].finished
    assert finished is not None
    assert (finished.reason, finished.num_tokens) == (FinishReason.STOP_GRAMMAR, 3)


def test_a_grammar_that_asks_for_an_end_id_too_early_fails() -> None:
    sim = Simulation(make_config(), seed=1)
    ends = sorted(grammar_ids("7 20", 0))
    uid = sim.submit(PROMPT, max_new_tokens=20, min_new_tokens=1, end_ids=ends, grammar="7 20")
    in_time = sim.submit(PROMPT, max_new_tokens=20, end_ids=ends, grammar="7 20")
    for _ in range(100_000):
        if sim.scheduler.idle:
            break
        sim.tick()
    failed, ended = sim.answers[uid].finished, sim.answers[in_time].finished
    assert failed is not None
    assert (failed.reason, failed.num_tokens) == (FinishReason.ERROR, 0)
    assert "min_new_tokens" in (failed.message or "")
    assert ended is not None
    assert (ended.reason, ended.num_tokens) == (FinishReason.STOP_ID, 1)


def test_a_failed_grammar_ends_one_request() -> None:
    sim = Simulation(make_config(max_rows=2), seed=2)
    for tokens in (0, 0, 3, 5):
        sim.submit(PROMPT, max_new_tokens=20, grammar=f"fail {tokens}")
        sim.submit(PROMPT, max_new_tokens=20)
    sim.run_until_done()


@pytest.mark.parametrize("seed", range(6))
def test_storm_of_grammars_stops_and_aborts(seed: int) -> None:
    sim = Simulation(make_config(num_slots=600), seed=seed)
    rng = random.Random(seed)
    for _ in range(60):
        options: dict[str, object] = {"max_new_tokens": rng.randint(1, 12)}
        if rng.random() < 0.6:
            options["grammar"] = f"{rng.randint(1, 9)} {rng.randint(0, 14)}"
        if rng.random() < 0.5:
            options["end_ids"] = [rng.randrange(VOCAB)]
        uid = sim.submit([rng.randrange(3) for _ in range(rng.randint(1, 20))], **options)
        for _ in range(rng.randint(0, 30)):
            sim.tick()
        answer = sim.answers[rng.randint(0, uid)]
        if answer.finished is None and rng.random() < 0.4:
            if answer.tokens and rng.random() < 0.5:
                sim.stop(answer.message.uid, rng.randint(0, len(answer.tokens)))
            else:
                sim.abort(answer.message.uid)
    sim.run_until_done()


def test_the_first_mask_waits_for_the_prompt_and_names_its_last_position() -> None:
    scheduler = make_scheduler()
    scheduler.add(GenerateReq(0, PROMPT, RowParams(4, constrained=True), grammar="7 9"))
    plans = [scheduler.step() for _ in range(50)]  # the grammar answers within these
    assert plans[0] is not None
    assert not any(plan.masks for plan in plans if plan is not None)
    scheduler.process_events(RoundEvents(1, 0, 1))
    plan = scheduler.step()
    assert plan is not None
    assert [(m.row, m.epoch, m.position) for m in plan.masks] == [(0, 1, len(PROMPT) - 1)]
    assert len(plan.masks[0].bits) == -(-VOCAB // 32) * 4


# --------------------------------------------------------------------------- the engine


class Engine(GrammarEngine):
    """With a call that waits for the next answer."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.news = threading.Event()
        super().__init__(folder, vocab_size, self.news.set)

    def wait(self) -> NextTokens:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            self.news.wait(1.0)
            self.news.clear()
            found = self.take()
            if found:
                assert len(found) == 1
                return found[0]
        raise AssertionError("no answer")

    def walk(self, uid: int, source: str, end_ids: list[int], tokens: list[int]) -> NextTokens:
        """Start and take these tokens, all of which must be allowed."""
        self.start(uid, source, end_ids)
        found = self.wait()
        for index, token in enumerate(tokens):
            assert (found.uid, found.index) == (uid, index)
            assert token in allowed(found)
            self.advance(uid, token)
            found = self.wait()
        return found


def allowed(found: NextTokens) -> set[int]:
    bits = int.from_bytes(found.bits, "little")
    return {i for i in range(bits.bit_length()) if bits >> i & 1}


def regex(pattern: str) -> str:
    source: str = LLMatcher.grammar_from_regex(pattern)
    return source


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine(folder, 300)
    yield engine
    engine.close()


def test_masks_follow_the_tokens(engine: Engine) -> None:
    found = engine.walk(1, regex("ab*c?"), [0, 2], byte_ids("abb"))
    assert allowed(found) == {0, 2, *byte_ids("bc")}
    assert len(found.bits) == 40  # ceil(300 / 32) words
    engine.advance(1, byte_ids("c")[0])
    found = engine.wait()
    assert allowed(found) == {0, 2}
    assert found.complete


def test_end_ids_are_the_request_s_own_and_only_where_the_grammar_may_end(engine: Engine) -> None:
    assert allowed(engine.walk(1, regex("ab*"), [0], [])) == set(byte_ids("a"))
    assert allowed(engine.walk(2, regex("ab*"), [0], byte_ids("a"))) == {0, *byte_ids("b")}
    assert allowed(engine.walk(3, regex("ab*"), [], byte_ids("a"))) == set(byte_ids("b"))
    # an end id with a text of its own is an ordinary token too
    assert allowed(engine.walk(4, regex("ab"), byte_ids("b"), byte_ids("a"))) == set(byte_ids("b"))
    last = engine.walk(5, regex("ab"), [], byte_ids("ab"))
    assert last.complete
    assert not allowed(last)


def test_characters_of_several_bytes(engine: Engine) -> None:
    found = engine.walk(1, regex("(é|😀){2}"), [0], byte_ids("é😀"))
    assert found.complete
    found = engine.walk(2, regex("[一-龥]"), [0], byte_ids("娃")[:2])
    assert allowed(found) <= set(range(3 + 0x80, 3 + 0xC0))


def test_a_tokenizer_whose_tokens_carry_spaces(tmp_path: Path) -> None:
    tokenizer = metaspace_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    engine = Engine(tmp_path, tokenizer.get_vocab_size())
    ids = [tokenizer.token_to_id(token) for token in ("a", "▁cat")]
    found = engine.walk(1, regex("[a-z]+ [a-z]+"), [0], ids)
    assert 0 in allowed(found)
    assert tokenizer.token_to_id("▁") not in allowed(found)
    engine.start(2, regex("é"), [0])
    assert "no token of the vocabulary" in (engine.wait().error or "")
    engine.close()


def test_a_bad_token_or_source_is_an_answer(engine: Engine) -> None:
    engine.start(1, "no grammar", [0])
    assert engine.wait().error
    engine.walk(2, regex("ab"), [0], [])
    engine.advance(2, byte_ids("z")[0])
    assert engine.wait().error
    assert allowed(engine.walk(3, regex("ab"), [0], [])) == set(byte_ids("a"))


def test_forgotten_requests_are_not_answered(engine: Engine) -> None:
    engine.walk(1, regex("a*"), [0], [])
    engine.forget(1)
    engine.advance(1, byte_ids("a")[0])
    engine.start(2, regex("b*"), [0])
    engine.forget(2)
    assert engine.walk(3, regex("a*"), [0], []).uid == 3
    assert engine.take() == []


def test_compiled_grammars_are_shared_and_few(engine: Engine) -> None:
    for i in range(CACHED_GRAMMARS + 3):
        engine.walk(i, regex(f"a{{{i}}}b"), [0], byte_ids("a" * i))
        # a second request with it starts from the beginning
        assert allowed(engine.walk(1000 + i, regex(f"a{{{i}}}b"), [0], [])) == set(
            byte_ids("a" if i else "b")
        )
    assert len(engine._compiled) == CACHED_GRAMMARS
