"""What reinforcement learning needs over HTTP: pausing, other weights, the exit gate's values."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.models import rand_checkpoint
from tests.server import Server, running_server

PATIENCE = 200.0  # seconds for an answer on a busy machine
LONG_PROMPT = "a prompt that fills more than one node of the cache"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("rollout")
    first = rand_checkpoint(folder / "first", threshold=0.7, seed=1, max_position=4096)
    return first, rand_checkpoint(folder / "second", threshold=0.7, seed=2, max_position=4096)


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Path]) -> list[list[int]]:
    """What each of the models answers to :data:`LONG_PROMPT`."""
    answers = []
    for model in models:
        with running_server(model) as server:
            answers.append(ask(server)["output_ids"])
    assert answers[0] != answers[1]
    return answers


@pytest.fixture(scope="module")
def running(models: tuple[Path, Path]) -> Iterator[Server]:
    with running_server(models[0], "--num-slots", "40000") as running:
        yield running


@pytest.fixture
def server(running: Server, models: tuple[Path, Path]) -> Server:
    """As if just started: the first model's weights, nothing cached, not paused."""
    post(running, "/pause_generation")
    first = {"model_path": str(models[0]), "weight_version": "default"}
    assert post(running, "/update_weights_from_disk", **first)[0] == 200
    post(running, "/continue_generation")
    return running


def ask(server: Server, **changes: Any) -> dict[str, Any]:
    payload = {
        "text": LONG_PROMPT,
        "sampling_params": {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0.0},
        **changes,
    }
    answer = server.post("/generate", payload, timeout=PATIENCE)
    assert answer.status == 200, answer.body
    body: dict[str, Any] = answer.json()
    return body


class Stream:
    """A stream, greedy unless ``sampling`` says otherwise, read in the background."""

    def __init__(
        self,
        server: Server,
        pool: ThreadPoolExecutor,
        max_new_tokens: int,
        *,
        return_logprob: bool = False,
        **sampling: Any,
    ) -> None:
        self.chunks: list[dict[str, Any]] = []
        self._url = server.url + "/generate"
        self._payload = {
            "text": LONG_PROMPT,
            "stream": True,
            "return_logprob": return_logprob,
            "return_exit_logprobs": return_logprob,
            "sampling_params": {
                **{"max_new_tokens": max_new_tokens, "ignore_eos": True, "temperature": 0.0},
                **sampling,
            },
        }
        self._reading: Future[None] = pool.submit(self._read)

    def _read(self) -> None:
        with (
            httpx.Client(timeout=PATIENCE, trust_env=False) as client,
            client.stream("POST", self._url, json=self._payload) as response,
        ):
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    self.chunks.append(json.loads(line[6:]))

    @property
    def tokens(self) -> int:
        return len(self.chunks[-1]["output_ids"]) if self.chunks else 0

    def wait_for_tokens(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.tokens < count:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def wait_until_still(self) -> int:
        """Tokens once none has come for a while."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            before = self.tokens
            time.sleep(0.4)
            if self.tokens == before:
                return before
        raise AssertionError("the stream goes on")

    def last(self) -> dict[str, Any]:
        self._reading.result(PATIENCE)
        return self.chunks[-1]


def post(server: Server, path: str, **body: Any) -> tuple[int, Any]:
    answer = server.post(path, body, timeout=PATIENCE)
    return answer.status, answer.json()


def state(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/server_info").json()["internal_states"][0]
    return found


def test_other_weights_between_requests(
    server: Server, models: tuple[Path, Path], expected: list[list[int]], tmp_path: Path
) -> None:
    first = ask(server)
    assert first["output_ids"] == expected[0]
    assert first["meta_info"]["weight_version"] == "default"
    assert ask(server)["meta_info"]["cached_tokens"] > 0

    broken = tmp_path / "broken"
    shutil.copytree(models[1], broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    for path in (broken, tmp_path / "nowhere", weights, tmp_path / ("n" * 300)):
        status, body = post(server, "/update_weights_from_disk", model_path=str(path))
        assert (status, body["success"]) == (400, False)
        assert body["message"]
    assert ask(server)["output_ids"] == expected[0]

    status, body = post(server, "/update_weights_from_disk", model_path=str(models[1]))
    assert (status, body["success"], body["num_paused_requests"]) == (200, True, 0)
    second = ask(server)
    assert second["output_ids"] == expected[1]
    assert second["meta_info"]["cached_tokens"] == 0
    number = second["meta_info"]["weight_version"]
    assert number.isdigit()
    assert "weight_versions" not in second["meta_info"]
    info = server.get("/model_info").json()
    assert (info["weight_version"], info["model_path"]) == (number, str(models[1]))

    named = {"model_path": str(models[0]), "weight_version": "step-7"}
    assert post(server, "/update_weights_from_disk", **named)[0] == 200
    third = ask(server)
    assert third["output_ids"] == expected[0]
    assert third["meta_info"]["weight_version"] == "step-7"


def test_pause_by_abort(server: Server, models: tuple[Path, Path], expected: list[list[int]]) -> None:
    with ThreadPoolExecutor(3) as pool:
        stream = Stream(server, pool, 3000)
        stream.wait_for_tokens(3)
        status, body = post(server, "/update_weights_from_disk", model_path=str(models[1]))
        assert (status, body["success"]) == (400, False)
        assert "pause" in body["message"]
        assert post(server, "/pause_generation")[0] == 200
        last = stream.last()
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert last["output_ids"][:16] == expected[0][: len(last["output_ids"])]

        waiting = pool.submit(ask, server)
        deadline = time.monotonic() + PATIENCE
        while not state(server)["waiting"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert state(server)["paused"]
        assert post(server, "/update_weights_from_disk", model_path=str(models[1]))[0] == 200
        assert not waiting.done()
        status, body = post(server, "/continue_generation")
        assert (status, body["status"]) == (200, "ok")
        answer = waiting.result(PATIENCE)
    assert answer["output_ids"] == expected[1]
    assert answer["meta_info"]["weight_version"].isdigit()


def test_pause_in_place(server: Server, models: tuple[Path, Path], expected: list[list[int]]) -> None:
    with ThreadPoolExecutor(3) as pool:
        streams = [Stream(server, pool, 700), Stream(server, pool, 700, regex="[a-z]{2000}")]
        for stream in streams:
            stream.wait_for_tokens(20)
        assert post(server, "/pause_generation", mode="in_place")[0] == 200
        counts = [stream.wait_until_still() for stream in streams]
        assert all(20 <= count < 700 for count in counts)
        assert server.post("/flush_cache", {}).status == 400
        update = {"model_path": str(models[1]), "weight_version": "next"}
        status, body = post(server, "/update_weights_from_disk", **update)
        assert (status, body["num_paused_requests"]) == (200, 2)
        post(server, "/continue_generation")
        lasts = [stream.last() for stream in streams]
        # a fresh request sees nothing of the old weights
        fresh = ask(server)
    assert fresh["output_ids"] == expected[1]
    assert fresh["meta_info"]["weight_version"] == "next"
    for last in lasts:
        assert last["meta_info"]["completion_tokens"] == 700
        assert last["meta_info"]["weight_versions"] == ["default", "next"]
        assert last["meta_info"]["weight_version"] == "next"
    assert lasts[0]["output_ids"][:16] == expected[0]
    assert lasts[1]["text"].isalpha()


def test_pause_in_place_alone_changes_nothing(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        alone = Stream(server, pool, 400).last()
        stream = Stream(server, pool, 400)
        for count in (20, 60):
            stream.wait_for_tokens(count)
            post(server, "/pause_generation", mode="in_place")
            stream.wait_until_still()
            post(server, "/continue_generation")
        last = stream.last()
    assert last["output_ids"] == alone["output_ids"]
    assert last["meta_info"]["exit_depths"] == alone["meta_info"]["exit_depths"]
    assert "weight_versions" not in last["meta_info"]


def wait_until_empty(server: Server) -> None:
    """Every row and slot is free, or holds a cached prompt."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = state(server)
        if found["free_rows"] == found["rows"]:
            break
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    assert (found["running"], found["prefilling"], found["draining"], found["reserved_slots"]) == (0, 0, 0, 0)
    assert found["free_slots"] + found["evictable_slots"] == found["num_slots"]


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "sampling_seed": 11, "top_p": 0.9},
    {"temperature": 0.8, "sampling_seed": 12, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"exit_mode": "ouro_delayed", "exit_threshold": 0.5},
    {"regex": "[a-z]{2000}"},
]


def test_pause_retract_alone_changes_nothing(server: Server) -> None:
    def start() -> list[Stream]:
        return [Stream(server, pool, 300, return_logprob=True, **sampling) for sampling in SAMPLINGS]

    with ThreadPoolExecutor(len(SAMPLINGS)) as pool:
        alone = [stream.last() for stream in start()]
        before = state(server)["retractions"]
        streams = start()
        for stream in streams:
            stream.wait_for_tokens(20)
        assert post(server, "/pause_generation", mode="retract")[0] == 200
        counts = [stream.wait_until_still() for stream in streams]
        assert all(20 <= count < 300 for count in counts)
        wait_until_empty(server)
        assert (state(server)["waiting"], state(server)["paused"]) == (len(streams), True)
        assert state(server)["retractions"] == before + len(streams)
        assert server.post("/flush_cache", {}).status == 400
        assert post(server, "/continue_generation")[0] == 200
        lasts = [stream.last() for stream in streams]
    names = ("finish_reason", "exit_depths", "output_token_logprobs", "exit_logprobs", "completion_tokens")
    for stream, last, expected in zip(streams, lasts, alone, strict=True):
        assert (last["output_ids"], last["text"]) == (expected["output_ids"], expected["text"])
        for name in names:
            assert last["meta_info"][name] == expected["meta_info"][name]
        assert last["meta_info"]["num_retractions"] == 1
        assert "weight_versions" not in last["meta_info"]
        lengths = [len(chunk["output_ids"]) for chunk in stream.chunks]
        assert lengths == sorted(lengths)
        for chunk in stream.chunks:
            assert expected["text"].startswith(chunk["text"])
    wait_until_empty(server)
    assert server.post("/flush_cache", {}).status == 200
    assert state(server)["free_slots"] == state(server)["num_slots"]


def test_pause_retract_computes_everything_again_with_other_weights(
    server: Server, models: tuple[Path, Path]
) -> None:
    full = {"max_new_tokens": 250, "ignore_eos": True, "temperature": 0.0, "exit_threshold": 1.0}
    before = state(server)["generated_tokens"]
    with ThreadPoolExecutor(2) as pool:
        stream = Stream(server, pool, 250, exit_threshold=1.0)
        stream.wait_for_tokens(20)
        post(server, "/pause_generation", mode="retract")
        kept = state(server)["generated_tokens"] - before  # all that may still be on the way
        stream.wait_for_tokens(kept)
        waiting = pool.submit(ask, server)  # new requests wait too
        update = {"model_path": str(models[1]), "weight_version": "next"}
        status, body = post(server, "/update_weights_from_disk", **update)
        assert (status, body["success"], body["num_paused_requests"]) == (200, True, 1)
        assert not waiting.done()
        post(server, "/continue_generation")
        last = stream.last()
        assert waiting.result(PATIENCE)["meta_info"]["num_retractions"] == 0
    meta = last["meta_info"]
    assert (meta["weight_version"], meta["weight_versions"]) == ("next", ["default", "next"])
    assert (meta["num_retractions"], meta["completion_tokens"]) == (1, 250)
    # Nothing is left of the old weights but the tokens: the new ones go on from them as from a prompt.
    # Tokens that run all loops have the K/V that they have in a prompt, up to rounding.
    prompt = post(server, "/tokenize", prompt=LONG_PROMPT)[1]["tokens"]
    fresh = ask(server, text=None, input_ids=prompt + last["output_ids"][:kept], sampling_params=full)
    assert last["output_ids"][kept:] == fresh["output_ids"][: 250 - kept]


@pytest.mark.parametrize("end", ["abort", "disconnect", "pause"])
def test_a_retracted_request_can_end(server: Server, end: str) -> None:
    with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
        payload = {
            "rid": "gone",
            "text": LONG_PROMPT,
            "stream": True,
            "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True},
        }
        with client.stream("POST", server.url + "/generate", json=payload) as response:
            lines = response.iter_lines()
            next(line for line in lines if line)
            post(server, "/pause_generation", mode="retract")
            if end == "abort":
                assert server.post("/abort_request", {"rid": "gone"}).status == 200
            elif end == "pause":
                post(server, "/pause_generation", mode="abort")
            if end != "disconnect":
                last = json.loads([line for line in lines if line][-2][len("data: ") :])
                assert last["meta_info"]["finish_reason"]["type"] == "abort"
                assert last["meta_info"]["num_retractions"] == 1
    deadline = time.monotonic() + PATIENCE
    while state(server)["waiting"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    wait_until_empty(server)
    post(server, "/continue_generation")
    assert ask(server)["meta_info"]["completion_tokens"] == 16


def test_refusals_and_exit_gate_values(server: Server, models: tuple[Path, Path]) -> None:
    assert post(server, "/pause_generation", mode="nap")[0] == 400
    assert post(server, "/update_weights_from_disk")[0] == 400
    keep = {"model_path": str(models[0]), "flush_cache": False}
    assert post(server, "/update_weights_from_disk", **keep)[0] == 400

    # The values decide: a token leaves at the first loop at which the exit probability has reached q.
    threshold = 0.7
    answer = ask(server, return_exit_logprobs=True)
    meta = answer["meta_info"]
    assert answer["output_ids"] == ask(server)["output_ids"]
    assert [len(values) for values in meta["exit_logprobs"]] == meta["exit_depths"]
    assert len(set(meta["exit_depths"][1:])) > 1
    for values in meta["exit_logprobs"][1:]:
        stay = 1.0
        for loop, value in enumerate(values, start=1):
            assert 0.0 <= value <= 1.0
            stay *= 1.0 - value
            left = 1.0 - stay >= threshold - 1e-6 or loop == 4
            assert left == (loop == len(values)) or abs(1.0 - stay - threshold) < 1e-5
    full = ask(
        server, return_exit_logprobs=True, sampling_params={"max_new_tokens": 3, "exit_threshold": 1.0}
    )
    assert [len(values) for values in full["meta_info"]["exit_logprobs"]] == [4, 4, 4]
    assert "exit_logprobs" not in ask(server)["meta_info"]
