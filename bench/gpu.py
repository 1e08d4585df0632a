"""What the GPU benches share: a model of any shape with random weights, and a worker that is driven
by hand through its real loop."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from ouro_sgl.messages import Admit, Chunk, ExitMode, Grant, RoundEvents, RowParams, Segment, StepPlan
from ouro_sgl.models.config import OuroConfig
from ouro_sgl.models.ouro import OuroModel
from ouro_sgl.models.weights import dummy_weights, random_lookahead_head
from ouro_sgl.worker.cuda_executor import CudaExecutor
from ouro_sgl.worker.kv_pool import KVPool
from ouro_sgl.worker.rows import Rows
from ouro_sgl.worker.worker import Worker, WorkerSettings


def config_1_4b(layers: int = 24, loops: int = 4) -> OuroConfig:
    """The published 1.4B shape (48 layers: 2.6B)."""
    return OuroConfig(
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=5632,
        num_layers=layers,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        max_position=65536,
        total_loops=loops,
        early_exit_threshold=1.0,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        dtype="bfloat16",
        end_ids=(0,),
    )


def make_model(config: OuroConfig) -> OuroModel:
    device = torch.device("cuda")
    return OuroModel(config, dummy_weights(config, torch.bfloat16, device, 0))


def filled_pool(model: OuroModel, num_slots: int) -> KVPool:
    """A pool whose slots all hold random keys and values, for prompts that count as cached."""
    pool = KVPool(model.config, num_slots, model.dtype, model.device)
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()
    return pool


def round_bytes(config: OuroConfig, contexts: list[int]) -> int:
    """Bytes that one round must read: core weights, and K and V of every lane."""
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size) * 2
    kv = sum(contexts) * config.slot_elements() * 2
    return config.num_layers * layer + kv


@dataclass
class Bench:
    """A worker with ``rows`` requests of ``context`` prompt tokens each, and place for ``spare`` more.

    Several may share one ``pool``, of :meth:`num_slots`, if they run one after the other.
    """

    model: OuroModel
    rows: int
    context: int
    outputs: int
    rounds_in_flight: int = 4
    max_chunk: int = 4096
    graphs: bool = True
    static_buffers: bool = True
    single_stream: bool = True
    pdl: bool = True
    spare: int = 0
    pool: KVPool | None = None
    worker: Worker = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.config
        length = self.context + self.outputs
        self.slots_per_row = length * config.total_loops
        all_rows = self.rows + self.spare
        settings = WorkerSettings(all_rows, length, self.rounds_in_flight)
        device = self.model.device
        pool = self.pool or KVPool(config, self.num_slots(), torch.bfloat16, device)
        rows = Rows(
            all_rows,
            length,
            config.total_loops,
            config.vocab_size,
            config.hidden_size,
            torch.bfloat16,
            device,
        )
        heads = {ExitMode.RANDOM_LOOKAHEAD: random_lookahead_head(0, config.hidden_size)}
        executor = CudaExecutor(
            self.model,
            rows,
            pool,
            heads,
            min_coda_batch_size=1,
            max_chunk=self.max_chunk,
            blocks=self.rounds_in_flight + 1,
            graphs=self.graphs,
            static_buffers=self.static_buffers,
            single_stream=self.single_stream,
            pdl=self.pdl,
        )
        self.worker = Worker(rows, pool, executor, settings)
        self.worker.between_layers = self.turn
        self.seen: list[RoundEvents] = []
        self.plan_id = self.chunk_id = self.retired_chunk = 0
        self.epoch = 0

    def num_slots(self) -> int:
        return (self.rows + self.spare) * (self.context + self.outputs) * self.model.config.total_loops

    def apply(self, **parts: object) -> None:
        self.plan_id += 1
        self.worker.apply(StepPlan(self.plan_id, **parts))

    def prefill(self, depths: list[list[int]]) -> float:
        """Admit and prefill all rows but the spare ones, whose tokens will leave at ``depths[row]``;
        seconds taken."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self.epoch += 1
        self.submit(range(self.rows), depths)
        # the first token of every row comes from its prompt: then all rows stall
        self.run_until(tokens=self.rows)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def restart(self, depths: list[list[int]]) -> None:
        """As :meth:`prefill`, but all of a prompt except its last token is taken from slots that hold
        anything finite: what is timed after it does not depend on values. Earlier requests have ended."""
        torch.cuda.synchronize()
        self.epoch += 1
        self.submit(range(self.rows), depths, cached=self.context - 1)
        self.run_until(tokens=self.rows)
        torch.cuda.synchronize()

    def submit(self, rows: range, depths: list[list[int]], cached: int = 0) -> None:
        """Admit ``rows`` with so many cached tokens and hand out their chunks; spare rows end with their
        prompts, so that they never take part in rounds."""
        config = self.model.config
        for row in rows:
            prompt = torch.randint(10, config.vocab_size, (self.context,)).tolist()
            params = RowParams(
                self.outputs if row < self.rows else 0,
                temperature=0.0,
                exit_mode=ExitMode.TRACE,
                exit_trace=depths[row],
                max_loops=config.total_loops,
            )
            slots = self.prompt_slots(row, 0, cached)
            self.apply(admits=[Admit(row, self.epoch, prompt, params, cached, slots)])
        pieces: list[tuple[int, int, int]] = []
        room = 0
        chunks: list[list[tuple[int, int, int]]] = []
        for row in rows:
            at = cached
            while at < self.context:
                if room == 0:
                    pieces = []
                    chunks.append(pieces)
                    room = self.max_chunk
                count = min(room, self.context - at)
                pieces.append((row, at, at + count))
                at += count
                room -= count
        for chunk in chunks:
            self.chunk_id += 1
            segments = [
                Segment(row, self.epoch, start, end, self.prompt_slots(row, start, end))
                for row, start, end in chunk
            ]
            self.apply(chunks=[Chunk(self.chunk_id, segments)])

    def prompt_slots(self, row: int, start: int, end: int) -> list[int]:
        """Consecutive positions of one depth side by side, as the scheduler hands them out."""
        base = row * self.slots_per_row
        loops, context = self.model.config.total_loops, self.context
        return [base + depth * context + position for depth in range(loops) for position in range(start, end)]

    def grant_all(self, depths: list[list[int]]) -> None:
        loops = self.model.config.total_loops
        grants = []
        for row in range(self.rows):
            base = row * self.slots_per_row + self.context * loops
            widths = depths[row][1 : self.outputs]
            slots = [base + i * loops + d for i, width in enumerate(widths) for d in range(width)]
            grants.append(Grant(row, self.epoch, self.context, widths, slots))
        self.apply(grants=grants)

    def turn(self) -> None:
        """One step. Runs between the layers of a chunk's launch too, as in the worker's process."""
        events = self.worker.step()
        if events is not None:
            self.seen.append(events)
            self.retired_chunk = events.retired_chunk

    def run_until(self, tokens: int) -> list[RoundEvents]:
        """Step until that many tokens were seen and every chunk was read; bounded."""
        self.seen = []
        count = at = 0
        deadline = time.monotonic() + 120
        while count < tokens or self.retired_chunk < self.chunk_id:
            self.turn()
            count += sum(len(events.rows) for events in self.seen[at:])
            at = len(self.seen)
            assert time.monotonic() < deadline, "no progress"
        return self.seen

    def decode(self, depths: list[list[int]]) -> tuple[float, int, int]:
        """After :meth:`prefill`: (seconds, rounds, tokens) of all remaining output tokens, beside the
        prefill of the spare rows."""
        torch.cuda.synchronize()
        tokens = self.rows * (self.outputs - 1)
        begin = time.perf_counter()
        self.grant_all(depths)
        self.submit(range(self.rows, self.rows + self.spare), depths)
        seen = self.run_until(tokens)
        seconds = time.perf_counter() - begin
        rounds = sum(int(events.round_stats.get("lanes", 0) > 0) for events in seen)
        return seconds, rounds, tokens
