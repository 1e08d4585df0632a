"""One request as the scheduler knows it: where it stands and which slots it owns."""

from __future__ import annotations

import copy
import enum
from collections import deque

from ouro_sgl.kvcache.radix import Columns, Node
from ouro_sgl.messages import FinishReason, GenerateReq, TopLogprobs
from ouro_sgl.scheduler.grammar import NextTokens


class RequestState(enum.IntEnum):
    """From the queue to the end. ``DRAINING`` is unknown to the worker."""

    WAITING = 0
    PREFILL = 1  # on a row, part of its prompt is not yet retired
    RUNNING = 2  # its prompt is retired
    # Ended or retracted by the host; keeps row, slots and locks until nothing launched can use them.
    DRAINING = 3
    FINISHED = 4


class Request:
    """State of one request. ``P`` is ``len(input_ids)``.

    Slots that it owns (all others it reads belong to the radix cache, through ``node``):
    ``prompt_slots``, T columns of prompt positions ``cached_len ..`` as far as planned, less those
    handed to the radix cache; ``kept``, of generated positions that left the loop, in order;
    ``ahead``, a list for each of those that follow up to ``drawn_until``, of which the worker has been
    told of those before ``granted_until``.
    """

    def __init__(self, message: GenerateReq, arrival: int, generated_need: int, total_loops: int) -> None:
        self.uid = message.uid
        self.input_ids = message.input_ids
        self.params = message.params
        self.prompt_logprob_start = message.prompt_logprob_start
        self.extra_key = message.extra_key
        self.leader = message.leader
        self.grammar = message.grammar
        self.next_tokens: NextTokens | None = None  # what may come next; None until it is known
        self.arrival = arrival
        # The queue's order: by priority, then those that were retracted, then by arrival.
        self.order = (-message.priority, 1, arrival)
        self.total_loops = total_loops
        self.generated_need = generated_need  # slots of all generated positions
        self.least_need = 0  # slots of its whole life if the cache held all of the prompt that it may
        # First position that is never run: the last output token has no K/V.
        self.position_limit = len(message.input_ids) + max(message.params.max_new_tokens - 1, 0)

        # output; output i stands at position P + i and was predicted after exit_depths[i] loops
        self.output_ids: list[int] = []
        self.exit_depths: list[int] = []
        self.sent = 0
        self.unsent_logprobs: list[float] = []
        self.unsent_tops: list[TopLogprobs] = []
        self.unsent_lambdas: list[list[float]] = []
        self.prompt_logprobs: list[float | None] = []
        self.prompt_tops: list[TopLogprobs | None] = []
        self.started = False  # the client has heard of its prompt
        self.cached_tokens = 0  # of the prompt, as the client hears it
        self.num_retractions = 0
        self.weight_versions: list[str] = []  # names of the weights that it ran with, oldest first
        self.outcome = FinishReason.NONE
        self._wait()

    def _wait(self) -> None:
        """The state of a request without a row."""
        self.state = RequestState.WAITING

        # waiting
        self.bypasses = 0  # later requests that were admitted before it, though it came first
        self.match: tuple[Node | None, int] = (None, 0)
        self.matched_version: int | None = None  # of the radix cache, when match was made

        # on a row
        self.row = 0
        self.epoch = 0
        self.generation = 0  # of the weights, at its admission
        self.prefilled = False  # its prompt is retired
        self.reached = 0  # outputs that the row has produced, replayed ones among them
        self.cached_len = 0
        self.planned = 0  # prompt positions that are cached or in a planned chunk
        self.last_chunk = 0  # the newest chunk that holds the row
        self.release_plan = 0
        self.node: Node | None = None  # the radix path that it locks
        self.tree_len = 0  # tokens of that path
        self.reserved = 0
        self.prompt_slots: Columns = [[] for _ in range(self.total_loops)]
        self.kept: list[int] = []
        self.ahead: deque[list[int]] = deque()
        self.granted_until = self.drawn_until = len(self.input_ids)

    def retracted(self) -> Request:
        """The request as it goes back to the queue: its output stays, its prompt and the K/V of its
        output have to be computed again. Row, slots and locks are left to ``self``, which must drain."""
        again = copy.copy(self)
        again._wait()
        again.order = (self.order[0], 0, self.arrival)
        again.num_retractions += 1
        return again

    @property
    def match_limit(self) -> int:
        """How much of the prompt may come from the cache.

        The last prompt token is always computed, and so is the token before the first one whose
        log-probability is wanted.
        """
        last = len(self.input_ids) - 1
        if self.prompt_logprob_start is None:
            return last
        return max(min(last, self.prompt_logprob_start - 1), 0)

    @property
    def wants_tops(self) -> bool:
        return self.params.top_logprobs_num > 0 or bool(self.params.token_ids_logprob)

    @property
    def replaying(self) -> bool:
        """The row's next output is known from before a retraction."""
        return self.reached < len(self.output_ids)

    def next_position(self) -> int:
        """The position that runs the loop now or next: one past the newest that left it."""
        return len(self.input_ids) + max(self.reached - 1, 0)

    def owned_slots(self) -> list[int]:
        """Every slot that this request alone uses."""
        slots = [slot for column in self.prompt_slots for slot in column]
        slots += self.kept
        for position in self.ahead:
            slots += position
        return slots
