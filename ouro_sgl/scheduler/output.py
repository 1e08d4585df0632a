"""What the frontend is to hear next: collected per step, sent in columns."""

from __future__ import annotations

from ouro_sgl.messages import Finished, OutputLogprobs, Started, TokenBatch
from ouro_sgl.scheduler.request import Request


class OutputBuffer:
    """Started and finished requests and those with unsent tokens, in the order of their events."""

    def __init__(self) -> None:
        self._started: list[Started] = []
        self._fresh: dict[int, Request] = {}
        self._finished: dict[int, Finished] = {}

    def start(self, started: Started) -> None:
        self._started.append(started)

    def tokens(self, request: Request) -> None:
        """``request`` has tokens beyond ``request.sent``."""
        self._fresh[request.uid] = request

    def finish(self, finished: Finished) -> None:
        """The terminal message of a request; replaces one that was not sent yet."""
        self._finished[finished.uid] = finished

    def unsent_finish(self, uid: int) -> Finished | None:
        """The terminal message of ``uid``, if it waits here."""
        return self._finished.get(uid)

    def take(self) -> TokenBatch | None:
        """Everything collected since the last call; None if there is nothing."""
        if not (self._started or self._fresh or self._finished):
            return None
        batch = TokenBatch(started=self._started, finished=list(self._finished.values()))
        uids, counts, ids, depths = [], [], [], []
        logprobs: dict[int, OutputLogprobs] = {}
        lambdas: dict[int, list[list[float]]] = {}
        for uid, request in self._fresh.items():
            at, end = request.sent, len(request.output_ids)
            if at >= end:  # a stop string cut what was not sent yet
                continue
            request.sent = end
            uids.append(uid)
            counts.append(end - at)
            ids += request.output_ids[at:]
            depths += request.exit_depths[at:]
            if request.params.logprobs:
                logprobs[uid] = OutputLogprobs(
                    request.unsent_logprobs[: end - at], request.unsent_tops[: end - at]
                )
                request.unsent_logprobs = []
                request.unsent_tops = []
            if request.params.exit_lambdas:
                lambdas[uid] = request.unsent_lambdas[: end - at]
                request.unsent_lambdas = []
        batch.uids, batch.counts, batch.token_ids, batch.exit_depths = uids, counts, ids, depths
        batch.logprobs, batch.exit_lambdas = logprobs, lambdas
        self._started, self._fresh, self._finished = [], {}, {}
        return batch
