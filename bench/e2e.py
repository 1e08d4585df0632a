"""End to end: the whole product (three processes, no HTTP) on random weights of the 1.4B shape.

    python bench/e2e.py [--cells 1024x1,1024x32] [--outputs 128] [--depths 4|trace] [--set NAME=VALUE]

Protocol: 2 C requests in a closed loop at concurrency C, ``--outputs`` tokens each, greedy, end ids
ignored, distinct random prompts; ``--depths 4`` runs every loop, ``trace`` forces depths 2, 3, 4 with
65, 30 and 5 percent (mean 2.4) from a seed. Median of ``--trials`` after one warm-up trial.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import ouro_sgl

TINY = Path(ouro_sgl.__file__).parent / "assets" / "ouro-tiny"
CELLS = "1024x1,1024x32,1024x128,4096x16,16384x4"
VOCABULARY = 49152


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


def request(rng: random.Random, context: int, outputs: int, depths: str) -> dict[str, object]:
    sampling: dict[str, object] = {"temperature": 0, "max_new_tokens": outputs, "ignore_eos": True}
    if depths == "trace":
        sampling["exit_trace"] = [4, *rng.choices([2, 3, 4], [65, 30, 5], k=outputs - 1)]
    else:
        sampling["exit_threshold"] = 1.0
    return {"input_ids": [rng.randrange(10, VOCABULARY) for _ in range(context)], "sampling_params": sampling}


async def trial(engine: ouro_sgl.Engine, requests: list[dict[str, object]], concurrency: int) -> float:
    """Seconds for all requests."""
    queue = iter(requests)

    async def client() -> None:
        for payload in queue:
            answer = await engine.async_generate(**payload)  # type: ignore[arg-type]
            expected = payload["sampling_params"]["max_new_tokens"]  # type: ignore[index]
            assert answer["meta_info"]["completion_tokens"] == expected

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--outputs", type=int, default=128)
    parser.add_argument("--depths", choices=("4", "trace"), default="4")
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an engine setting")
    options = parser.parse_args()
    settings = {name: json.loads(value) for name, value in (item.split("=", 1) for item in options.set)}
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint(Path(folder), options.layers)
        begin = time.perf_counter()
        with ouro_sgl.Engine(path, device=options.device, load_format="dummy", **settings) as engine:
            info = engine.get_server_info()
            print(f"ready after {time.perf_counter() - begin:.1f} s, {info['num_slots']} slots", flush=True)
            for cell in options.cells.split(","):
                context, concurrency = map(int, cell.split("x"))
                rates = []
                for number in range(options.trials + 1):
                    rng = random.Random(f"{cell} {number}")
                    requests = [
                        request(rng, context, options.outputs, options.depths) for _ in range(2 * concurrency)
                    ]
                    seconds = asyncio.run(trial(engine, requests, concurrency))
                    rates.append(len(requests) * options.outputs / seconds)
                print(
                    f"{cell} depths {options.depths}: {statistics.median(rates[1:]):.1f} output tok/s "
                    f"(trials {', '.join(f'{rate:.1f}' for rate in rates[1:])})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
