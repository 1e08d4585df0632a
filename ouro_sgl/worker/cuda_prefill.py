"""Prefill chunks on a CUDA device: cuBLAS products at fixed row counts, own kernels between them. On Hopper
gate and up are our own too, with SwiGLU.

Exactness: cuBLAS may sum in another order at another number of rows, so a chunk is padded to one of
a few row counts, and at start-up each count must give the bits of the largest one for every weight
shape (``check_row_counts``); a count that does not is not used for that weight.

A chunk is several hundred kernels, which take the host longer to launch than a small chunk takes the
device. So there is a CUDA graph of all T loops for each row count, which reads its inputs from fixed
places. Chunks of several groups, and those whose every loop is asked for, are launched one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from ouro_kernels.triton_ops import hopper, norm
from ouro_kernels.triton_ops.prefill import (
    PackedKV,
    PrefillGroup,
    gather,
    most_blocks,
    most_copies,
    plan_groups,
    prefill_attention,
    rope_write,
)
from ouro_kernels.triton_ops.sampling import log_sum_exp
from triton.tools.tensor_descriptor import TensorDescriptor

from ouro_sgl.messages import Chunk, ChunkLogprobs, Segment, TopLogprobs
from ouro_sgl.models.ouro import OuroModel
from ouro_sgl.worker.kv_pool import KVPool
from ouro_sgl.worker.prefill import ChunkResult, Prompt
from ouro_sgl.worker.rows import Rows

ROW_COUNTS = (
    *(64, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 3584, 4096),
    *(5120, 6144, 7168, 8192, 10240, 12288, 14336, 16384),
)
LOGPROB_ROWS = 256  # prompt positions whose logits are made at once


def check_row_counts(weight: torch.Tensor, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Those of ``counts`` (ascending) at which ``x @ weight.T`` has the bits of the largest count."""
    generator = torch.Generator(device=weight.device).manual_seed(0)
    largest = counts[-1]
    x = torch.randn(largest, weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    whole = torch.nn.functional.linear(x, weight)
    good = []
    for count in counts[:-1]:
        part = torch.nn.functional.linear(x[:count], weight)
        if torch.equal(part, whole[:count]):
            good.append(count)
    return (*good, largest)


class PendingChunk:
    """A launched chunk; host values are made when it is read."""

    def __init__(self, result: ChunkResult, event: torch.cuda.Event | None, logprobs: list[PendingLogprobs]):
        self._result, self._event, self._logprobs = result, event, logprobs

    def done(self) -> bool:
        return self._event is None or self._event.query()

    def tensors(self) -> list[torch.Tensor]:
        """What an activation will read."""
        return [*self._result.final_hidden.values(), *self._result.lambdas.values()]

    def result(self) -> ChunkResult:
        if self._event is not None:
            self._event.synchronize()
        self._result.logprobs = [pending.read() for pending in self._logprobs]
        return self._result


@dataclass(frozen=True)
class PendingLogprobs:
    """Prompt log-probabilities of one segment from position ``first`` on, on their way to the host.

    ``chosen`` [n] fp32; where a request asks for them ``tops``: the best values fp32 and their ids [n, K],
    and those of the ids that it names [n, I] fp32.
    """

    piece: Segment
    first: int
    chosen: torch.Tensor
    tops: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None

    def read(self) -> ChunkLogprobs:
        tops = []
        if self.tops is not None:
            columns = (column.tolist() for column in self.tops)
            tops = [TopLogprobs(*of_position) for of_position in zip(*columns, strict=True)]
        return ChunkLogprobs(self.piece.row, self.piece.epoch, self.first, self.chosen.tolist(), tops)


@dataclass(frozen=True)
class _Group:
    """A :class:`PrefillGroup` on the device: its packed ``rows``; blocks [n, 5] and copies [n, 4], of which
    the first ``num_blocks`` [1] and ``num_copies`` [1] count; places [rows]. All int32."""

    rows: slice
    blocks: torch.Tensor
    num_blocks: torch.Tensor
    copies: torch.Tensor
    num_copies: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True)
class _Inputs:
    """A chunk on the device. token_ids, positions and places, the flat slot-table index of each position at
    depth 0, [M] int64; a position whose place in its group is -1 is padding."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    groups: list[_Group]


@dataclass(frozen=True)
class _Captured:
    """All loops of a chunk, which ``run`` computes: h_T of ``inputs`` into ``result`` [M, H]."""

    inputs: _Inputs
    result: torch.Tensor
    run: Callable[[], None]


class CudaPrefill:
    """Runs chunks of up to ``max_tokens`` positions; ``graphs``: as captured graphs, where one fits."""

    def __init__(
        self, model: OuroModel, rows: Rows, pool: KVPool, max_tokens: int, *, graphs: bool = False
    ) -> None:
        self._model, self._rows, self._pool = model, rows, pool
        config = model.config
        largest = next((count for count in ROW_COUNTS if count >= max_tokens), -(-max_tokens // 128) * 128)
        counts = (*(count for count in ROW_COUNTS if count < largest), largest)
        layer = model.layers[0]
        weights = {
            "qkv": layer.qkv,
            "out": layer.attention_out,
            "down": layer.down,
            "lm_head": model.lm_head,
        }
        on_hopper = hopper.supported(model.device, model.dtype)
        programs = torch.cuda.get_device_properties(model.device).multi_processor_count if on_hopper else 0
        self._gate_up: Callable[..., torch.Tensor] = self._gate_up_apart
        if on_hopper and hopper.chunk.fits(config.hidden_size, config.intermediate_size):
            self._gate_up = partial(hopper.chunk.gate_up, programs=programs)
        else:
            weights["gate_up"] = layer.gate_up
        # by weight: row counts whose bits are those of the largest
        self.row_counts = {name: check_row_counts(weight, counts) for name, weight in weights.items()}
        narrow = model.dtype == torch.float32
        self._attention: Callable[..., None]
        if on_hopper and config.head_dim in hopper.prefill.HEAD_DIMS:
            module, describe = hopper.prefill, hopper.products.describe
            self._block_q, self._block_k = module.BLOCK_Q, module.BLOCK_K
            self._attention = partial(module.prefill_attention, programs=programs)
        else:
            describe = TensorDescriptor.from_tensor
            self._block_q, self._block_k = (32, 32) if narrow else (64, 64)
            stages = 2 if narrow or config.head_dim > 128 else 3
            self._attention = partial(prefill_attention, block_q=self._block_q, stages=stages)
        longest = -(-rows.slot_table.shape[2] // self._block_k) * self._block_k
        self._packed = PackedKV(
            max(longest, 2 * max_tokens),
            config.num_kv_heads,
            config.head_dim,
            self._block_k,
            model.dtype,
            model.device,
            describe,
        )
        self._counts = counts
        self._captured: dict[int, _Captured] = {}
        if graphs:
            self._capture()

    @property
    def captured(self) -> list[int]:
        """Row counts that have a graph."""
        return sorted(self._captured)

    def rehearse(self) -> None:
        """Run the largest chunk with no real position: it takes the memory of a graph and changes nothing."""
        self._padding().run()

    def _padding(self) -> _Captured:
        """The largest chunk, launched one by one, with no real position; the graphs' places."""
        count, rows, config = self._counts[-1], self._rows, self._model.config

        def ints(*shape: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=kind, device=rows.device)

        group = _Group(
            slice(0, count),
            ints(most_blocks(count, rows.max_rows, self._block_q), 5),
            ints(1),
            ints(most_copies(self._packed.capacity, rows.max_rows), 4),
            ints(1),
            ints(count).fill_(-1),
        )
        token_ids, positions, places = (ints(count, kind=torch.int64) for _ in range(3))
        inputs = _Inputs(token_ids, positions, places, [group])
        result = torch.zeros(count, config.hidden_size, dtype=self._model.dtype, device=rows.device)
        return _Captured(inputs, result, partial(self._run_into, result, inputs))

    def _capture(self) -> None:
        """Largest first, so that the graphs share one memory pool; each is run once before, which compiles
        its kernels."""
        whole = self._padding()
        (group,) = whole.inputs.groups
        memory = None
        for count in reversed(self._counts):
            inputs = _Inputs(
                whole.inputs.token_ids[:count],
                whole.inputs.positions[:count],
                whole.inputs.places[:count],
                [
                    replace(
                        group,
                        rows=slice(0, count),
                        blocks=group.blocks[: most_blocks(count, self._rows.max_rows, self._block_q)],
                        places=group.places[:count],
                    )
                ],
            )
            result = whole.result[:count]
            run: Callable[[], None] = partial(self._run_into, result, inputs)
            run()
            if self._model.device.type == "cuda":  # else Triton's interpreter: computed at each call
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory, stream=torch.cuda.current_stream()):
                    run()
                memory = memory or graph.pool()
                run = graph.replay
            self._captured[count] = _Captured(inputs, result, run)

    def _linear(self, name: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [M, K] at the smallest good row count: [M, N]."""
        rows = x.shape[0]
        count = next(count for count in self.row_counts[name] if count >= rows)
        if count == rows:
            return torch.nn.functional.linear(x, weight)
        padded = x.new_zeros(count, x.shape[1])
        padded[:rows] = x
        return torch.nn.functional.linear(padded, weight)[:rows]

    def _gate_up_apart(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return norm.silu_and_multiply(self._linear("gate_up", x, weight))

    def launch(
        self, chunk: Chunk, prompts: dict[int, Prompt], between_layers: Callable[[], None]
    ) -> PendingChunk:
        """All T loops of the chunk on the current stream.

        ``between_layers`` is called after each layer's launches, where they are not a graph's: they take
        20 to 40 ms of host time in all, more than the decode rounds that are queued.
        """
        rows = self._rows
        pieces = [(segment, prompts[segment.row]) for segment in chunk.segments]
        token_ids = torch.cat([prompt.token_ids[piece.start : piece.end] for piece, prompt in pieces])
        segments = [(piece.row, piece.start, piece.end) for piece, _ in pieces]
        plans = plan_groups(segments, self._block_q, self._block_k, self._packed.capacity)
        result = ChunkResult(chunk.chunk_id)
        last_tokens, packed = {}, 0
        for piece, prompt in pieces:
            packed += piece.end - piece.start
            if prompt.exit_lambdas and piece.end == len(prompt.token_ids):
                last_tokens[piece.row] = packed - 1
                result.lambdas[piece.row] = torch.zeros(rows.total_loops, device=rows.device)

        def keep_lambdas(depth: int, hidden: torch.Tensor) -> None:
            for row, at in last_tokens.items():
                result.lambdas[row][depth] = self._model.hazard(hidden[at : at + 1])[0]

        if self._captured and len(plans) == 1 and not last_tokens:
            captured = self._captured[next(count for count in self._counts if count >= packed)]
            self._fill(captured.inputs, token_ids, segments, plans[0])
            captured.run()
            hidden = captured.result[:packed]
        else:
            inputs = self._inputs(token_ids, segments, plans)
            hidden = self._loops(inputs, keep_lambdas, between_layers)

        logprobs = []
        sizes = [piece.end - piece.start for piece, _ in pieces]
        for (piece, prompt), states in zip(pieces, hidden.split(sizes), strict=True):
            if piece.end == len(prompt.token_ids):
                result.final_hidden[piece.row] = states[-1].clone()
            logprobs.extend(self._prompt_logprobs(piece, prompt, states))
        event = None
        if self._model.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return PendingChunk(result, event, logprobs)

    def _inputs(
        self, token_ids: torch.Tensor, segments: list[tuple[int, int, int]], plans: list[PrefillGroup]
    ) -> _Inputs:
        upload = self._rows.upload
        width = self._rows.slot_table.shape[2]
        positions: list[int] = []
        places: list[int] = []
        for row, start, end in segments:
            positions += range(start, end)
            places += range(row * width + start, row * width + end)
        groups = [
            _Group(
                slice(plan.first, plan.end),
                _lines(self._rows, plan.blocks, 5),
                upload([len(plan.blocks)], torch.int32),
                _lines(self._rows, plan.copies, 4),
                upload([len(plan.copies)], torch.int32),
                upload(plan.places, torch.int32),
            )
            for plan in plans
        ]
        return _Inputs(token_ids, upload(positions, torch.int64), upload(places, torch.int64), groups)

    def _fill(
        self,
        inputs: _Inputs,
        token_ids: torch.Tensor,
        segments: list[tuple[int, int, int]],
        plan: PrefillGroup,
    ) -> None:
        """Write a chunk to where a graph reads it. What is behind it may be anything, but for places."""
        source = self._inputs(token_ids, segments, [plan])
        (group,), (given,) = inputs.groups, source.groups
        group.places.fill_(-1)
        for target, values in (
            (inputs.token_ids, token_ids),
            (inputs.positions, source.positions),
            (inputs.places, source.places),
            (group.places, given.places),
            (group.blocks, given.blocks),
            (group.num_blocks, given.num_blocks),
            (group.copies, given.copies),
            (group.num_copies, given.num_copies),
        ):
            target[: len(values)] = values

    def _run_into(self, result: torch.Tensor, inputs: _Inputs) -> None:
        result.copy_(self._loops(inputs))

    def _loops(
        self,
        inputs: _Inputs,
        after_loop: Callable[[int, torch.Tensor], None] = lambda depth, hidden: None,
        between_layers: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """h_T [M, H]."""
        rows = self._rows
        hidden = self._model.prelude(inputs.token_ids)
        for depth in range(rows.total_loops):
            slots = rows.slot_table[depth].view(-1)[inputs.places]
            offset = depth * rows.max_rows
            hidden = self._round(hidden, inputs.positions, slots, inputs.groups, offset, between_layers)
            after_loop(depth, hidden)
        return hidden

    def _round(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        groups: list[_Group],
        depth_offset: int,
        between_layers: Callable[[], None],
    ) -> torch.Tensor:
        model, config, rows = self._model, self._model.config, self._rows
        eps = config.rms_norm_eps
        table = rows.slot_table.view(-1, rows.slot_table.shape[2])
        packed = self._packed
        tokens = hidden.shape[0]
        x = torch.empty_like(hidden)
        residual = hidden.clone()
        query = hidden.new_empty(tokens, config.num_heads, config.head_dim)
        mixed = torch.empty_like(query)
        layers = model.layers
        norm.rms(hidden, layers[0].input_norm, x, eps)
        for index, layer in enumerate(layers):
            keys, values = self._pool.keys[index], self._pool.values[index]
            qkv = self._linear("qkv", x, layer.qkv)
            for group in groups:
                mine = group.rows
                rope_write(
                    qkv[mine],
                    query[mine],
                    keys,
                    values,
                    slots[mine],
                    positions[mine],
                    group.places,
                    packed.keys,
                    packed.values,
                    model.cos,
                    model.sin,
                )
                gather(
                    keys,
                    values,
                    table,
                    group.copies,
                    group.num_copies,
                    depth_offset,
                    packed.keys,
                    packed.values,
                )
                self._attention(
                    query[mine],
                    packed.key_tiles,
                    packed.value_tiles,
                    group.blocks,
                    group.num_blocks,
                    mixed[mine],
                    config.head_dim**-0.5,
                    config.num_kv_heads,
                )
            out = self._linear("out", mixed.view(tokens, -1), layer.attention_out).unsqueeze(0)
            norm.sandwich(out, residual, layer.attention_norm, layer.mlp_input_norm, x, eps)
            down = self._linear("down", self._gate_up(x, layer.gate_up), layer.down).unsqueeze(0)
            following = layers[index + 1].input_norm if index + 1 < len(layers) else model.final_norm
            norm.sandwich(down, residual, layer.mlp_norm, following, x, eps)
            between_layers()
        return x

    def _prompt_logprobs(self, piece: Segment, prompt: Prompt, states: torch.Tensor) -> list[PendingLogprobs]:
        """Values of the prompt tokens that this segment's states predict, a block of rows at a time."""
        if prompt.logprob_start is None:
            return []
        wish = prompt.logprob_wish
        first = max(prompt.logprob_start, piece.start + 1)
        last = min(piece.end, len(prompt.token_ids) - 1)
        pending = []
        for begin in range(first, last + 1, LOGPROB_ROWS):
            end = min(begin + LOGPROB_ROWS, last + 1)
            logits = self._linear(
                "lm_head", states[begin - 1 - piece.start : end - 1 - piece.start], self._model.lm_head
            )
            values = logits.float() - log_sum_exp(logits).unsqueeze(1)
            chosen = values.gather(1, prompt.token_ids[begin:end].unsqueeze(1)).squeeze(1)
            tops = None
            if wish.top or wish.ids:
                best, ids = torch.sort(values, dim=-1, descending=True, stable=True)
                named = values[:, self._rows.upload(list(wish.ids), torch.int64)]
                tops = _to_host(best[:, : wish.top]), _to_host(ids[:, : wish.top]), _to_host(named)
            pending.append(PendingLogprobs(piece, begin, _to_host(chosen), tops))
        return pending


def _lines(rows: Rows, lines: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """int32 [len(lines), width] on the device."""
    return rows.upload([value for line in lines for value in line], torch.int32).view(-1, width)


def _to_host(x: torch.Tensor) -> torch.Tensor:
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type == "cuda")
    return host.copy_(x, non_blocking=True)
