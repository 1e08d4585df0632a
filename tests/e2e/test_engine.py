"""The offline engine: real processes, no HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ouro_sgl import Engine
from ouro_sgl.errors import ConfigError, EngineDeadError, RequestError
from tests.models import byte_ids, chain_of, rand_checkpoint, script_checkpoint
from tests.server import alive

GREEDY = {"temperature": 0.0, "max_new_tokens": 12}
EARLY = {**GREEDY, "exit_threshold": 0.7, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rand_checkpoint(tmp_path_factory.mktemp("model") / "rand")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model, num_slots=4096) as running:
        yield running


def idle(engine: Engine, seconds: float = 100.0) -> bool:
    """Whether nothing runs any more, now or soon."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if engine.flush_cache():
            return True
        time.sleep(0.02)
    return False


def essence(answer: dict[str, Any]) -> tuple[str, list[int], list[int]]:
    return answer["text"], answer["output_ids"], answer["meta_info"]["exit_depths"]


def test_one_prompt_is_one_answer(engine: Engine) -> None:
    answer = engine.generate("hello", EARLY)
    assert len(answer["output_ids"]) == 12
    depths = answer["meta_info"]["exit_depths"]
    assert depths[0] == 4
    assert len(set(depths[1:])) > 1
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    assert essence(engine.generate(input_ids=byte_ids("hello"), sampling_params=EARLY)) == essence(answer)


def test_a_list_is_answered_in_its_order(engine: Engine) -> None:
    prompts = [f"prompt {index}" for index in range(5)]
    alone = [essence(engine.generate(prompt, EARLY)) for prompt in prompts]
    assert [essence(answer) for answer in engine.generate(prompts, EARLY)] == alone
    each = [{**EARLY, "max_new_tokens": length} for length in (1, 2, 3, 4, 5)]
    assert [len(answer["output_ids"]) for answer in engine.generate(prompts, each)] == [1, 2, 3, 4, 5]


def test_progress_changes_nothing_but_the_terminal(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [f"prompt {index}" for index in range(10)]
    plain = engine.generate(prompts, EARLY)
    assert capsys.readouterr().err == ""
    shown = engine.generate(prompts, EARLY, progress=True)
    assert "10/10" in capsys.readouterr().err
    assert [essence(answer) for answer in shown] == [essence(answer) for answer in plain]
    one = engine.generate("prompt 0", EARLY, progress=True)
    assert essence(one) == essence(plain[0])
    samples = engine.generate("x", {"n": 3, "max_new_tokens": 2}, progress=True)
    assert len(samples) == 3


def test_a_stream_grows_to_the_answer(engine: Engine) -> None:
    long = {**EARLY, "max_new_tokens": 100}
    chunks = list(engine.generate("hello", long, stream=True))
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths == sorted(lengths)
    assert len(chunks) > 1
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    assert essence(chunks[-1]) == essence(engine.generate("hello", long))


def test_leaving_a_stream_aborts_it(engine: Engine) -> None:
    stream = engine.generate("hello", {**EARLY, "max_new_tokens": 800}, stream=True)
    next(stream)
    stream.close()
    assert idle(engine)


async def test_async_calls_run_together(engine: Engine) -> None:
    prompts = [f"prompt {index}" for index in range(6)]
    calls = [engine.async_generate(prompt, EARLY) for prompt in prompts]
    answers = await asyncio.gather(*calls)
    assert [essence(a) for a in answers] == [essence(engine.generate(prompt, EARLY)) for prompt in prompts]


async def test_async_stream(engine: Engine) -> None:
    last = None
    async for chunk in await engine.async_generate("hello", EARLY, stream=True):
        last = chunk
    assert last is not None
    assert essence(last) == essence(engine.generate("hello", EARLY))


async def test_cancelling_an_async_call_aborts_it(engine: Engine) -> None:
    long = {**EARLY, "max_new_tokens": 900}
    task = asyncio.create_task(engine.async_generate("hello", long))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(idle, engine)

    async def read() -> None:
        async for _ in await engine.async_generate("hello", long, stream=True):
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(idle, engine)


def test_calls_from_many_threads(engine: Engine) -> None:
    expected = essence(engine.generate("hello", EARLY))
    found: list[Any] = []

    def call() -> None:
        found.append(essence(engine.generate("hello", EARLY)))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8


def test_refusals_name_the_fault(engine: Engine) -> None:
    with pytest.raises(RequestError, match="temperature"):
        engine.generate("hello", {"temperature": -1})
    with pytest.raises(RequestError, match="temperature"):
        next(engine.generate("hello", {"temperature": -1}, stream=True))
    with pytest.raises(RequestError, match="temperature"):
        engine.generate(["a", "b"], {"temperature": -1}, progress=True)
    with pytest.raises(TypeError, match="return_logprob"):
        engine.generate("hello", GREEDY, return_logprobs=True)
    with pytest.raises(RequestError, match="text or input_ids"):
        engine.generate()


def test_options_reach_the_request(engine: Engine) -> None:
    answer = engine.generate("hello", GREEDY, return_logprob=True, rid="mine")
    assert answer["meta_info"]["id"] == "mine"
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": 30000}, "HTTP server"),
        ({"num_slot": 5}, "num_slots"),
        ({"num_slots": 0}, "--num-slots 0"),
        ({"model_path": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine(**settings)


def test_a_bad_checkpoint_is_an_error_not_a_hang(tmp_path: Path) -> None:
    folder = rand_checkpoint(tmp_path / "bad")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(EngineDeadError, match=r"model\.safetensors"):
        Engine(folder)


def test_shutdown_ends_everything(model: Path) -> None:
    engine = Engine(model, num_slots=512)
    pids = engine._processes.pids().values()
    folder = engine._processes.ipc_dir
    errors: list[Exception] = []

    def call() -> None:
        try:
            engine.generate("hello", {**EARLY, "max_new_tokens": 100})
        except RequestError as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    deadline = time.monotonic() + 100
    while not engine.get_server_info()["requests"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.shutdown()
    caller.join(100)
    assert not caller.is_alive()
    assert not any(alive(pid) for pid in pids)
    assert not folder.exists()
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.generate("hello")


def test_a_dead_process_fails_open_and_later_calls(model: Path) -> None:
    with Engine(model, num_slots=4096) as engine:
        stream = engine.generate("hello", {**EARLY, "max_new_tokens": 900}, stream=True)
        next(stream)
        os.kill(engine._processes.pids()["worker"], signal.SIGKILL)
        with pytest.raises(RequestError) as caught:
            for _ in stream:
                pass
        assert caught.value.status == 503
        with pytest.raises(RequestError):
            engine.generate("hello")


def test_two_engines_in_one_program(engine: Engine, tmp_path: Path) -> None:
    chain = chain_of([*byte_ids("ping"), *byte_ids("PONG"), 2])
    with Engine(script_checkpoint(tmp_path / "script", chain), num_slots=512) as other:
        assert other.generate("ping", GREEDY)["text"] == "PONG"
        assert engine.generate("hello", GREEDY)["output_ids"]


def test_a_program_that_just_ends_leaves_nothing(model: Path) -> None:
    code = (
        "import sys, ouro_sgl\n"
        f"engine = ouro_sgl.Engine({str(model)!r}, num_slots=512)\n"
        "assert 'torch' not in sys.modules\n"
        "print(*engine._processes.pids().values(), engine._processes.ipc_dir, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    *pids, folder = done.stdout.split()
    assert not any(alive(int(pid)) for pid in pids)
    assert not Path(folder).exists()
    assert done.stderr == ""
