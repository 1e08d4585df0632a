"""Decode rounds on a CUDA device: one captured graph per row bucket, nothing waits for the host.

A round is seven kernels per layer and eight around them, all sized by the bucket and steered
by counts that live on the device. Its last copy moves a fixed-size event block into pinned memory;
the host reads it once the event recorded behind it has passed.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import triton
from ouro_kernels.triton_ops import attention, gemm, hopper, norm, sampling, state

from ouro_sgl.messages import ExitMode, FinishReason, TopLogprobs
from ouro_sgl.models.config import OuroConfig
from ouro_sgl.models.ouro import OuroModel
from ouro_sgl.models.weights import Head
from ouro_sgl.worker.kv_pool import KVPool
from ouro_sgl.worker.round import RoundBlock
from ouro_sgl.worker.rows import Rows
from ouro_sgl.worker.sampler import LogprobWish

logger = logging.getLogger(__name__)

VOCABULARY_BLOCK = 1024
SELECT_BLOCK = 4096
AHEAD_ROWS = 128  # up to so many rows, products ask for their weights before the kernel before has ended
# Lines of the event block, see ``advance_kernel``; the lambdas follow, one line per loop.
COUNTS_LINE, REPORTS_LINE, LAMBDA_LINES = 7, 8, 9


@dataclass(frozen=True)
class Products:
    """How one bucket runs its four products and lm_head."""

    qkv: gemm.GemmTile
    out: gemm.GemmTile
    gate_up: gemm.GemmTile
    down: gemm.GemmTile
    lm_head: gemm.GemmTile


def block_k(span: int, wanted: int) -> int:
    """The largest power of two up to ``wanted`` that divides ``span``.

    Raises:
        ValueError: not even 16 does.
    """
    size = wanted
    while span % size:
        size //= 2
    if size < 16:
        raise ValueError(f"an inner size of {span} is not a multiple of 16, which the CUDA kernels need")
    return size


def splits_for(inner: int, wanted: int) -> int:
    """K splits of a weight: fixed by its shape, so that they are the same in every bucket."""
    return wanted if inner % (wanted * 128) == 0 else 1


def split_counts(config: OuroConfig) -> tuple[int, int]:
    """K splits of the attention output and ``down``: at few rows one split leaves SMs without work."""
    return splits_for(config.num_heads * config.head_dim, 4), splits_for(config.intermediate_size, 2)


def choose_products(model: OuroModel, bucket: int, splits: tuple[int, int]) -> Products:
    """Tiles by bucket, the best of a sweep (``bench/gemm.py``); splits: of ``out`` and ``down``, the
    same in every bucket. fp32 takes small tiles, to fit."""
    config = model.config
    hidden, inner = config.hidden_size, config.intermediate_size // splits[1]
    mixed = config.num_heads * config.head_dim // splits[0]
    rows = min(128, max(16, triton.next_power_of_2(bucket)))

    def tile(span: int, m: int, n: int, k: int, warps: int, stages: int, *, swap: bool) -> gemm.GemmTile:
        if model.dtype == torch.float32:
            return gemm.GemmTile(min(m, 32), 64, block_k(span, 32), 4, 2)
        return gemm.GemmTile(m, n, block_k(span, k), warps, stages, swap)

    few = rows < 128
    return Products(
        qkv=tile(hidden, rows, 64, 128, 4, 6 if few else 4, swap=True),
        out=tile(mixed, rows, 64, 128, 4, 6 if few else 4, swap=True),
        gate_up=tile(hidden, rows, 64, 128, 4, 4 if few else 3, swap=True),
        down=tile(inner, min(rows, 64), 64, 128, 4, 6 if few else 4, swap=few),
        lm_head=tile(hidden, rows, 128, 64, 4 if few else 8, 4, swap=few),
    )


class PendingRound:
    """A launched round; its pinned block belongs to it until ``result``."""

    def __init__(
        self,
        block: torch.Tensor,
        event: torch.cuda.Event | None,
        wanted: frozenset[int],
        tops: TopBlock | None,
        pool: deque[torch.Tensor],
    ) -> None:
        self._block, self._event, self._wanted, self._tops, self._pool = block, event, wanted, tops, pool

    def done(self) -> bool:
        return self._event is None or self._event.query()

    def result(self) -> RoundBlock:
        if self._event is not None:
            self._event.synchronize()
        count, lanes = self._block[COUNTS_LINE, :2].tolist()
        columns = self._block[:6, :count].tolist()
        values = self._block[6, :count].to(torch.int32).view(torch.float32).tolist()
        block = RoundBlock(lanes=lanes, exits=count)
        block.rows, block.epochs, block.positions, block.token_ids, block.exit_depths = columns[:5]
        block.reasons = [FinishReason(reason) for reason in columns[5]]
        block.logprobs = {
            index: value
            for index, (row, value) in enumerate(zip(block.rows, values, strict=True))
            if row in self._wanted
        }
        reports = self._block[REPORTS_LINE, :count].nonzero().squeeze(1).tolist()
        if reports:
            lambdas = self._block[LAMBDA_LINES:, :count].to(torch.int32).view(torch.float32)
            for index in reports:
                block.exit_lambdas[index] = lambdas[: block.exit_depths[index], index].tolist()
        if self._tops is not None:
            block.tops = self._tops.read(block.rows)
        self._pool.append(self._block)
        return block


@dataclass
class TopBlock:
    """Top and by-id log-probabilities of one round, computed beside the graph for rows that ask."""

    wishes: dict[int, LogprobWish]
    values: torch.Tensor  # pinned [bucket, K] fp32
    ids: torch.Tensor  # pinned [bucket, K] int64
    by_id: torch.Tensor  # pinned [bucket, I] fp32: the I distinct ids that any wish names
    columns: dict[int, int]  # id -> column of by_id

    def read(self, rows: list[int]) -> dict[int, TopLogprobs]:
        tops = {}
        for index, row in enumerate(rows):
            wish = self.wishes.get(row)
            if wish is None or not (wish.top or wish.ids):
                continue
            tops[index] = TopLogprobs(
                top_values=self.values[index, : wish.top].tolist(),
                top_ids=self.ids[index, : wish.top].tolist(),
                id_values=[float(self.by_id[index, self.columns[token]]) for token in wish.ids],
            )
        return tops


class CudaRounds:
    """Launches rounds over ``rows``.

    Args:
        heads: of the exit modes that have one, apart from the model's gate.
        min_coda_batch_size: rows that must have exited before their tokens are made.
        buckets: row counts that rounds are padded to, ascending.
        blocks: event blocks in pinned memory: one more than rounds in flight.
        graphs: capture a CUDA graph of each bucket now, of those up to ``max_graph_rows`` rows and of
            ``max_graphs`` at most, the smallest ones.
        static_buffers: else each round allocates its own.
        pdl: programmatic dependent launch between a round's kernels.
    """

    def __init__(
        self,
        model: OuroModel,
        rows: Rows,
        pool: KVPool,
        heads: dict[ExitMode, Head],
        min_coda_batch_size: int,
        buckets: list[int],
        blocks: int,
        *,
        graphs: bool,
        max_graph_rows: int | None = None,
        max_graphs: int | None = None,
        static_buffers: bool = True,
        pdl: bool = False,
    ) -> None:
        self._model, self._rows, self._pool = model, rows, pool
        self._min_coda = min_coda_batch_size
        self._buckets = buckets
        self._capacity = max(rows.max_rows, 8)  # the event block's last line holds two numbers
        self._static_buffers = static_buffers
        self._pdl = pdl  # programmatic dependent launch
        config, device = model.config, model.device
        self._splits = split_counts(config)
        self._vocabulary_blocks = triton.cdiv(config.vocab_size, VOCABULARY_BLOCK)
        self._heads = torch.zeros(3, config.hidden_size, dtype=torch.float32, device=device)
        self._head_bias = torch.zeros(3, dtype=torch.float32, device=device)
        self.load_heads(heads)
        self._allocate()
        pinned = device.type == "cuda"
        self._blocks = deque(
            torch.zeros(
                LAMBDA_LINES + config.total_loops, self._capacity, dtype=torch.int64, pin_memory=pinned
            )
            for _ in range(blocks)
        )
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if graphs:
            captured = [size for size in buckets if max_graph_rows is None or size <= max_graph_rows]
            self._capture(captured[:max_graphs])
        self._warned = False

    @property
    def captured(self) -> list[int]:
        return sorted(self._graphs)

    def load_heads(self, heads: dict[ExitMode, Head]) -> None:
        """Copy the model's gate and those lookahead heads that are given to where rounds read them."""
        self._heads[0], self._head_bias[0] = self._model.gate_weight, self._model.gate_bias
        for mode, place in ((ExitMode.RANDOM_LOOKAHEAD, 1), (ExitMode.LOOKAHEAD, 2)):
            if mode in heads:
                weight, bias = heads[mode]
                self._heads[place], self._head_bias[place] = weight.to(self._heads), bias.to(self._heads)

    def _allocate(self) -> None:
        """The buffers of a round, for as many lanes as there are rows."""
        config, device, capacity = self._model.config, self._model.device, self._capacity
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim

        def numbers(*shape: int, kind: torch.dtype = self._model.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=kind, device=device)

        def ints(*shape: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=kind, device=device)

        fp32 = torch.float32
        self._lanes, self._slots = ints(capacity), ints(capacity)
        self._count, self._exit_count, self._exits = ints(1), ints(1), ints(capacity)
        self._work = attention.WorkList(
            capacity,
            self._rows.slot_table.shape[2],
            config.num_heads,
            config.head_dim,
            self._attention_ranges(),
            device,
        )
        self._x = numbers(capacity, config.hidden_size)
        self._residual = numbers(capacity, config.hidden_size)
        self._qkv = numbers(capacity * width)
        self._mixed = numbers(capacity, config.num_heads, config.head_dim)
        self._partial = numbers(max(self._splits) * capacity * config.hidden_size, kind=fp32)
        self._inner = numbers(capacity, config.intermediate_size)
        self._logits = numbers(capacity * config.vocab_size, kind=fp32)
        blocks = self._vocabulary_blocks
        self._block_best, self._block_sum = (
            numbers(capacity, blocks, kind=fp32),
            numbers(capacity, blocks, kind=fp32),
        )
        self._block_drawn = numbers(capacity, blocks, kind=fp32)
        self._block_best_id, self._block_drawn_id = ints(capacity, blocks), ints(capacity, blocks)
        self._block_bad = ints(capacity, blocks)
        self._tokens, self._bad = ints(capacity), ints(capacity)
        self._logprobs, self._log_sums = numbers(capacity, kind=fp32), numbers(capacity, kind=fp32)
        self._events = ints(LAMBDA_LINES + config.total_loops, capacity, kind=torch.int64)

    def _attention_ranges(self) -> int:
        """As many programs as the device holds at once: an SM has memory for 8 with keys of 256 bytes."""
        if self._model.device.type != "cuda":
            return 5  # Triton's interpreter: few, but enough to cut groups
        units = torch.cuda.get_device_properties(self._model.device).multi_processor_count
        config = self._model.config
        per_unit = 8 * 256 // max(config.head_dim * self._model.dtype.itemsize, 256)
        return max(per_unit * units // config.num_heads, 1)

    def _capture(self, buckets: list[int]) -> None:
        """Largest bucket first, so that the graphs share one memory pool. No row is live: a dry run
        of each bucket compiles its kernels and changes nothing."""
        memory = None
        for bucket in reversed(buckets):
            self._launch(bucket)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # not on the stream that torch would take: nodes keep the priority of the stream of their capture
            with torch.cuda.graph(graph, pool=memory, stream=torch.cuda.current_stream()):
                self._launch(bucket)
            memory = memory or graph.pool()
            self._graphs[bucket] = graph

    def bucket_for(self, running: int) -> int:
        """The smallest bucket that holds ``running`` rows."""
        return next(bucket for bucket in self._buckets if bucket >= running)

    def launch(self, running: int, wishes: dict[int, LogprobWish]) -> PendingRound:
        """One round on the current stream. At most ``running`` rows may be live."""
        bucket = self.bucket_for(running)
        graph = self._graphs.get(bucket)
        if graph is not None:
            graph.replay()
        else:
            if self._graphs and not self._warned:
                self._warned = True
                logger.warning("a round of %d rows has no CUDA graph and runs eager", bucket)
            if not self._static_buffers:
                self._allocate()
            self._launch(bucket)
        tops = self._top_logprobs(bucket, wishes)
        block = self._blocks.popleft()
        block.copy_(self._events, non_blocking=True)
        event = None
        if self._model.device.type == "cuda":  # else Triton's interpreter: computed at the launch
            event = torch.cuda.Event()
            event.record()
        return PendingRound(block, event, frozenset(wishes), tops, self._blocks)

    def _launch(self, bucket: int) -> None:
        rows, config = self._rows, self._model.config
        table_stride = rows.slot_table.shape[2]
        block_rows = triton.next_power_of_2(rows.max_rows)
        block_hidden = triton.next_power_of_2(config.hidden_size)
        state.begin_round_kernel[(1,)](
            rows.state,
            rows.position,
            rows.depth,
            rows.granted_until,
            rows.slot_table,
            self._lanes,
            self._slots,
            self._count,
            self._work.table_index,
            self._work.length,
            self._work.first_part,
            self._work.first_group,
            self._work.range_begin,
            self._work.range_lane,
            self._work.num_parts,
            rows.max_rows,
            table_stride,
            self._work.ranges,
            BR=block_rows,
            BRANGES=triton.next_power_of_2(self._work.ranges + 1),
            **attention.SIZES,
        )
        self._core(bucket)
        state.finish_core_kernel[(bucket,)](
            self._x,
            self._lanes,
            self._count,
            self._slots,
            rows.hidden,
            self._heads,
            self._head_bias,
            rows.state,
            rows.position,
            rows.depth,
            rows.survival,
            rows.pending,
            rows.coda_wait,
            rows.exit_mode,
            rows.min_loops,
            rows.max_loops,
            rows.exit_threshold,
            rows.trace,
            rows.replay_until,
            rows.reports_lambdas,
            rows.lambdas,
            rows.slot_table,
            rows.max_rows,
            table_stride,
            rows.trace.shape[1],
            T=config.total_loops,
            H=config.hidden_size,
            BH=block_hidden,
        )
        state.begin_coda_kernel[(1,)](
            rows.state,
            rows.position,
            rows.coda_wait,
            rows.constrained,
            rows.mask_position,
            rows.replay_until,
            self._count,
            self._exits,
            self._exit_count,
            rows.max_rows,
            self._min_coda,
            T=config.total_loops,
            BR=block_rows,
        )
        self._coda(bucket)
        state.advance_kernel[(bucket,)](
            self._exits,
            self._exit_count,
            self._count,
            self._tokens,
            self._bad,
            self._logprobs,
            self._model.embedding,
            rows.hidden,
            rows.state,
            rows.epoch,
            rows.position,
            rows.depth,
            rows.survival,
            rows.pending,
            rows.last_position,
            rows.is_end,
            rows.output_counts,
            rows.replay_until,
            rows.forced,
            rows.reports_lambdas,
            rows.lambdas,
            self._events,
            self._capacity,
            config.vocab_size,
            rows.forced.shape[1],
            T=config.total_loops,
            H=config.hidden_size,
            BH=block_hidden,
        )

    def _core(self, bucket: int) -> None:
        model, config, rows = self._model, self._model.config, self._rows
        eps, pdl = config.rms_norm_eps, self._pdl
        tiles = choose_products(model, bucket, self._splits)
        layers = model.layers
        x, residual = self._x[:bucket], self._residual[:bucket]
        mixed = self._mixed[:bucket]
        qkv = self._qkv[: bucket * layers[0].qkv.shape[0]].view(1, bucket, -1)
        inner = self._inner[:bucket]
        out_splits, down_splits = self._splits
        hidden = config.hidden_size
        out = self._partial[: out_splits * bucket * hidden].view(out_splits, bucket, hidden)
        down = self._partial[: down_splits * bucket * hidden].view(down_splits, bucket, hidden)
        table = rows.slot_table.view(-1, rows.slot_table.shape[2])
        early = pdl and bucket <= AHEAD_ROWS and hopper.supported(model.device, model.dtype)
        products: Any = hopper.products if early else gemm
        linear, gate_up = products.linear, products.gate_up
        norm.enter(rows.hidden, self._lanes, self._count, layers[0].input_norm, residual, x, eps)
        for index, layer in enumerate(layers):
            keys, values = self._pool.keys[index], self._pool.values[index]
            linear(x, layer.qkv, qkv, tiles.qkv, pdl=pdl)
            attention.decode_attention(
                qkv[0],
                keys,
                values,
                table,
                model.cos,
                model.sin,
                self._work,
                mixed,
                config.head_dim**-0.5,
                pdl=pdl,
                early=early,
            )
            flat = mixed.view(bucket, -1)
            linear(flat, layer.attention_out, out, tiles.out, out_splits, pdl=pdl)
            norm.sandwich(out, residual, layer.attention_norm, layer.mlp_input_norm, x, eps, pdl)
            gate_up(x, layer.gate_up, inner, tiles.gate_up, pdl)
            linear(inner, layer.down, down, tiles.down, down_splits, pdl=pdl)
            following = layers[index + 1].input_norm if index + 1 < len(layers) else model.final_norm
            norm.sandwich(down, residual, layer.mlp_norm, following, x, eps, pdl)

    def _coda(self, bucket: int) -> None:
        model, rows = self._model, self._rows
        vocab = model.config.vocab_size
        tiles = choose_products(model, bucket, self._splits)
        logits = self._logits[: bucket * vocab].view(1, bucket, vocab)
        gemm.linear(
            rows.hidden,
            model.lm_head,
            logits,
            tiles.lm_head,
            index=self._exits,
            count=self._exit_count,
        )
        blocks = self._vocabulary_blocks
        sampling.process_kernel[(bucket, blocks)](
            logits,
            self._exits,
            self._exit_count,
            rows.position,
            rows.prompt_length,
            rows.temperature,
            rows.seed,
            rows.min_new_tokens,
            rows.penalised,
            rows.frequency,
            rows.presence,
            rows.repetition,
            rows.output_counts,
            rows.prompt_seen,
            rows.constrained,
            rows.mask,
            rows.biased,
            rows.bias,
            rows.is_end,
            self._block_best,
            self._block_best_id,
            self._block_sum,
            self._block_drawn,
            self._block_drawn_id,
            self._block_bad,
            vocab,
            blocks,
            BV=VOCABULARY_BLOCK,
        )
        sampling.select_kernel[(bucket,)](
            logits,
            self._exits,
            self._exit_count,
            rows.position,
            rows.prompt_length,
            rows.temperature,
            rows.seed,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            self._block_best,
            self._block_best_id,
            self._block_sum,
            self._block_drawn,
            self._block_drawn_id,
            self._block_bad,
            self._tokens,
            self._logprobs,
            self._log_sums,
            self._bad,
            vocab,
            blocks,
            BLOCKS=triton.next_power_of_2(blocks),
            BV=min(SELECT_BLOCK, triton.next_power_of_2(vocab)),
            num_warps=8,
        )

    def _top_logprobs(self, bucket: int, wishes: dict[int, LogprobWish]) -> TopBlock | None:
        """Beside the graph, only when a running row asks: one sort of the processed logits."""
        asking = {row: wish for row, wish in wishes.items() if wish.top or wish.ids}
        if not asking:
            return None
        vocab = self._model.config.vocab_size
        # not torch's log_softmax, whose order of summation depends on a row's address
        values = self._logits[: bucket * vocab].view(bucket, vocab) - self._log_sums[:bucket].unsqueeze(1)
        most = max(wish.top for wish in asking.values())
        named = sorted({token for wish in asking.values() for token in wish.ids})
        best, ids = torch.sort(values, dim=-1, descending=True, stable=True)
        by_id = values[:, self._rows.upload(named, torch.int64)]
        return TopBlock(
            wishes=asking,
            values=_to_pinned(best[:, :most]),
            ids=_to_pinned(ids[:, :most]),
            by_id=_to_pinned(by_id),
            columns={token: column for column, token in enumerate(named)},
        )


def _to_pinned(x: torch.Tensor) -> torch.Tensor:
    """An asynchronous copy; valid once the round's event has passed."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type == "cuda")
    return host.copy_(x, non_blocking=True)
