"""``interpreted_round.py <folder>``: see test_interpreted.py."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ouro_sgl.messages import Chunk, ExitMode, RowParams, Segment
from ouro_sgl.models.weights import random_lookahead_head
from ouro_sgl.worker.cuda_prefill import CudaPrefill, PendingChunk
from ouro_sgl.worker.cuda_round import CudaRounds, PendingRound
from ouro_sgl.worker.kv_pool import KVPool
from ouro_sgl.worker.prefill import Prompt
from ouro_sgl.worker.rows import Rows
from ouro_sgl.worker.sampler import LogprobWish
from ouro_sgl.worker.worker import Worker, WorkerSettings
from tests.models import rand_checkpoint
from tests.worker_driver import Driver, Model, Request, Result, run


class InterpretedExecutor:
    """Chunks and rounds by the Triton kernels."""

    one_stream = True

    def __init__(self, prefill: CudaPrefill, rounds: CudaRounds) -> None:
        self._prefill, self._rounds = prefill, rounds

    def launch_round(self, running: int, wishes: dict[int, LogprobWish]) -> PendingRound:
        return self._rounds.launch(running, wishes)

    def launch_chunk(
        self, chunk: Chunk, prompts: dict[int, Prompt], between_layers: Callable[[], None]
    ) -> PendingChunk:
        return self._prefill.launch(chunk, prompts, between_layers)

    def decoding(self) -> AbstractContextManager[object]:
        return nullcontext()

    prefilling = decoding


def requests() -> list[Request]:
    """One per path through the kernels: every policy, greedy, drawn, filtered, penalised, biased."""
    base: dict[str, Any] = {"max_new_tokens": 3, "exit_threshold": 0.7, "logprobs": True}
    prompts = [list(range(20, 20 + n)) for n in (3, 70, 9, 33, 17, 5, 30, 2)]
    params = [
        RowParams(**base, temperature=0.0),
        RowParams(**base, temperature=1.0, seed=2**64 - 3),
        RowParams(**base, temperature=0.8, top_k=7, top_p=0.8, seed=5, exit_mode=ExitMode.OURO_DELAYED),
        RowParams(**base, temperature=0.9, min_p=0.2, seed=6, exit_mode=ExitMode.RANDOM_LOOKAHEAD),
        RowParams(
            **base, temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.7
        ),
        RowParams(
            **base, temperature=0.0, bias_ids=[7, 9], bias_values=[100.0, 50.0], min_loops=2, max_loops=3
        ),
        RowParams(**base, temperature=0.0, end_ids=list(range(0, 250)), min_new_tokens=2),
        RowParams(
            max_new_tokens=4,
            temperature=1.0,
            top_k=1,
            seed=9,
            exit_mode=ExitMode.TRACE,
            exit_trace=[4, 1, 3, 2],
        ),
    ]
    params[0].exit_lambdas = params[3].exit_lambdas = params[7].exit_lambdas = True
    for index in (0, 1):
        params[index].top_logprobs_num, params[index].token_ids_logprob = 3, [5, 1]
    made = [Request(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
    made[1].prompt_logprob_start = 2
    return made


def replays() -> list[Request]:
    """The same as they come back from a retraction: end ids and loop limits do not matter before their
    output is new, and a constrained one gets there without a mask."""
    known: list[tuple[list[int], list[int]]] = [
        ([30, 7], [4, 1]),
        ([30], [4]),
        ([9, 9], [4, 3]),
        ([200, 8], [4, 2]),
        ([11, 11], [4, 4]),
        ([7, 200], [4, 1]),
        ([3, 4], [4, 2]),
        ([1, 2], [4, 3]),
    ]
    found = requests()
    for request, (ids, depths) in zip(found, known, strict=True):
        request.forced_ids, request.forced_depths = ids, depths
    found[7].params.exit_trace = [4, 3, 2, 1]
    waiting = RowParams(max_new_tokens=4, temperature=0.7, top_p=0.9, constrained=True, logprobs=True)
    found.append(Request([5, 6], waiting, abort_after=2, forced_ids=[8, 9], forced_depths=[4, 2]))
    return found


def compare(model: Model, make_requests: Callable[[], list[Request]], *, graphs: bool) -> list[Result]:
    """Serve the same requests by the kernels and by the CPU round; what the kernels said. ``graphs``: chunks
    are padded to where graphs would read them."""
    config, slots = model.config, 2048
    settings = WorkerSettings(max_rows=8, max_length=192, rounds_in_flight=2)
    rows = Rows(8, 192, 4, config.vocab_size, config.hidden_size, torch.float32, torch.device("cpu"))
    pool = KVPool(config, slots, torch.float32, torch.device("cpu"), poison=True)
    heads = {ExitMode.RANDOM_LOOKAHEAD: random_lookahead_head(0, config.hidden_size)}
    rounds = CudaRounds(model.model, rows, pool, heads, 1, [1, 2, 4, 8], 4, graphs=False)
    executor = InterpretedExecutor(CudaPrefill(model.model, rows, pool, 128, graphs=graphs), rounds)
    worker = Worker(rows, pool, executor, settings)
    got = Driver(worker, settings, 4, slots, 1).run(make_requests())
    expected = run(model, make_requests(), settings, seed=1)
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert (a.token_ids, a.exit_depths, a.reason) == (b.token_ids, b.exit_depths, b.reason), (index, a, b)
        torch.testing.assert_close(
            torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-4, rtol=1e-4, equal_nan=True
        )
        assert [len(values) for values in a.lambdas] == [len(values) for values in b.lambdas]
        for one, other in zip(a.lambdas, b.lambdas, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        assert sorted(a.prompt_tops) == sorted(b.prompt_tops)
        of_prompt = [(a.prompt_tops[position], b.prompt_tops[position]) for position in sorted(a.prompt_tops)]
        for mine, theirs in [*zip(a.tops, b.tops, strict=True), *of_prompt]:
            assert mine.top_ids == theirs.top_ids
            torch.testing.assert_close(mine.top_values, theirs.top_values, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(mine.id_values, theirs.id_values, atol=1e-4, rtol=1e-4)
    return got


def replay_as_launched(model: Model) -> None:
    """Chunks that are padded to where graphs read them leave the bits of those that are launched as they
    are, whatever longer ones have left there; a chunk's result outlives the next chunk."""
    pick = random.Random(0)
    config, slots, max_rows, length = model.config, 3000, 4, 96
    sides = []
    for graphs in (True, False):
        rows = Rows(
            max_rows, length, 4, config.vocab_size, config.hidden_size, torch.float32, torch.device("cpu")
        )
        pool = KVPool(config, slots, torch.float32, torch.device("cpu"), poison=True)
        sides.append((rows, pool, CudaPrefill(model.model, rows, pool, 100, graphs=graphs)))
    assert sides[0][2].captured == [64, 128]
    free = list(range(slots))
    pick.shuffle(free)
    prompts: dict[int, Prompt] = {}
    done: dict[int, int] = {}
    finished: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, sizes in enumerate(([60, 36], [1], [17, 30, 9], [80], [2, 40], [3])):
        segments = []
        for size in sizes:
            row = pick.choice([row for row in range(max_rows) if row not in {s.row for s in segments}])
            if row not in prompts or done[row] + size > len(prompts[row].token_ids):
                total = min(size + pick.choice([0, 5]), length)
                tokens = torch.tensor([pick.randrange(config.vocab_size) for _ in range(total)])
                prompts[row] = Prompt(row, 0, tokens, 1, 0, LogprobWish(2, (5,)))
                done[row] = 0
            mine = [free.pop() for _ in range(4 * size)]
            for rows, pool, _ in sides:
                pool.handed_out(mine)
                rows.set_prompt_slots(row, done[row], mine)
            segments.append(Segment(row, 0, done[row], done[row] + size, mine))
            done[row] += size
        padded, launched = (
            prefill.launch(Chunk(number, segments), prompts, lambda: None).result() for *_, prefill in sides
        )
        assert padded.logprobs == launched.logprobs
        assert list(padded.final_hidden) == list(launched.final_hidden)
        finished += [(padded.final_hidden[row], hidden) for row, hidden in launched.final_hidden.items()]
        for mine_all, theirs in zip(
            (*sides[0][1].keys, *sides[0][1].values), (*sides[1][1].keys, *sides[1][1].values), strict=True
        ):
            assert torch.equal(mine_all.isnan(), theirs.isnan())
            assert torch.equal(mine_all.nan_to_num(), theirs.nan_to_num())
    assert len(finished) > 3
    for one, other in finished:
        assert torch.equal(one, other)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    model = Model(rand_checkpoint(folder, layers=1))
    replay_as_launched(model)
    got = compare(model, requests, graphs=True)
    depths = sorted({depth for result in got for depth in result.exit_depths[1:]})
    print(f"compared {sum(len(result.token_ids) for result in got)} tokens at depths {depths}")
    assert depths == [1, 2, 3, 4]
    assert sorted(got[1].prompt_tops) == list(range(2, 70))
    assert [bool(result.lambdas) for result in got] == [True, False, False, True, False, False, False, True]

    got = compare(model, replays, graphs=False)
    for request, result in zip(replays(), got, strict=True):
        known = len(request.forced_ids)
        assert result.token_ids[:known] == request.forced_ids
        assert result.exit_depths[:known] == request.forced_depths
        assert (len(result.token_ids) > known) != request.params.constrained
    print(f"compared {sum(len(result.token_ids) for result in got)} tokens of replayed requests")


main()
