"""What one constrained row costs the free rows of its batch, through the whole product without HTTP.

    python bench/constrained.py [--model FOLDER] [--trials 7] [--outputs 128] [--free 31] [--set NAME=VALUE]

Three arms, taken in turn in every trial: the free requests alone; beside a client that repeats short
free requests; beside one that repeats constrained ones of the same length (a regex, then an integer, as
SGLang's ``gen(regex=...)`` and ``gen(dtype=int)`` send them). Prints the median throughput of the free
requests in each arm. Their tokens and exit depths must be the same in all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import ouro_sgl
from ouro_sgl import Engine

TINY = Path(ouro_sgl.__file__).parent / "assets" / "ouro-tiny"
# Length of the output in tokens of one character each, and the pattern that makes it so.
PATTERNS = ((10, r"[0-9]{4}-[0-9]{2}-[0-9]{2}"), (6, r"[-+]?[0-9]{6}"))
ARMS = ("alone", "beside free", "beside constrained")


def free(number: int, outputs: int) -> dict[str, Any]:
    """Greedy with early exits for odd numbers, sampled for even ones."""
    return {
        "prompt": f"Question {number}: what is {number} plus {number + 3}?\n",
        "sampling_params": {
            "max_new_tokens": outputs,
            "ignore_eos": True,
            "temperature": 0.0 if number % 2 else 0.8,
            "sampling_seed": number,
            "exit_threshold": 0.5,
        },
    }


def short(number: int, constrained: bool) -> dict[str, Any]:
    length, pattern = PATTERNS[number % len(PATTERNS)]
    sampling: dict[str, Any] = {"max_new_tokens": length, "sampling_seed": number, "exit_threshold": 0.5}
    sampling |= {"regex": pattern} if constrained else {"ignore_eos": True}
    return {"prompt": f"Day {number % 50}: ", "sampling_params": sampling}


async def neighbour(engine: Engine, constrained: bool, counts: list[int]) -> None:
    """Short requests, one after the other, until cancelled; ``counts`` gets their output lengths."""
    for number in range(1 << 30):
        answer = await engine.async_generate(**short(number, constrained))
        counts.append(answer["meta_info"]["completion_tokens"])


async def trial(engine: Engine, arm: str, count: int, outputs: int) -> tuple[float, list[Any], list[int]]:
    """(free tokens per second, ids and depths of the free requests, output lengths of the neighbour)."""
    counts: list[int] = []
    task = None
    if arm != "alone":
        task = asyncio.create_task(neighbour(engine, arm == "beside constrained", counts))
        while not counts:  # what starts with the first grammar has started
            await asyncio.sleep(0.001)
        counts.clear()
    begin = time.perf_counter()
    answers = await asyncio.gather(*(engine.async_generate(**free(n, outputs)) for n in range(count)))
    seconds = time.perf_counter() - begin
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    bits = [[answer["output_ids"], answer["meta_info"]["exit_depths"]] for answer in answers]
    return count * outputs / seconds, bits, counts


async def measure(engine: Engine, options: argparse.Namespace) -> None:
    _, expected, _ = await trial(engine, "alone", options.free, options.outputs)
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    lengths: dict[str, list[int]] = {arm: [] for arm in ARMS}
    for _ in range(options.trials):
        for arm in ARMS:
            rate, bits, counts = await trial(engine, arm, options.free, options.outputs)
            assert bits == expected, f"{arm}: the free requests are not what they were alone"
            rates[arm].append(rate)
            lengths[arm] += counts
    alone = statistics.median(rates["alone"])
    for arm in ARMS:
        rate = statistics.median(rates[arm])
        spread = f"{min(rates[arm]):.0f} .. {max(rates[arm]):.0f}"
        line = f"{arm:>18}: {rate:7.0f} free tokens/s ({spread}), {rate / alone - 1:+.1%} of alone"
        if lengths[arm]:
            calls, tokens = len(lengths[arm]), sum(lengths[arm])
            line += f"; the neighbour had {calls} answers with {tokens} tokens"
        print(line, flush=True)
    pairs = zip(rates["beside constrained"], rates["beside free"], strict=True)
    ratio = statistics.median(constrained / plain for constrained, plain in pairs)
    print(f"constrained against free neighbour, median of pairs: {ratio - 1:+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--outputs", type=int, default=128, help="tokens of each free request")
    parser.add_argument("--free", type=int, default=31)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an engine setting")
    options = parser.parse_args()
    given = {name: json.loads(value) for name, value in (item.split("=", 1) for item in options.set)}
    settings = {"max_running_requests": options.free + 1, **given}
    with Engine(options.model, **settings) as engine:
        asyncio.run(measure(engine, options))


if __name__ == "__main__":
    main()
