"""Exactness in bf16 at full width: every execution mode against each request running alone.

    python -m bench.trials [--layers 3] [--requests 24] [--deep] [--policies OURO,TRACE]

Needs a CUDA device. The reference of a trial is its request alone, eager, one round in flight, in one
stream. A trial differs if any token, exit depth or log-probability does. ``--deep`` runs each mode
once on 24 layers. Schedules come from the driver of the tests: random rows, slots, chunk borders,
grants and neighbours.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time

import torch

from bench.gpu import config_1_4b, make_model
from ouro_sgl.messages import ExitMode, RowParams
from ouro_sgl.worker.worker import WorkerSettings
from tests.gpu.cuda_driver import CudaModel, Mode
from tests.worker_driver import Request, run

LENGTH = 1100
OUTPUTS = 32
MODES = {
    "all": Mode(),
    "eager": Mode(graphs=False),
    "one stream": Mode(single_stream=True),
    "padded to powers of two": Mode(power_of_two=True),
    "no static buffers": Mode(graphs=False, static_buffers=False),
}
POLICIES = [ExitMode.OURO, ExitMode.OURO_DELAYED, ExitMode.RANDOM_LOOKAHEAD, ExitMode.TRACE]


def make(layers: int) -> CudaModel:
    config = config_1_4b(layers)
    model = make_model(config)
    generator = torch.Generator("cuda").manual_seed(3)
    # a gate under which tokens leave at all depths
    width = config.hidden_size
    model.gate_weight.copy_(torch.randn(width, device="cuda", generator=generator) * 1.2 / width**0.5)
    model.gate_bias.fill_(-0.4)
    return CudaModel.of(config, model)


def requests(count: int, policy: ExitMode, seed: int) -> list[Request]:
    rng = random.Random(seed)
    common = [rng.randrange(10, 49000) for _ in range(900)]
    made = []
    for _ in range(count):
        prompt = common[: rng.choice([0, 64, 150, 450, 900])] + [
            rng.randrange(10, 49000) for _ in range(rng.choice([1, 17, 100]))
        ]
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--requests", type=int, default=24, help="per policy; each runs in every mode")
    parser.add_argument(
        "--deep", action="store_true", help="24 layers, 4 requests per policy, each mode once"
    )
    parser.add_argument("--policies", default=",".join(policy.name for policy in POLICIES))
    options = parser.parse_args()
    seeds = (1,) if options.deep else (0, 1)
    layers, count = (24, 4) if options.deep else (options.layers, options.requests)
    model = make(layers)
    begin = time.monotonic()
    trials = differing = 0
    depths: set[int] = set()
    alone = WorkerSettings(max_rows=1, max_length=LENGTH)
    for number, policy in enumerate(POLICIES):
        if policy.name not in options.policies.split(","):
            continue
        batch = requests(count, policy, number)
        model.mode = Mode(graphs=False, single_stream=True)
        expected = [run(model, [one], alone, max_chunk=512, eager=True)[0] for one in batch]
        for result in expected:
            depths.update(result.exit_depths[1:])
        for (name, mode), seed in itertools.product(MODES.items(), seeds):
            model.mode = mode
            rng = random.Random(f"{policy} {name} {seed}")
            settings = WorkerSettings(
                max_rows=rng.choice([4, 16, 24]), max_length=LENGTH, rounds_in_flight=rng.choice([1, 2, 4, 8])
            )
            chunk = rng.choice([16, 100, 400])
            got = run(
                model, batch, settings, seed, num_slots=110_000, max_chunk=chunk, reuse_prefixes=bool(seed)
            )
            different = sum(a.comparable() != b.comparable() for a, b in zip(got, expected, strict=True))
            trials += count
            differing += different
            if different:
                print(f"{policy.name}, {name}, seed {seed}: {different} of {count} differ", flush=True)
    print(
        f"{layers} layers: {differing} of {trials} trials differ; depths seen {sorted(depths)}; "
        f"{time.monotonic() - begin:.0f} s on {torch.cuda.get_device_name(0)}"
    )
    if differing:
        sys.exit(1)


if __name__ == "__main__":
    main()
