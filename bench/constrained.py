"""What one constrained row costs the free rows of its batch, through the whole product without HTTP.

    python bench/constrained.py [--model FOLDER] [--trials 7] [--outputs 128] [--free 31] [--set NAME=VALUE]

Three arms, taken in turn in every trial: the free requests alone; beside one more that is free; beside a
constrained program (a list of dates by regex, as long as the free outputs, then an integer, as SGLang's
``gen(regex=...)`` and ``gen(dtype=int)`` send them). The second arm tells what a row costs anyway.
Prints the median throughput of the free requests in each arm. Their tokens and exit depths must be the
same in all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import ouro_sgl
from ouro_sgl import Engine

TINY = Path(ouro_sgl.__file__).parent / "assets" / "ouro-tiny"
DATE, INTEGER = r"[0-9]{4}-[0-9]{2}-[0-9]{2}\n", r"[-+]?[0-9]{6}"
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


async def program(engine: Engine, outputs: int, constrained: bool) -> None:
    """Two requests, one after the other, with ``outputs`` and 6 tokens at most."""
    for length, pattern in ((outputs, f"({DATE}){{{outputs}}}"), (6, INTEGER)):
        sampling: dict[str, Any] = {"max_new_tokens": length, "sampling_seed": 1, "exit_threshold": 0.5}
        sampling |= {"regex": pattern} if constrained else {"ignore_eos": True}
        answer = await engine.async_generate("Days: ", sampling_params=sampling)
        if constrained:
            assert set(answer["text"]) <= set("+-0123456789\n")


async def trial(engine: Engine, arm: str, count: int, outputs: int) -> tuple[float, list[Any]]:
    """(free tokens per second, ids and depths of the free requests)."""
    begin = time.perf_counter()
    tasks = [asyncio.create_task(engine.async_generate(**free(n, outputs))) for n in range(count)]
    if arm == "alone":
        answers = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - begin
    else:
        async with asyncio.TaskGroup() as group:
            group.create_task(program(engine, outputs, arm == "beside constrained"))
            answers = await asyncio.gather(*tasks)
            seconds = time.perf_counter() - begin
    return count * outputs / seconds, [[a["output_ids"], a["meta_info"]["exit_depths"]] for a in answers]


async def measure(engine: Engine, options: argparse.Namespace) -> None:
    for arm in ARMS:  # what starts with the first grammar has started then
        _, expected = await trial(engine, arm, options.free, options.outputs)
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(options.trials):
        for arm in ARMS:
            rate, bits = await trial(engine, arm, options.free, options.outputs)
            assert bits == expected, f"{arm}: the free requests are not what they were before"
            rates[arm].append(rate)
    for arm in ARMS:
        line = f"{arm:>18}: {statistics.median(rates[arm]):7.0f} free tokens/s"
        line += f" ({min(rates[arm]):.0f} .. {max(rates[arm]):.0f})"
        print(line, flush=True)
    for other in ("alone", "beside free"):
        pairs = zip(rates["beside constrained"], rates[other], strict=True)
        ratio = statistics.median(constrained / plain for constrained, plain in pairs)
        print(f"beside constrained against {other}, median of pairs: {ratio - 1:+.1%}")


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
