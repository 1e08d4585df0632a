"""A scheduler that costs as little as possible: every request gets one token a round.

    python bench/mock_scheduler.py DIRECTORY VOCAB_SIZE ROUND_MS

It speaks the real messages, so a benchmark of the frontend measures the frontend alone.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import zmq

from ouro_sgl.ipc import Edge, Receiver, Sender
from ouro_sgl.messages import (
    AbortReq,
    Finished,
    FinishReason,
    GenerateReq,
    SchedulerReady,
    ShutdownReq,
    Started,
    TokenBatch,
)

TOTAL_LOOPS = 4
FIRST_ID = 3  # ids below are special


def main() -> None:
    ipc_dir, vocab_size, round_seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) / 1e3
    context: zmq.Context = zmq.Context()
    receiver: Receiver = Receiver(context, Edge.FRONTEND_TO_SCHEDULER, ipc_dir, bind=True)
    sender = Sender(context, Edge.SCHEDULER_TO_FRONTEND, ipc_dir, bind=True)
    ready = SchedulerReady(TOTAL_LOOPS, vocab_size, 65536, 65536, 1 << 20, 1 << 16, False, {"device": "mock"})
    while True:
        try:
            sender.send(ready)
            break
        except zmq.Again:  # the frontend has not connected yet
            time.sleep(0.01)

    left: dict[int, int] = {}  # tokens to come, by uid
    lengths: dict[int, int] = {}  # of the whole output, by uid
    token_id = FIRST_ID
    next_round = time.monotonic()
    while True:
        timeout = None if not left else max(0, round(1e3 * (next_round - time.monotonic())))
        first = receiver.receive(timeout)
        messages = [] if first is None else [first, *receiver.drain()]
        started = []
        for message in messages:
            if isinstance(message, GenerateReq):
                left[message.uid] = lengths[message.uid] = message.params.max_new_tokens
                started.append(Started(message.uid, 0))
            elif isinstance(message, AbortReq):
                gone = [uid for uid in message.uids if left.pop(uid, None) is not None]
                for uid in gone:
                    del lengths[uid]
                ends = [Finished(uid, FinishReason.ABORT, 0) for uid in gone]
                sender.send(TokenBatch(finished=ends))
            elif isinstance(message, ShutdownReq):
                return
        if started:
            sender.send(TokenBatch(started=started))
        now = time.monotonic()
        if now < next_round or not left:
            continue
        next_round = max(next_round + round_seconds, now)
        uids = list(left)
        ids = [(token_id + 7 * index) % (vocab_size - FIRST_ID) + FIRST_ID for index in range(len(uids))]
        token_id += 1
        finished = []
        for uid in uids:
            left[uid] -= 1
            if left[uid] <= 0:
                del left[uid]
                finished.append(Finished(uid, FinishReason.LENGTH, lengths.pop(uid)))
        sender.send(TokenBatch([], uids, [1] * len(uids), ids, [TOTAL_LOOPS] * len(uids), {}, finished))


if __name__ == "__main__":
    main()
