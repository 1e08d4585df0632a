"""Reported faults of health checks and counters."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.reports.support import LONG, NATIVE, Client, digits, greedy, wait_for
from tests.server import start_server

HEALTH_SECONDS = 5 * 1.0  # that a health answer may take, with slack for a loaded machine
PROBE_SECONDS = 20.0  # that a real request may take


class Watch:
    """Asks a route again and again; ``seen`` holds status and seconds of every answer."""

    def __init__(self, client: Client, path: str, pause: float) -> None:
        self.seen: list[tuple[int, float]] = []
        self._url, self._pause = client.server.url + path, pause
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with httpx.Client(timeout=60.0, trust_env=False) as http:
            while not self._done.wait(self._pause):
                begin = time.monotonic()
                self.seen.append((http.get(self._url).status_code, time.monotonic() - begin))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(60)


def counters(client: Client) -> dict[str, float]:
    """All totals of ``/metrics`` by short name."""
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            if sample.name.endswith("_total"):
                found[sample.name.removeprefix("sglang:").removesuffix("_total")] = sample.value
    return found


def running(client: Client) -> int:
    state = client.get("/server_info").json()["internal_states"][0]
    return sum(state[name] for name in ("waiting", "prefilling", "running", "draining"))


def test_hlt_01_busy_is_not_ill(tiny: Client) -> None:
    """Long prompts and huge texts at once: health and a small stream go on."""
    assert tiny.is_idle()
    # Seconds of work on an idle machine, so that no probe runs out of patience on a busy one.
    ids = [[(7 * index + place) % 900 for place in range(1000)] for index in range(2)]
    huge = "the quick brown fox jumps over the lazy dog, " * (3_000_000 // 45)
    stream = tiny.stream_text("Once", greedy(150, ignore_eos=True)).wait_chunks()
    with Watch(tiny, "/health", 0.1) as health, Watch(tiny, "/health_generate", 0.5) as probes:
        calls = [lambda i=i: tiny.post(NATIVE, {"input_ids": i, "sampling_params": greedy(1)}) for i in ids]
        calls += [lambda: tiny.post(NATIVE, {"text": huge, "sampling_params": greedy(1)})]
        calls += [lambda: tiny.post("/tokenize", {"prompt": huge})]
        answers = tiny.at_once(calls)
        while len(health.seen) <= 3:
            tiny.at_once(calls)
    assert [answer.status_code for answer in answers] == [200] * len(ids) + [400, 200]
    assert answers[-1].json()["count"] > 100_000
    stream.finish()
    assert {status for status, _ in health.seen + probes.seen} == {200}
    assert max(seconds for _, seconds in health.seen) < HEALTH_SECONDS
    assert max(seconds for _, seconds in probes.seen) < PROBE_SECONDS


def test_hlt_03_probes_do_not_pile_up(script: Client) -> None:
    sampling = greedy(400)
    assert script.is_idle()
    before = counters(script)

    def probe(http: httpx.Client) -> int:
        try:
            return http.get("/health_generate").status_code
        except httpx.TimeoutException:
            return 0

    with httpx.Client(base_url=script.server.url, timeout=0.05, trust_env=False) as http:
        streams = [script.stream_text(LONG, sampling) for _ in range(20)]
        # There are fewer rows than streams: a probe waits until one is free.
        assert wait_for(lambda: script.state()["waiting"] > 0)
        statuses = [probe(http) for _ in range(150)]
    assert set(statuses) <= {0, 200}
    assert 0 in statuses, "the server was never too busy for the client's patience"
    assert [stream.text() for stream in streams] == [digits(400)] * 20
    assert wait_for(lambda: running(script) == 0)
    assert script.flush()
    assert script.generate(LONG, sampling)["text"] == digits(400)
    # Of all the probes nothing is left in the counters either.
    assert counters(script)["num_requests"] - before["num_requests"] == 21


def test_hlt_04_counters_add_up(script: Client) -> None:
    assert script.is_idle()
    before = counters(script)
    prompts = [LONG * (3 + index) for index in range(10)]
    answers = [script.generate(text, greedy(4 + index)) for index, text in enumerate(prompts)]
    ended = []
    for index in range(3):
        stream = script.stream_text(LONG * 20, greedy(7000), rid=f"aborted-{index}").wait_chunks(3)
        script.abort(rid=f"aborted-{index}")
        ended.append(stream.finish()[-1])
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in ended} == {"abort"}
    for bad in ({"top_p": 0}, {"max_new_tokens": 10**7}):
        assert script.post(NATIVE, {"text": LONG, "sampling_params": bad}).status_code == 400
    chat = {"messages": [{"role": "user", "content": LONG}], "top_logprobs": 2}
    assert script.post("/v1/chat/completions", chat).status_code == 400
    for _ in range(5):
        assert script.get("/health_generate").status_code == 200
    after = counters(script)
    grown = {name: value - before[name] for name, value in after.items()}
    every = [answer["meta_info"] for answer in answers + ended]
    assert grown["num_requests"] == 13
    assert grown["num_aborted_requests"] == 3
    assert grown["num_refused_requests"] == 3
    assert grown["num_failed_requests"] == 0
    assert grown["prompt_tokens"] == sum(map(len, prompts)) + 60
    assert grown["prompt_tokens"] == sum(meta["prompt_tokens"] for meta in every)
    assert grown["generation_tokens"] == sum(meta["completion_tokens"] for meta in every)
    assert grown["cached_tokens"] == sum(meta["cached_tokens"] for meta in every) > 0
    assert grown["generation_loops"] == sum(sum(meta["exit_depths"]) for meta in every)


def test_hlt_06_ready_means_ready(script_model: Path) -> None:
    paths = ["/health", "/health_generate", "/get_model_info", "/v1/models"]
    ready: set[str] = set()
    refused = 0
    # The client comes first: it takes a while to make, and the server is to be seen from its first moment.
    with (
        httpx.Client(timeout=0.5, trust_env=False) as impatient,
        start_server(script_model, "--num-slots", "4096") as server,
    ):
        deadline = time.monotonic() + 60.0
        while len(ready) < len(paths):
            assert time.monotonic() < deadline, ready
            for path in paths:
                try:
                    status = impatient.get(server.url + path).status_code
                except httpx.TransportError:
                    refused += 1
                    continue
                assert status in (200, 503), (path, status)
                assert status == 200 or path not in ready, f"{path} went back to {status}"
                if status == 200 and path not in ready:
                    ready.add(path)
                    assert server.generate(LONG, **greedy(3))["text"] == digits(3), path
            time.sleep(0.02)
        assert refused
        begin = time.monotonic()
        assert server.get("/health_generate").status == 200
        assert time.monotonic() - begin < 2 * HEALTH_SECONDS
