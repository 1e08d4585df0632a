"""ZMQ sockets between the three processes: names, options, encoding.

All sockets are ``ipc://`` files in one private directory (mode 0700, made by the launcher). Each
edge is one PUSH/PULL pair per direction, and the scheduler binds all four of its ends. There is no
high-water mark: a send never drops and never blocks while the peer lives.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from ouro_sgl.messages import FrontendMessage, PlanMessage, SchedulerMessage, WorkerMessage

T = TypeVar("T")


class Edge(enum.Enum):
    """One direction between two processes; the value is the socket's file name."""

    FRONTEND_TO_SCHEDULER = "frontend-scheduler"
    SCHEDULER_TO_FRONTEND = "scheduler-frontend"
    SCHEDULER_TO_WORKER = "scheduler-worker"
    WORKER_TO_SCHEDULER = "worker-scheduler"


MESSAGE_TYPES: dict[Edge, Any] = {
    Edge.FRONTEND_TO_SCHEDULER: FrontendMessage,
    Edge.SCHEDULER_TO_FRONTEND: SchedulerMessage,
    Edge.SCHEDULER_TO_WORKER: PlanMessage,
    Edge.WORKER_TO_SCHEDULER: WorkerMessage,
}


def _socket(context: zmq.Context[Any], kind: int, edge: Edge, ipc_dir: Path, bind: bool) -> Any:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    address = f"ipc://{ipc_dir / edge.value}"
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


class Sender:
    """The sending end of an edge."""

    def __init__(self, context: zmq.Context[Any], edge: Edge, ipc_dir: Path, *, bind: bool) -> None:
        self.socket = _socket(context, zmq.PUSH, edge, ipc_dir, bind)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Any) -> None:
        """Queue one message.

        Raises:
            zmq.Again: no peer is connected (it died, or was never there).
        """
        self.socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Close after giving queued messages a second to leave."""
        self.socket.close(linger=1000)


class Receiver(Generic[T]):
    """The receiving end of an edge. ``socket`` may be registered with a poller."""

    def __init__(self, context: zmq.Context[Any], edge: Edge, ipc_dir: Path, *, bind: bool) -> None:
        self.socket = _socket(context, zmq.PULL, edge, ipc_dir, bind)
        self._decoder = msgspec.msgpack.Decoder(MESSAGE_TYPES[edge])

    def receive(self, timeout_ms: int | None = None) -> Any:
        """The next message, or None after ``timeout_ms`` (0: at once; None: wait for ever)."""
        if timeout_ms is not None and not self.socket.poll(timeout_ms):
            return None
        return self._decoder.decode(self.socket.recv())

    def drain(self) -> list[Any]:
        """All messages that are already here."""
        messages: list[Any] = []
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(self._decoder.decode(frame))

    def close(self) -> None:
        self.socket.close(linger=0)
