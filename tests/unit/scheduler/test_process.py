"""The real scheduler process and its sockets, between a fake worker in a thread and this test."""

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from ouro_sgl.config import ServerArgs
from ouro_sgl.ipc import Edge, Receiver, Sender
from ouro_sgl.messages import (
    AbortReq,
    ControlOp,
    ControlReply,
    ControlReq,
    FinishReason,
    GenerateReq,
    RoundEvents,
    RowParams,
    SchedulerFailed,
    SchedulerReady,
    ShutdownReq,
    StepPlan,
    StopReq,
    TokenBatch,
    WorkerFailed,
    WorkerReady,
)
from ouro_sgl.scheduler.config import SchedulerConfig
from tests.utils_scheduler import FakeWorker, expected_output

ARGS = ServerArgs(context_length=200, max_queued_requests=1000)
READY = WorkerReady(4, 97, 512, 600, 8, 2, False, {"device": "cpu", "chunked_prefill_size": 16})
WAIT_MS = 100_000


class WorkerThread(threading.Thread):
    """Runs a :class:`FakeWorker` behind the worker's two sockets until it is told to stop."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", ipc_dir: Path) -> None:
        super().__init__(daemon=True)
        self.worker = FakeWorker(SchedulerConfig.resolve(ARGS, READY), random.Random(0))
        self.plans: Receiver[object] = Receiver(context, Edge.SCHEDULER_TO_WORKER, ipc_dir, bind=False)
        self.events = Sender(context, Edge.WORKER_TO_SCHEDULER, ipc_dir, bind=False)
        self.error: BaseException | None = None
        self.failing = threading.Event()  # at the next plan
        self.paused = threading.Event()
        self.stopping = threading.Event()
        self.told_to_stop = False

    def run(self) -> None:
        try:
            self.loop()
        except BaseException as error:
            self.error = error

    def loop(self) -> None:
        worker = self.worker
        self.events.send(READY)
        while not self.stopping.is_set():
            busy = not self.paused.is_set() and (worker.has_work() or worker.chunks or worker.rounds)
            message = self.plans.receive(0 if busy else 20)
            if isinstance(message, ShutdownReq):
                self.told_to_stop = True
                return
            if isinstance(message, StepPlan):
                worker.apply(message)
                if self.failing.is_set():
                    self.events.send(WorkerFailed("the device is on fire"))
                    return
            if self.paused.is_set():
                continue
            if worker.chunks:
                worker.retire_chunk()
            if worker.has_work() and len(worker.rounds) < 2:
                worker.launch_round()
            elif worker.rounds:
                worker.retire_round()
            events = worker.report()
            if events is not None:
                assert isinstance(events, RoundEvents)
                self.events.send(events)


class Client:
    """The frontend's two sockets, the scheduler's process and the worker's thread."""

    def __init__(self, ipc_dir: Path, *program: str) -> None:
        (ipc_dir / "config.json").write_bytes(msgspec.json.encode(ARGS))
        self.process = subprocess.Popen(
            [sys.executable, *(program or ("-m", "ouro_sgl.scheduler")), str(ipc_dir)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.send = Sender(self.context, Edge.FRONTEND_TO_SCHEDULER, ipc_dir, bind=False)
        self.receive: Receiver[object] = Receiver(
            self.context, Edge.SCHEDULER_TO_FRONTEND, ipc_dir, bind=False
        )
        self.worker = WorkerThread(self.context, ipc_dir)
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}

    def start(self) -> SchedulerReady:
        self.worker.start()
        ready = self.next()
        assert isinstance(ready, SchedulerReady)
        assert self.send.socket.poll(WAIT_MS, zmq.POLLOUT)
        return ready

    def next(self) -> object:
        message = self.receive.receive(WAIT_MS)
        assert message is not None, "the scheduler fell silent"
        if isinstance(message, TokenBatch):
            at = 0
            for uid, count in zip(message.uids, message.counts, strict=True):
                self.tokens.setdefault(uid, []).extend(message.token_ids[at : at + count])
                at += count
            for finished in message.finished:
                assert finished.uid not in self.ends
                self.ends[finished.uid] = finished.reason
        return message

    def until_finished(self, count: int) -> None:
        while len(self.ends) < count:
            self.next()

    def ask(self, op: ControlOp) -> ControlReply:
        self.send.send(ControlReq(77, op))
        while not isinstance(reply := self.next(), ControlReply):
            pass
        assert reply.control_id == 77
        return reply

    def close(self) -> str:
        """End everything; returns what the process wrote to standard error."""
        try:
            errors = self.process.communicate(timeout=100)[1]  # closes its standard input
        finally:
            self.process.kill()
        self.worker.stopping.set()
        if self.worker.ident is not None:
            self.worker.join(100)
        for end in (self.send, self.receive, self.worker.plans, self.worker.events):
            end.close()
        self.context.term()
        return errors


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    made = Client(tmp_path)
    yield made
    errors = made.close()
    assert made.worker.error is None
    assert "Traceback" not in errors


def request(uid: int, prompt: list[int], **params: object) -> GenerateReq:
    return GenerateReq(uid, prompt, RowParams(**{"max_new_tokens": 5, **params}))


def test_serves_over_its_sockets_and_shuts_down(client: Client) -> None:
    ready = client.start()
    assert (ready.total_loops, ready.num_slots, ready.max_rows) == (4, 600, 8)
    assert (ready.context_length, ready.served_length) == (200, 150)
    assert ready.server_info["device"] == "cpu"
    assert ready.server_info["chunked_prefill_size"] == 16
    prompts = [[uid % 7] * (1 + uid % 30) for uid in range(100)]
    for uid, prompt in enumerate(prompts):
        client.send.send(request(uid, prompt))
    client.send.send(request(100, [1] * 1000))
    client.until_finished(101)
    assert client.ends.pop(100) is FinishReason.ERROR
    assert set(client.ends.values()) == {FinishReason.LENGTH}
    for uid, prompt in enumerate(prompts):
        assert client.tokens[uid] == expected_output(prompt, RowParams(5), 4)[0]
    info = client.ask(ControlOp.INFO).info
    assert (info["requests"], info["refused"], info["generated_tokens"]) == (101, 1, 500)
    assert client.ask(ControlOp.FLUSH_CACHE).ok
    assert client.ask(ControlOp.INFO).info["free_slots"] == 600
    client.send.send(ShutdownReq())
    assert client.process.wait(100) == 0
    client.worker.join(100)
    assert client.worker.told_to_stop


def test_abort_stop_and_a_patient_flush(client: Client) -> None:
    client.start()
    client.worker.paused.set()
    client.send.send(request(0, [1, 2, 3], max_new_tokens=50))
    while client.worker.worker.plan_id == 0:
        time.sleep(0.01)
    client.send.send(AbortReq([0]))
    client.until_finished(1)
    assert client.ends[0] is FinishReason.ABORT
    started = time.monotonic()
    reply = client.ask(ControlOp.FLUSH_CACHE)  # the row cannot drain while the worker sleeps
    assert not reply.ok
    assert time.monotonic() - started >= 0.9
    client.worker.paused.clear()
    assert client.ask(ControlOp.FLUSH_CACHE).ok
    client.send.send(request(1, [1, 2, 3], max_new_tokens=100))
    while not client.tokens.get(1):
        client.next()
    client.send.send(StopReq(1, 1))
    client.until_finished(2)
    assert client.ends[1] in (FinishReason.STOP_STRING, FinishReason.LENGTH)


def test_an_idle_scheduler_checks_its_books_and_sleeps(client: Client) -> None:
    client.start()
    client.send.send(request(0, [1, 2, 3]))
    client.until_finished(1)
    time.sleep(1.3)

    def cpu_ticks() -> int:
        fields = Path(f"/proc/{client.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = cpu_ticks()
    time.sleep(1.0)
    assert cpu_ticks() - before <= 0.05 * os.sysconf("SC_CLK_TCK")
    assert Path(f"/proc/{client.process.pid}/cmdline").read_bytes().startswith(b"ouro_sgl::scheduler")


WRONG_BOOKS = """
import sys
from pathlib import Path
from ouro_sgl.errors import IntegrityError
from ouro_sgl.kvcache.pool import SlotPool
from ouro_sgl.scheduler.process import main

def check(*_):
    raise IntegrityError("slot 7 is nobody's")

SlotPool.check = check
sys.exit(main(Path(sys.argv[1])))
"""


def test_an_idle_scheduler_whose_books_are_wrong_says_so_and_ends(tmp_path: Path) -> None:
    client = Client(tmp_path, "-c", WRONG_BOOKS)
    client.start()
    message = client.next()
    assert isinstance(message, SchedulerFailed)
    assert "slot 7 is nobody's" in message.message
    assert client.process.wait(100) == 1
    client.close()


def test_a_worker_that_fails_ends_every_request(client: Client) -> None:
    client.start()
    client.worker.paused.set()
    for uid in range(12):
        client.send.send(request(uid, [uid] * 20, max_new_tokens=100))
    assert client.ask(ControlOp.INFO).info["requests"] == 12
    client.worker.failing.set()
    client.worker.paused.clear()
    while not isinstance(message := client.next(), SchedulerFailed):
        pass
    assert message.message == "the device is on fire"
    assert client.ends == dict.fromkeys(range(12), FinishReason.ERROR)
    assert client.process.wait(100) == 1


def test_a_worker_that_cannot_start_is_reported(tmp_path: Path) -> None:
    client = Client(tmp_path)
    client.worker.events.send(WorkerFailed("no weights"))
    message = client.next()
    assert isinstance(message, SchedulerFailed)
    assert message.message == "no weights"
    assert client.process.wait(100) == 1
    client.close()


@pytest.mark.parametrize("started", [False, True])
def test_ends_with_its_parent(tmp_path: Path, started: bool) -> None:
    client = Client(tmp_path)
    if started:
        client.start()
    assert client.close() == ""
    assert client.process.returncode == 0
