"""End to end: the whole product on random weights of the 1.4B shape, through Engine or through HTTP.

    python -m bench.e2e [--cells 1024x1,1024x32] [--depths 4,trace] [--http] [--stream ends,on]
                        [--rivals] [--set NAME=VALUE]

Protocol: 2 C requests in a closed loop at concurrency C, ``--outputs`` tokens each, greedy, end ids
ignored, distinct random prompts; depths ``4`` run every loop, ``trace`` forces depths 2, 3, 4 with
65, 30 and 5 percent (mean 2.4) from a seed. Median of up to ``--trials``: another one starts only if all of
its cell at these depths would then end within ``--seconds``, so that the shortest cells are repeated and
the longest are not. A short request warms up each context (``--no-warmup``: none). All depths and ways to
stream run in every cell, on one start. The longest prompts have 65408 tokens: 128 outputs end at 65536.
A cell that fails, or whose trial takes longer than ``--limit`` seconds, is printed and the others go on.

``--stream`` is what clients ask for: ``ends`` the first and the last chunk, which tells the time to the
first token at no cost; ``on`` a chunk for each token; ``off`` one answer. ``--rivals`` adds the ratio to
the figures in ``bench/rivals.csv``, in another such file or given as ``1024x1=141,1024x32=1734``; those
run all loops of every token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ouro_sgl

TINY = Path(ouro_sgl.__file__).parent / "assets" / "ouro-tiny"
RIVALS = Path(__file__).with_name("rivals.csv")
CELLS = "1024x1,1024x32,1024x128,4096x1,4096x16,4096x64,16384x1,16384x4,16384x16,65408x1,65408x2,65408x4"
VOCABULARY = 49152
START_SECONDS = 300.0

Ask = Callable[[dict[str, Any]], AsyncIterator[dict[str, Any]]]  # a request to the chunks of its answer
Info = Callable[[], dict[str, Any]]  # statistics of the server


def checkpoint(folder: Path, layers: int) -> Path:
    """A folder of the 1.4B shape without weights; the tokenizer is the bundled one."""
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    config.update(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
        max_position_embeddings=65536,
        rope_theta=1e6,
    )
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY / name, folder / name)
    return folder


def request(rng: random.Random, context: int, outputs: int, depths: str, stream: str) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": outputs, "ignore_eos": True}
    if depths == "trace":
        sampling["exit_trace"] = [4, *rng.choices([2, 3, 4], [65, 30, 5], k=outputs - 1)]
    else:
        sampling["exit_threshold"] = 1.0
    if stream == "ends":
        sampling["stream_interval"] = 1 << 30
    ids = [rng.randrange(10, VOCABULARY) for _ in range(context)]
    return {"input_ids": ids, "sampling_params": sampling, "stream": stream != "off"}


def ask_engine(engine: ouro_sgl.Engine) -> Ask:
    async def ask(payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        answer = await engine.async_generate(**payload)
        if not payload["stream"]:
            yield answer
            return
        async for chunk in answer:
            yield chunk

    return ask


@contextlib.asynccontextmanager
async def ask_server(url: str) -> AsyncIterator[Ask]:
    import aiohttp
    import orjson

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:

        async def ask(payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            headers = {"Content-Type": "application/json"}
            async with session.post(
                f"{url}/generate", data=orjson.dumps(payload), headers=headers
            ) as response:
                assert response.status == 200, await response.text()
                if not payload["stream"]:
                    yield orjson.loads(await response.read())
                    return
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        yield orjson.loads(line[6:])

        yield ask


@dataclass(frozen=True)
class Answered:
    """When one answer began and ended, in seconds from its request."""

    first: float
    last: float


async def closed_loop(ask: Ask, requests: list[dict[str, Any]], concurrency: int) -> list[Answered]:
    queue = iter(requests)
    answers = []

    async def client() -> None:
        for payload in queue:
            begin = time.perf_counter()
            first = None
            answer: dict[str, Any] = {}
            async for chunk in ask(payload):
                first = first or time.perf_counter() - begin
                answer = chunk
            last = time.perf_counter() - begin
            assert first is not None, "an answer without a chunk"
            assert "meta_info" in answer, answer
            tokens = answer["meta_info"]["completion_tokens"]
            assert tokens == payload["sampling_params"]["max_new_tokens"], answer["meta_info"]
            answers.append(Answered(first, last))

    async with asyncio.TaskGroup() as clients:  # when one fails the others are cancelled
        for _ in range(concurrency):
            clients.create_task(client())
    return answers


def latencies(answers: list[Answered], cell: str, outputs: int, stream: str) -> Iterator[str]:
    """Medians over requests, in words. One request at a time: its first token is its prefill."""
    if stream != "off":
        context, concurrency = map(int, cell.split("x"))
        first = statistics.median(one.first for one in answers)
        rate = f" ({context / first:.0f} prompt tok/s)" if concurrency == 1 else ""
        yield f"first token {first * 1e3:.0f} ms{rate}"
        if outputs > 1:
            gaps = [(one.last - one.first) / (outputs - 1) for one in answers]
            yield f"then {statistics.median(gaps) * 1e3:.2f} ms per token"
    yield f"answer {statistics.median(one.last for one in answers):.2f} s"


def work(info: Info) -> Counter[str]:
    """Totals since the start: rounds, rows in them, chunks."""
    found = info()
    worker = found["worker"]
    return Counter(rounds=worker.get("rounds", 0), lanes=worker.get("lanes", 0), chunks=found["chunks"])


async def measure(
    ask: Ask, info: Info, cell: str, depths: str, stream: str, options: argparse.Namespace
) -> None:
    """Run the trials of one cell and print a line for each, and one for the median of several."""
    context, concurrency = map(int, cell.split("x"))
    outputs = options.outputs
    name = f"{cell} depths {depths} stream {stream}"
    rates: list[float] = []
    spent = 0.0
    while not rates or (
        len(rates) < options.trials and spent * (len(rates) + 1) / len(rates) < options.seconds
    ):
        rng = random.Random(f"{cell} {depths} {stream} {len(rates)}")
        requests = [request(rng, context, outputs, depths, stream) for _ in range(2 * concurrency)]
        before = work(info)
        begin = time.perf_counter()
        async with asyncio.timeout(options.limit):
            answers = await closed_loop(ask, requests, concurrency)
        seconds = time.perf_counter() - begin
        done = work(info) - before
        spent += seconds
        rates.append(len(requests) * outputs / seconds)
        parts = [f"{name}: {rates[-1]:.1f} output tok/s in {seconds:.1f} s"]
        parts += latencies(answers, cell, outputs, stream)
        parts.append(f"{done['rounds']} rounds of {done['lanes'] / done['rounds']:.1f} rows")
        parts.append(f"{done['chunks']} chunks")
        print(", ".join(parts), flush=True)
    rate = statistics.median(rates)
    parts = [f"    median of {len(rates)}: {rate:.1f} output tok/s"]
    if cell in options.rivals:
        parts.append(f"{rate / options.rivals[cell]:.2f} of {options.rivals[cell]:g}")
    print(", ".join(parts), flush=True)


async def warm_up(ask: Ask, context: int, options: argparse.Namespace) -> None:
    begin = time.perf_counter()
    rng = random.Random(f"{context} warm-up")
    async with asyncio.timeout(options.limit):
        await closed_loop(ask, [request(rng, context, options.warmup_outputs, "4", "ends")], 1)
    print(f"{context} tokens warm after {time.perf_counter() - begin:.1f} s", flush=True)


async def run(ask: Ask, info: Info, options: argparse.Namespace) -> list[str]:
    """Run all cells; the names of those that failed."""
    failed, warm = [], set()
    for cell in options.cells.split(","):
        begin = time.perf_counter()
        try:
            context = int(cell.split("x")[0])
            if options.warmup_outputs and context not in warm:
                await warm_up(ask, context, options)
                warm.add(context)
            for depths in options.depths:
                for stream in options.stream:
                    await measure(ask, info, cell, depths, stream, options)
        except Exception:
            failed.append(cell)
            print(f"{cell} FAILED after {time.perf_counter() - begin:.0f} s", flush=True)
            traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
    return failed


def flags(settings: dict[str, Any]) -> Iterator[str]:
    """Engine settings as the server's flags."""
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield f"--{flag}={value}"


def through_engine(path: Path, settings: dict[str, Any], options: argparse.Namespace) -> list[str]:
    begin = time.perf_counter()
    with ouro_sgl.Engine(path, **settings) as engine:
        slots = engine.get_server_info()["num_slots"]
        print(f"engine ready after {time.perf_counter() - begin:.1f} s, {slots} slots", flush=True)
        return asyncio.run(run(ask_engine(engine), engine.get_server_info, options))


def through_http(path: Path, settings: dict[str, Any], options: argparse.Namespace) -> list[str]:
    from tests.server import start_server

    begin = time.perf_counter()
    with start_server(path, "--log-level=warning", *flags(settings)) as server:
        server.wait_ready(START_SECONDS)
        slots = server.get("/server_info").json()["num_slots"]
        print(f"server ready after {time.perf_counter() - begin:.1f} s, {slots} slots", flush=True)

        async def drive() -> list[str]:
            async with ask_server(server.url) as ask:
                return await run(
                    ask, lambda: server.get("/server_info").json()["internal_states"][0], options
                )

        failed = asyncio.run(drive())
        if failed:
            print(server.log(), end="", flush=True)
        return failed


def rivals(text: str) -> dict[str, float]:
    """Output tokens per second by cell, from a file or from the text itself."""
    if "=" in text:
        return {cell: float(rate) for cell, rate in (item.split("=") for item in text.split(","))}
    with Path(text).open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(line for line in file if not line.startswith("#"))
        return {line["cell"]: float(line["output_tokens_per_second"]) for line in lines}


def several(*known: str) -> Callable[[str], list[str]]:
    """An argument type: some of these words, with commas between them."""

    def parse(text: str) -> list[str]:
        words = text.split(",")
        if not set(words) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r} is not made of {', '.join(known)}")
        return words

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default=CELLS, help="CONTEXTxCONCURRENCY, with commas between them")
    parser.add_argument("--outputs", type=int, default=128)
    parser.add_argument("--depths", type=several("4", "trace"), default=["4"])
    parser.add_argument("--http", action="store_true", help="start the server and be its clients")
    parser.add_argument("--stream", type=several("ends", "on", "off"), default=["ends"])
    parser.add_argument("--trials", type=int, default=3, help="at most")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a cell's trials at one depth")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of one trial")
    parser.add_argument("--warmup-outputs", type=int, default=8, help="tokens of a warm-up request")
    parser.add_argument("--no-warmup", dest="warmup_outputs", action="store_const", const=0)
    parser.add_argument("--rivals", type=rivals, nargs="?", const=str(RIVALS), default={})
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an engine setting")
    options = parser.parse_args()
    settings = {"device": options.device, "load_format": "dummy"}
    settings |= {name: json.loads(value) for name, value in (item.split("=", 1) for item in options.set)}
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint(Path(folder), options.layers)
        through = through_http if options.http else through_engine
        failed = through(path, settings, options)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
