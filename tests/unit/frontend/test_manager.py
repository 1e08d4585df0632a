"""The core of the frontend against a mock scheduler, over the real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ouro_sgl.config import ServerArgs
from ouro_sgl.errors import RequestError
from ouro_sgl.frontend.manager import MAX_LOGPROBS, TokenizerManager
from ouro_sgl.frontend.sampling import mix_seed
from ouro_sgl.frontend.schema import GenerateBody
from ouro_sgl.messages import (
    AbortReq,
    Finished,
    FinishReason,
    GenerateReq,
    ShutdownReq,
    Started,
    StopReq,
    TokenBatch,
)
from tests.frontend_server import VOCAB_SIZE, write_echo_checkpoint
from tests.mock_scheduler import SLOW_ROUND, MockScheduler, exit_depth
from tests.models import byte_ids

Pair = tuple[TokenizerManager, MockScheduler]

LONG = {"max_new_tokens": 200}  # with slow rounds it runs until the test lets it end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_echo_checkpoint(tmp_path_factory.mktemp("echo"))


@contextlib.asynccontextmanager
async def running(folder: Path, settings: dict[str, Any] | None = None, **mock: Any) -> AsyncIterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="ouro") as name:
        scheduler = MockScheduler(Path(name), VOCAB_SIZE, **mock)
        scheduler.start()
        manager = TokenizerManager(ServerArgs(model_path=str(folder), **(settings or {})), Path(name))
        manager.start()
        try:
            async with asyncio.timeout(100):
                await manager.ready.wait()
            yield manager, scheduler
        finally:
            manager.close()
            scheduler.stop()


@pytest.fixture
async def pair(folder: Path) -> AsyncIterator[Pair]:
    async with running(folder) as both:
        yield both


@pytest.fixture
async def slow_pair(folder: Path) -> AsyncIterator[Pair]:
    async with running(folder, round_seconds=SLOW_ROUND) as both:
        yield both


async def wait_for(condition: Any) -> None:
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.005)


async def exhaust(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass


def ask(text: Any = "hello", **fields: Any) -> dict[str, Any]:
    sampling = fields.pop("sampling_params", {"max_new_tokens": 8})
    return {"text": text, "sampling_params": sampling, **fields}


async def test_a_plain_answer(pair: Pair) -> None:
    manager, scheduler = pair
    answer = await manager.generate(ask("hello", rid="r"))
    meta = answer["meta_info"]  # type: ignore[call-overload]
    assert answer["text"] == "hellohel"  # type: ignore[call-overload]
    assert answer["output_ids"] == byte_ids("hellohel")  # type: ignore[call-overload]
    assert meta.pop("e2e_latency") > 0
    depths = [exit_depth(index) for index in range(8)]
    assert meta == {
        "id": "r",
        "finish_reason": {"type": "length", "length": 8},
        "prompt_tokens": 5,
        "completion_tokens": 8,
        "cached_tokens": 2,
        "num_retractions": 0,
        "weight_version": "default",
        "exit_depths": depths,
        "mean_exit_depth": sum(depths) / 8,
    }
    (request,) = scheduler.of_type(GenerateReq)
    assert (request.input_ids, request.extra_key, request.priority) == (byte_ids("hello"), None, 0)


async def test_nothing_to_generate(pair: Pair) -> None:
    answer: Any = await pair[0].generate(
        ask(sampling_params={"max_new_tokens": 0}, return_prompt_token_ids=True)
    )
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert answer["prompt_token_ids"] == byte_ids("hello")
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert answer["meta_info"]["mean_exit_depth"] is None


async def test_a_stream_is_cumulative(pair: Pair) -> None:
    chunks = [chunk async for chunk in pair[0].stream(ask("hi 😀<|im_end|>", sampling_params={}))]
    texts = [chunk["text"] for chunk in chunks]
    assert texts[-1] == "hi 😀"
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert not any("\ufffd" in text for text in texts)
    assert [c["meta_info"]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    for chunk in chunks:  # later tokens do not reach into a chunk that was handed out
        assert len(chunk["output_ids"]) == len(chunk["meta_info"]["exit_depths"])
        assert chunk["meta_info"]["completion_tokens"] == len(chunk["output_ids"])
    assert [len(chunk["output_ids"]) for chunk in chunks] == sorted({len(c["output_ids"]) for c in chunks})


async def test_a_slow_reader_gets_the_newest_state(pair: Pair) -> None:
    manager, _ = pair
    chunks = []
    async for chunk in manager.stream(ask(sampling_params={"max_new_tokens": 200})):
        chunks.append(chunk)
        await asyncio.sleep(0.1)
    assert chunks[-1]["meta_info"]["completion_tokens"] == 200
    assert len(chunks) < 100


async def test_stream_interval(pair: Pair) -> None:
    sampling = {"max_new_tokens": 21, "stream_interval": 5}
    chunks = [chunk async for chunk in pair[0].stream(ask(sampling_params=sampling))]
    counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert counts[0] >= 1
    assert counts[-1] == 21
    assert all(after - before >= 5 for before, after in itertools.pairwise(counts[:-1]))


async def test_batches_are_grouped_by_prompt(pair: Pair) -> None:
    manager, scheduler = pair
    answers: Any = await manager.generate(
        ask(["ab", "cd"], rid="job", sampling_params={"max_new_tokens": 2, "n": 2, "sampling_seed": 9})
    )
    assert [answer["text"] for answer in answers] == ["ab", "ab", "cd", "cd"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["job_0", "job_1", "job_2", "job_3"]
    requests = scheduler.of_type(GenerateReq)
    first, second, third, fourth = requests
    assert [request.leader for request in requests] == [None, first.uid, None, third.uid]
    assert [request.params.seed for request in requests] == [9, mix_seed(9, 1)] * 2
    assert len({request.uid for request in requests}) == 4
    assert (second.input_ids, fourth.input_ids) == (byte_ids("ab"), byte_ids("cd"))
    assert scheduler.samples == 2  # a prompt is sent once


async def test_prompts_without_a_seed_get_their_own(pair: Pair) -> None:
    manager, scheduler = pair
    await manager.generate(ask(["a", "a"]))
    first, second = scheduler.of_type(GenerateReq)
    assert first.params.seed != second.params.seed


async def test_a_stream_of_several_sequences_has_indices(pair: Pair) -> None:
    last: dict[int, Any] = {}
    async for chunk in pair[0].stream(ask(["ab", "cd"], sampling_params={"max_new_tokens": 4, "n": 2})):
        last[chunk["index"]] = chunk
    assert {index: chunk["text"] for index, chunk in last.items()} == {
        0: "abab",
        1: "abab",
        2: "cdcd",
        3: "cdcd",
    }
    assert all(chunk["meta_info"]["finish_reason"]["type"] == "length" for chunk in last.values())


async def test_a_stop_string_is_reported_to_the_scheduler(pair: Pair) -> None:
    manager, scheduler = pair
    sampling = {"max_new_tokens": 200, "stop": ["DEF", "zz"]}
    texts = [chunk["text"] async for chunk in manager.stream(ask("abcDEFx", sampling_params=sampling))]
    assert texts[-1] == "abc"
    assert not any("D" in text for text in texts)
    (stop,) = scheduler.of_type(StopReq)
    assert stop.num_tokens == 6
    answer: Any = await manager.generate(ask("abcDEFx", sampling_params=sampling))
    assert answer["text"] == "abc"
    assert answer["meta_info"]["completion_tokens"] == 6


@pytest.mark.parametrize("stream", [False, True])
async def test_stops_that_take_too_long_end_their_call_alone(
    pair: Pair, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ouro_sgl.frontend.stops.MAX_DEBT", 0.0)
    monkeypatch.setattr("ouro_sgl.frontend.stops.SECONDS_PER_LOOK", 0.0)
    manager, scheduler = pair
    hard = ask("hard", sampling_params={"max_new_tokens": 200, "stop_regex": "[0-9]", "n": 2})
    other = asyncio.create_task(manager.generate(ask("hello")))
    with pytest.raises(RequestError, match="takes too long") as caught:
        await (exhaust(manager.stream(hard)) if stream else manager.generate(hard))
    assert caught.value.status == 400
    answer: Any = await other
    assert answer["text"] == "hellohel"
    await wait_for(lambda: scheduler.of_type(AbortReq))
    ended = [r.uid for r in scheduler.of_type(GenerateReq) if r.input_ids == byte_ids("hard")]
    assert sorted(scheduler.of_type(AbortReq)[0].uids) == sorted(ended)


async def test_logprobs(pair: Pair) -> None:
    answer: Any = await pair[0].generate(
        ask(return_logprob=True, logprob_start_len=1, top_logprobs_num=2, token_ids_logprob=[7])
    )
    meta = answer["meta_info"]
    ids = byte_ids("hello")
    assert meta["input_token_logprobs"] == [[-(p + 1) / 4, ids[p], None] for p in range(1, 5)]
    assert [value for value, _, _ in meta["output_token_logprobs"]] == [-(i + 1) / 8 for i in range(8)]
    assert len(meta["output_top_logprobs"]) == 8
    assert meta["output_token_ids_logprobs"][0] == [[-9999.0, 7, None]]
    json.dumps(answer, allow_nan=False)


async def test_request_ids_are_free_again(pair: Pair) -> None:
    manager, _ = pair
    stream = manager.stream(ask(rid="x", sampling_params={"max_new_tokens": 200}))
    await anext(stream)
    with pytest.raises(RequestError, match="'x' is in use"):
        await manager.generate(ask("b", rid="x"))
    with pytest.raises(RequestError, match="'x' is in use"):
        await manager.generate(ask(["a", "b"], rid="x"))
    await stream.aclose()  # type: ignore[attr-defined]
    assert (await manager.generate(ask("b", rid="x")))["text"] == "bbbbbbbb"  # type: ignore[call-overload]


async def test_colliding_names_within_a_call(pair: Pair) -> None:
    with pytest.raises(RequestError, match="not unique"):
        await pair[0].generate(ask(["a", "b"], rid=["y", "y_0"], sampling_params={"n": 2}))


async def test_abort_by_exact_id(slow_pair: Pair) -> None:
    manager, scheduler = slow_pair
    long = asyncio.create_task(manager.generate(ask(rid="ab", sampling_params=LONG)))
    short = asyncio.create_task(manager.generate(ask(rid="a", sampling_params=LONG)))
    await wait_for(lambda: len(scheduler.of_type(GenerateReq)) == 2)
    manager.abort("a")
    manager.abort("unknown")
    answer: Any = await short
    scheduler.round_seconds = 0.001
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert ("hello" * 40).startswith(answer["text"])
    finished: Any = await long
    assert finished["meta_info"]["completion_tokens"] == 200


@pytest.mark.parametrize("fields", [{"text": ["a", "b"]}, {"text": "a", "n": 3}])
async def test_abort_by_the_name_of_a_group(slow_pair: Pair, fields: dict[str, Any]) -> None:
    manager, scheduler = slow_pair
    sampling = {**LONG, "n": fields.get("n", 1)}
    call = asyncio.create_task(manager.generate(ask(fields["text"], rid="g", sampling_params=sampling)))
    await wait_for(lambda: scheduler.of_type(GenerateReq))
    manager.abort("g")
    answers: Any = await call
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}


async def test_abort_all_and_waiting_requests(folder: Path) -> None:
    async with running(folder, max_rows=1, round_seconds=SLOW_ROUND) as (manager, scheduler):
        calls = [
            asyncio.create_task(manager.generate(ask(rid=rid, sampling_params=LONG)))
            for rid in ("runs", "waits")
        ]
        await wait_for(lambda: len(scheduler.of_type(GenerateReq)) == 2)
        manager.abort("waits")
        waited: Any = await calls[1]
        assert waited["text"] == ""
        assert waited["meta_info"]["prompt_tokens"] == 5
        assert "before prefill" in waited["meta_info"]["finish_reason"]["message"]
        manager.abort(abort_all=True)
        ran: Any = await calls[0]
        assert ran["meta_info"]["finish_reason"]["type"] == "abort"


async def test_leaving_a_call_aborts_it(slow_pair: Pair) -> None:
    manager, scheduler = slow_pair
    stream = manager.stream(ask(["a", "b"], sampling_params=LONG))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    call = asyncio.create_task(manager.generate(ask(sampling_params=LONG)))
    await wait_for(lambda: len(scheduler.of_type(GenerateReq)) == 3)
    call.cancel()
    await wait_for(lambda: sum(len(message.uids) for message in scheduler.of_type(AbortReq)) == 3)
    await wait_for(lambda: not manager._running)


async def test_a_refusal_of_the_scheduler_ends_the_whole_call(pair: Pair) -> None:
    manager, _ = pair
    sampling = {"max_new_tokens": 200}
    with pytest.raises(RequestError, match="queue is full") as refusal:
        await manager.generate(ask(["a", "b"], extra_key=["", "refuse"], sampling_params=sampling))
    assert refusal.value.status == 503
    with pytest.raises(RequestError, match="not finite") as failure:
        await manager.generate(ask(extra_key="break"))
    assert failure.value.status == 500
    await wait_for(lambda: not manager._running)


async def test_one_bad_prompt_fails_the_batch_before_anything_runs(pair: Pair) -> None:
    manager, scheduler = pair
    for texts in (["a", ""], ["a", "x" * 300], ["a", "x" * 100_000]):
        with pytest.raises(RequestError):
            await manager.generate(ask(texts, rid="bad"))
    assert not scheduler.of_type(GenerateReq)
    assert not manager._names


async def test_log_probabilities_are_limited_over_the_whole_call(pair: Pair) -> None:
    manager, scheduler = pair
    tops = {"return_logprob": True, "top_logprobs_num": VOCAB_SIZE, "token_ids_logprob": [1] * VOCAB_SIZE}
    tokens = MAX_LOGPROBS // (2 * VOCAB_SIZE)  # that they may be asked for
    fits = tokens // 100
    few: Any = await manager.generate(ask(sampling_params={"max_new_tokens": 100, "n": 2}, **tops))
    assert len(few[1]["meta_info"]["output_top_logprobs"][99]) == VOCAB_SIZE
    before = len(scheduler.of_type(GenerateReq))
    with pytest.raises(RequestError, match=f"more than {MAX_LOGPROBS}"):
        await manager.generate(ask(sampling_params={"max_new_tokens": 100, "n": fits + 1}, **tops))
    scored = ask(["a" * 200] * (tokens // 200 + 1), sampling_params={"max_new_tokens": 0}, **tops)
    with pytest.raises(RequestError, match=f"more than {MAX_LOGPROBS}"):
        await manager.generate({**scored, "logprob_start_len": 0})
    assert len(scheduler.of_type(GenerateReq)) == before


async def test_prompt_limits(pair: Pair) -> None:
    manager, _ = pair
    one = {"max_new_tokens": 1}
    assert await manager.generate({"input_ids": [VOCAB_SIZE - 1] * 255, "sampling_params": one})
    for payload, reason in (
        ({"input_ids": [3] * 256, "sampling_params": one}, "256"),
        ({"input_ids": [3] * 100_000, "sampling_params": one}, "100000"),
        ({"input_ids": [VOCAB_SIZE], "sampling_params": one}, str(VOCAB_SIZE)),
        ({"text": "", "sampling_params": one}, "empty"),
        ({"input_ids": [[]], "sampling_params": one}, "empty"),
        ({"text": "ab", "return_logprob": True, "logprob_start_len": 3}, "logprob_start_len"),
    ):
        with pytest.raises(RequestError, match=reason):
            await manager.generate(payload)


async def test_long_texts_are_tokenized_beside_the_loop(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(folder, context_length=100_000, served_length=100_000) as (manager, _):
        text = "hello " * 5000
        turned = threading.Event()
        inner = manager.tokenizer.encode

        def encode(text: str) -> list[int]:
            assert turned.wait(50), "the loop stood still"
            return inner(text)

        monkeypatch.setattr(manager.tokenizer, "encode", encode)
        call = asyncio.create_task(manager.generate(ask(text, sampling_params={"max_new_tokens": 1})))
        await asyncio.sleep(0.01)
        turned.set()
        answer: Any = await call
        assert answer["meta_info"]["prompt_tokens"] == len(text)


async def test_nothing_is_accepted_before_the_start_and_after_the_end(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ouro") as name:
        scheduler = MockScheduler(Path(name), VOCAB_SIZE, ready=False)
        scheduler.start()
        manager = TokenizerManager(ServerArgs(model_path=str(folder)), Path(name))
        manager.start()
        with pytest.raises(RequestError, match="starting") as refusal:
            await manager.generate(ask())
        assert refusal.value.status == 503
        scheduler.announce()
        await wait_for(manager.ready.is_set)
        await manager.generate(ask())
        await manager.drain(0, asyncio.Event())
        with pytest.raises(RequestError, match="shutting down"):
            await manager.generate(ask())
        manager.close()
        scheduler.join(100)
        assert scheduler.of_type(ShutdownReq)
        scheduler.stop()


async def test_every_call_ends_when_the_scheduler_fails(slow_pair: Pair) -> None:
    manager, scheduler = slow_pair
    call = asyncio.create_task(manager.generate(ask(sampling_params=LONG)))
    stream = manager.stream(ask(sampling_params=LONG))
    await anext(stream)
    scheduler.break_down("the worker is dead")
    for waiting in (call, exhaust(stream), manager.generate(ask()), manager.flush_cache()):
        with pytest.raises(RequestError, match="the worker is dead") as failure:
            await asyncio.wait_for(waiting, 100)  # type: ignore[arg-type]
        assert failure.value.status == 503


async def test_flush_cache_and_info(slow_pair: Pair) -> None:
    manager, _ = slow_pair
    assert (await manager.flush_cache()).ok
    stream = manager.stream(ask(sampling_params=LONG))
    await anext(stream)
    reply = await manager.flush_cache()
    assert (reply.ok, reply.message) == (False, "1 requests run")
    assert (await manager.scheduler_info())["running"] == 1
    await stream.aclose()  # type: ignore[attr-defined]


async def test_probes_share_a_request_and_are_not_counted(pair: Pair) -> None:
    manager, scheduler = pair
    assert await asyncio.gather(*[manager.probe(5) for _ in range(20)]) == [True] * 20
    assert len(scheduler.of_type(GenerateReq)) == 1
    assert "sglang:num_requests_total{model_name=" in manager.metrics.render().decode()
    assert counters(manager)["num_requests"] == 0
    assert counters(manager)["generation_tokens"] == 0


async def test_a_probe_that_gets_no_answer_fails(folder: Path) -> None:
    async with running(folder, max_rows=0) as (manager, _):
        assert not await manager.probe(0.05)
        await wait_for(lambda: not manager._running)


async def test_a_busy_server_is_not_ill(folder: Path) -> None:
    async with running(folder, max_rows=1) as (manager, scheduler):
        with scheduler.slowly():
            call = asyncio.create_task(manager.generate(ask(rid="r", sampling_params=LONG)))
            await wait_for(lambda: len(scheduler.of_type(GenerateReq)) == 1)
            assert await manager.probe(10)  # its request waits all the time
            probe = asyncio.create_task(manager.probe(10))
            await wait_for(lambda: len(scheduler.of_type(GenerateReq)) == 3)
            uid = scheduler.of_type(GenerateReq)[-1].uid
            full = Finished(uid, FinishReason.ERROR, 0, message="the queue is full", status=503)
            scheduler.inject(TokenBatch(finished=[full]))
            assert await probe
            assert not call.done()
            manager.abort("r")
            await call
        await wait_for(lambda: not manager._running)


async def test_a_probe_ends_with_the_server(folder: Path) -> None:
    async with running(folder, max_rows=0) as (manager, scheduler):
        probe = asyncio.create_task(manager.probe(1000))
        await wait_for(lambda: len(scheduler.of_type(GenerateReq)) == 1)
        manager.fail("gone")
        assert not await asyncio.wait_for(probe, 100)


async def test_a_probe_that_ran_and_failed_fails(folder: Path) -> None:
    async with running(folder, max_rows=0) as (manager, scheduler):
        probe = asyncio.create_task(manager.probe(100))
        await wait_for(lambda: len(scheduler.of_type(GenerateReq)) == 1)
        uid = scheduler.of_type(GenerateReq)[0].uid
        failed = Finished(uid, FinishReason.ERROR, 0, message="not finite")
        scheduler.inject(TokenBatch(started=[Started(uid, 0)], finished=[failed]))
        assert not await asyncio.wait_for(probe, 50)


async def test_a_probe_that_is_aborted_with_all_others_asks_again(folder: Path) -> None:
    async with running(folder, max_rows=0) as (manager, scheduler):
        probe = asyncio.create_task(manager.probe(100))
        for count in (1, 2):
            await wait_for(lambda count=count: len(scheduler.of_type(GenerateReq)) == count)  # type: ignore[misc]
            manager.abort(abort_all=True)
        await wait_for(lambda: len(scheduler.of_type(GenerateReq)) == 3)
        uid = scheduler.of_type(GenerateReq)[-1].uid
        scheduler.inject(
            TokenBatch([Started(uid, 0)], [uid], [1], [0], [4], {}, [Finished(uid, FinishReason.LENGTH, 1)])
        )
        assert await asyncio.wait_for(probe, 50)
        assert not manager._running


def counters(manager: TokenizerManager) -> dict[str, float]:
    found = {}
    for line in manager.metrics.render().decode().splitlines():
        name, _, value = line.rpartition(" ")
        if not line.startswith("#") and "_total" in name:
            found[name.split(":")[1].split("_total")[0]] = float(value)
    return found


async def test_counters_add_up(pair: Pair) -> None:
    manager, scheduler = pair
    for _ in range(3):
        await manager.generate(ask("hello"))
    await manager.generate(ask(["ab", "cd"], sampling_params={"max_new_tokens": 3}))
    with scheduler.slowly():
        call = asyncio.create_task(manager.generate(ask("xyz", rid="r", sampling_params=LONG)))
        await wait_for(lambda: len(scheduler.of_type(GenerateReq)) == 6)
        manager.abort("r")
        aborted: Any = await call
    with pytest.raises(RequestError):
        await manager.generate(ask(sampling_params={"top_p": 0}))
    with pytest.raises(RequestError):
        await manager.generate(ask(extra_key="break"))
    with pytest.raises(RequestError):
        await manager.generate(ask(extra_key="refuse"))  # by the scheduler
    found = counters(manager)
    kept = aborted["meta_info"]["completion_tokens"]
    assert found["num_requests"] == 7
    assert found["num_aborted_requests"] == 1
    assert found["num_failed_requests"] == 1
    assert found["num_refused_requests"] == 2
    assert found["prompt_tokens"] == 3 * 5 + 2 * 2 + 3
    assert found["generation_tokens"] == 3 * 8 + 2 * 3 + kept
    # An abort tells nothing about the cache.
    assert found["cached_tokens"] == 3 * 2 + 2 * 1


async def test_exit_traces_are_recorded_and_replayed(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "traces.json"
    async with running(folder, {"record_exit_trace": str(path)}) as (manager, _):
        await manager.generate(ask(rid="first"))
        with pytest.raises(RequestError):
            await manager.generate(ask(rid="second", extra_key="refuse"))
        await manager.probe(5)
    recorded = [exit_depth(index) for index in range(8)]
    assert json.loads(path.read_text()) == {"depths_by_request": {"first": recorded}}
    async with running(folder, {"exit_trace": str(path), "exit_mode": "trace"}) as (manager, scheduler):
        with pytest.raises(RequestError, match="exit_trace or trace_id"):
            await manager.generate(ask())
        await manager.generate(ask(sampling_params={"max_new_tokens": 5, "trace_id": "first"}))
        (request,) = scheduler.of_type(GenerateReq)
        assert request.params.exit_trace == recorded[:5]
        assert await manager.probe(5)


async def test_a_message_that_makes_no_sense_ends_every_call(slow_pair: Pair) -> None:
    manager, scheduler = slow_pair
    stream = manager.stream(ask(sampling_params=LONG))
    await anext(stream)
    scheduler.inject(TokenBatch(uids=[1, 2], counts=[1]))
    with pytest.raises(RequestError, match="internal error"):
        await asyncio.wait_for(exhaust(stream), 100)


async def test_a_slow_reader_of_a_batch_sees_every_end_once(slow_pair: Pair) -> None:
    """Sequences that end while the snapshot of another one is on its way."""
    manager, scheduler = slow_pair
    ends, snapshots = [], 0
    payload = {"text": ["abcd", "efgh", "ijkl"], "sampling_params": LONG}
    async for answer in manager.stream(payload):
        snapshots += 1
        if answer["meta_info"]["finish_reason"] is not None:
            ends.append(answer["index"])
        if snapshots == 1:
            rows = [sequence for _, sequence in manager._running.values()]  # all get something to show
            await wait_for(lambda rows=rows: all(sequence.output_ids for sequence in rows))
        elif snapshots == 2:
            assert not ends
            scheduler.round_seconds = 0.001
            await wait_for(lambda: not manager._running)
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("by_name", ["a", "g", None], ids=["rid", "group", "all"])
async def test_an_abort_reaches_a_call_that_is_still_tokenized(pair: Pair, by_name: str | None) -> None:
    manager, _ = pair
    released = asyncio.Event()
    tokenize = manager._tokenize

    async def slowly(*arguments: Any) -> None:
        await released.wait()
        await tokenize(*arguments)

    manager._tokenize = slowly  # type: ignore[method-assign]
    rid: Any = ["a", "b"] if by_name == "a" else "g"
    call = asyncio.ensure_future(
        manager.generate(ask(["x", "y"], rid=rid, sampling_params={"max_new_tokens": 200}))
    )
    await asyncio.sleep(0.01)
    manager.abort(by_name, abort_all=by_name is None)
    manager.abort("unknown")
    released.set()
    answers: Any = await call
    reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert reasons == (["abort", "length"] if by_name == "a" else ["abort", "abort"])
    # nothing is remembered: an old abort does not hit a later call of the same name
    later: Any = await manager.generate(ask(rid="a", sampling_params={"max_new_tokens": 2}))
    assert later["meta_info"]["finish_reason"]["type"] == "length"


async def test_an_abort_reaches_a_call_that_is_still_read(pair: Pair) -> None:
    manager, _ = pair
    body = GenerateBody(text="x", rid="r", sampling_params={"max_new_tokens": 200})
    with manager.preparing() as since:
        manager.abort("r")
        call = await manager.submit(body, since=since)
    answer: Any = await call.answer()
    manager.release(call)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    later = await manager.submit(body)
    answer = await later.answer()
    manager.release(later)
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
