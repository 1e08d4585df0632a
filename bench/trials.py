"""Exactness in bf16 at full width: every way to execute against each request running alone.

    python -m bench.trials [--parts shallow,deep] [--policies OURO,TRACE] [--modes 'eager;synchronous']

Needs a CUDA device. A trial is one request of 32 tokens in one run; it differs if any token, exit depth or
log-probability does from those of the request running alone: eager, one round in flight.
Every mode runs under every policy, in turn with cold prompts and with cached prefixes (then on few rows,
so that some requests come when others have ended), in turn with small and large chunks. Schedules come
from the driver of the tests: random rows, slots, chunk borders, grants, arrivals. ``shallow``: 3 layers, 27
requests per policy. ``deep``: 24 layers, 6 requests. Prompts end on both sides of the lengths at which
decode attention changes its groups, and go up to 16,000 tokens.

The last lines tell what was covered; a part that misses something it is meant to cover fails, as one does
with a difference.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import torch
from ouro_kernels.triton_ops.attention import PART, SHORT_GROUP, SHORT_LENGTH

from bench.cells import attempt
from bench.gpu import config_1_4b, make_model
from ouro_sgl.messages import ExitMode, RoundEvents, RowParams
from ouro_sgl.worker.worker import WorkerSettings
from tests.gpu.cuda_driver import CudaModel, Mode
from tests.worker_driver import Driver, Request, Result, retracted

OUTPUTS = 32
# tokens of a prompt: rows that decode from 500, 750 and 2030 on get another number of groups meanwhile
SHALLOW = [1, 17, 64, 100, 150, 300, 500, 750, 900, 1000] * 2 + [2030, 2100, 4090] + [16000] * 4
DEEP = [100, 500, 2030, 4090, 4500, 16000]
SHORT, LONG = 1000, 5000  # tokens; a crowd repeats prompts up to SHORT, and has none from LONG on
CROWD = 80  # short requests
POWERS_OF_TWO = 64  # rows up to which all buckets are that anyway
CHUNKS = (300, 1000, 4096)  # most tokens of a chunk
MAX_CHUNK = max(CHUNKS)
SHOWN = 3  # differences of a run


@dataclass(frozen=True)
class Execution:
    """One mode: how rounds and chunks run, and in what company."""

    mode: Mode = field(default_factory=Mode)
    rounds_in_flight: int = 4
    rows: int = 24
    replays: bool = False  # requests come back from a retraction
    crowded: bool = False  # short requests many times over, all at once


ALONE = Execution(Mode(graphs=False), rounds_in_flight=1, rows=1)
EXECUTIONS = {
    "graphs, overlapped": Execution(),
    "8 rounds in flight, few rows": Execution(rounds_in_flight=8, rows=5),
    "synchronous": Execution(rounds_in_flight=1),
    "eager": Execution(Mode(graphs=False)),
    "eager, synchronous": Execution(Mode(graphs=False), rounds_in_flight=1),
    "two streams": Execution(Mode(single_stream=False)),
    "two streams, eager": Execution(Mode(graphs=False, single_stream=False)),
    "many rows": Execution(rows=128, crowded=True),
    "many rows, padded to powers of two": Execution(Mode(power_of_two=True), rows=128, crowded=True),
    "no static buffers": Execution(Mode(graphs=False, static_buffers=False)),
    "alone with graphs": Execution(rows=1),
    "replayed": Execution(replays=True),
}
POLICIES = [ExitMode.OURO, ExitMode.OURO_DELAYED, ExitMode.RANDOM_LOOKAHEAD, ExitMode.TRACE]


@dataclass
class Covered:
    """What the trials of a part have been through."""

    trials: Counter[str] = field(default_factory=Counter)  # by mode
    differing: int = 0
    failed: int = 0  # runs that ended with an error
    chunks: Counter[int] = field(default_factory=Counter)  # by the most tokens of a chunk
    cached: list[int] = field(default_factory=list)  # tokens of each prefix hit
    depths: Counter[int] = field(default_factory=Counter)
    widths: set[int] = field(default_factory=set)  # parts of a range of attention, see WorkList
    most_rows: int = 0  # that ran at once

    def missing(self, deep: bool) -> list[str]:
        lacks = []
        if set(self.depths) != {1, 2, 3, 4}:
            lacks.append("exit depths")
        if not any(tokens > SHORT_LENGTH for tokens in self.cached):
            lacks.append("long prefix hits")
        if self.most_rows <= POWERS_OF_TWO:
            lacks.append("many rows")
        if not deep and not (0 in self.widths and max(self.widths) > SHORT_GROUP // PART):
            lacks.append("narrow and wide ranges of attention")
        return lacks


class Watched(Driver):
    """Also keeps how many rows ran and how attention's work was cut."""

    widths: set[int]
    most_rows: int

    def _take(self, events: RoundEvents, requests: list[Request]) -> None:
        super()._take(events, requests)
        self.most_rows = max(self.most_rows, len(self.worker._running))
        # of whatever round runs now: read on another stream, so that nothing waits
        work = self.worker._executor._rounds._work
        self.widths.add(int(work.num_parts) // work.ranges)


class Part:
    """Trials around one model."""

    def __init__(self, layers: int, lengths: list[int], few_rows: int, runs: int) -> None:
        config = config_1_4b(layers)
        model = make_model(config)
        generator = torch.Generator("cuda").manual_seed(3)
        # a gate under which tokens leave at all depths
        width = config.hidden_size
        model.gate_weight.copy_(torch.randn(width, device="cuda", generator=generator) * 1.2 / width**0.5)
        model.gate_bias.fill_(-0.4)
        self.model = CudaModel.of(config, model)
        self.model.max_chunk = MAX_CHUNK
        self.lengths, self.few_rows, self.runs = lengths, few_rows, runs
        self.max_length = max(lengths) + OUTPUTS
        short = [index for index, length in enumerate(lengths) if length <= SHORT]
        between = [index for index, length in enumerate(lengths) if SHORT < length < LONG]
        self.everyone = list(range(len(lengths)))
        self.crowd = short * -(-CROWD // len(short)) + between
        # for all at once, and for the largest beside what is kept of the others
        most = max(sum(lengths[i] + OUTPUTS for i in places) for places in (self.everyone, self.crowd))
        self.num_slots = config.total_loops * (most + self.max_length)
        self.covered = Covered()

    def requests(self, policy: ExitMode) -> list[Request]:
        """Prompts share beginnings of many lengths."""
        rng = random.Random(f"{policy.name} requests")
        vocabulary = self.model.config.vocab_size
        common = [rng.randrange(10, vocabulary) for _ in range(max(self.lengths))]
        made = []
        for length in self.lengths:
            own = rng.randrange(1, min(length, 120) + 1)
            prompt = common[: length - own] + [rng.randrange(10, vocabulary) for _ in range(own)]
            params = RowParams(
                max_new_tokens=OUTPUTS,
                temperature=rng.choice([0.0, 0.0, 1.0]),
                seed=rng.getrandbits(64),
                exit_mode=policy,
                exit_threshold=rng.choice([0.4, 0.6, 0.7, 0.8]),
                logprobs=True,
            )
            if policy == ExitMode.TRACE:
                params.exit_threshold = 1.0
                params.exit_trace = [4, *rng.choices([1, 2, 3, 4], k=OUTPUTS - 1)]
            made.append(Request(prompt, params))
        return made

    def serve(
        self, how: Execution, batch: list[Request], seed: int, chunk: int, *, reuse: bool, eager: bool
    ) -> tuple[Watched, list[Result]]:
        self.model.mode = how.mode
        rows = min(how.rows, self.few_rows) if reuse else how.rows
        settings = WorkerSettings(rows, self.max_length, how.rounds_in_flight)
        worker = self.model.worker(self.num_slots, settings)
        driver = Watched(
            worker,
            settings,
            self.model.config.total_loops,
            self.num_slots,
            seed,
            max_chunk=chunk,
            reuse_prefixes=reuse,
            eager=eager,
        )
        driver.widths, driver.most_rows = set(), 0
        return driver, driver.run(batch)

    def run_policy(self, policy: ExitMode, modes: list[str]) -> None:
        begin = time.monotonic()
        batch = self.requests(policy)
        expected = self.serve(ALONE, batch, 0, MAX_CHUNK, reuse=False, eager=True)[1]
        depths = Counter(depth for result in expected for depth in result.exit_depths[1:])
        self.covered.depths += depths
        tokens = sum(len(one.token_ids) for one in expected)
        print(
            f"{policy.name}: {len(batch)} requests alone, {tokens} tokens, depths "
            f"{dict(sorted(depths.items()))}, {time.monotonic() - begin:.1f} s",
            flush=True,
        )
        for name in modes:
            if not attempt(f"{policy.name}, {name}", partial(self.run_mode, policy, name, batch, expected)):
                self.covered.failed += 1

    def run_mode(self, policy: ExitMode, name: str, batch: list[Request], expected: list[Result]) -> None:
        begin = time.monotonic()
        how, covered = EXECUTIONS[name], self.covered
        first = POLICIES.index(policy) + list(EXECUTIONS).index(name)
        different: list[str] = []
        kinds = []
        trials = 0
        for turn in range(first, first + self.runs):
            chunk, reuse = CHUNKS[turn % len(CHUNKS)], turn % 2 == 1
            if how.crowded:
                chunk, reuse = MAX_CHUNK, False
            rng = random.Random(f"{policy.name} {name} {turn}")
            places = self.crowd if how.crowded else self.everyone
            asked, wanted = [batch[place] for place in places], [expected[place] for place in places]
            if how.replays:
                asked = [retracted(*pair, rng) for pair in zip(asked, wanted, strict=True)]
            seed = rng.getrandbits(32)
            driver, got = self.serve(how, asked, seed, chunk, reuse=reuse, eager=how.crowded)
            covered.widths |= driver.widths
            covered.most_rows = max(covered.most_rows, driver.most_rows)
            covered.cached += driver.hits
            covered.chunks[chunk] += len(asked)
            covered.trials[name] += len(asked)
            trials += len(asked)
            kinds.append(f"{'cached' if reuse else 'cold'} {chunk}")
            for request, one, alone in zip(asked, got, wanted, strict=True):
                if one.comparable() != alone.comparable():
                    what = f"prompt of {len(request.input_ids)}, {kinds[-1]}"
                    different.append(f"{what}: {first_difference(one, alone)}")
        covered.differing += len(different)
        print(
            f"{policy.name}, {name} ({', '.join(kinds)}): {len(different)} of {trials} differ, "
            f"{time.monotonic() - begin:.1f} s",
            flush=True,
        )
        for line in different[:SHOWN]:
            print(f"    {line}", flush=True)


def first_difference(got: Result, wanted: Result) -> str:
    columns = zip(
        zip(got.token_ids, got.exit_depths, got.logprobs, strict=False),
        zip(wanted.token_ids, wanted.exit_depths, wanted.logprobs, strict=False),
        strict=False,
    )
    for index, (mine, theirs) in enumerate(columns):
        if mine != theirs:
            return f"output {index} is (token, depth, log-probability) {mine}, alone {theirs}"
    return (
        f"{len(got.token_ids)} tokens, {got.reason.name}; alone {len(wanted.token_ids)}, {wanted.reason.name}"
    )


def run_part(name: str, policies: list[ExitMode], modes: list[str], runs: int) -> bool:
    """Run one part and print what it covered; whether it is all right."""
    begin = time.monotonic()
    deep = name == "deep"
    part = Part(24, DEEP, 3, runs) if deep else Part(3, SHALLOW, 4, runs)
    layers, lengths = part.model.config.num_layers, part.lengths
    print(f"{name}: {layers} layers, {part.num_slots} slots, {time.monotonic() - begin:.1f} s", flush=True)
    for policy in policies:
        if not attempt(policy.name, partial(part.run_policy, policy, modes)):
            part.covered.failed += 1
    covered = part.covered
    for line in (
        f"{name}, {layers} layers: {covered.differing} of {covered.trials.total()} trials differ, "
        f"{covered.failed} runs failed; {time.monotonic() - begin:.0f} s on {torch.cuda.get_device_name(0)}",
        f"    trials by mode: {dict(covered.trials)}",
        f"    by longest chunk: {dict(sorted(covered.chunks.items()))}; prompts: {sorted(set(lengths))}",
        f"    {len(covered.cached)} prefix hits of up to {max(covered.cached, default=0)} tokens; up to "
        f"{covered.most_rows} rows at once; ranges of attention of {sorted(covered.widths)} parts",
        f"    exit depths of the requests alone: {dict(sorted(covered.depths.items()))}",
    ):
        print(line, flush=True)
    complete = policies == POLICIES and modes == list(EXECUTIONS)
    missing = covered.missing(deep) if complete else []
    if missing:
        print(f"{name}: NOT COVERED: {', '.join(missing)}", flush=True)
    return not (covered.differing or covered.failed or missing)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="shallow,deep")
    parser.add_argument("--policies", default=",".join(policy.name for policy in POLICIES))
    parser.add_argument("--modes", help=f"some of: {'; '.join(EXECUTIONS)} (with semicolons between them)")
    parser.add_argument("--runs", type=int, default=1, help="of each mode under each policy")
    options = parser.parse_args()
    policies = [ExitMode[name] for name in options.policies.split(",")]
    modes = options.modes.split(";") if options.modes else list(EXECUTIONS)
    if unknown := set(modes) - set(EXECUTIONS):
        parser.error(f"unknown modes: {', '.join(sorted(unknown))}")
    good = [run_part(name, policies, modes, options.runs) for name in options.parts.split(",")]
    if not all(good):
        sys.exit(1)


if __name__ == "__main__":
    main()
