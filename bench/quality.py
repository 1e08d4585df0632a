"""What early exit costs: accuracy on held-out problems by loops, exit mode, threshold and K/V layout.

    python bench/quality.py                      # ouro-tiny, tables in Markdown
    python bench/quality.py --per-kind 50 --device cuda --samples

The problems come from the generator of ouro-tiny's corpus and are disjoint from its training
problems; an answer is right when it ends with the expected words. Decoding is greedy. The mean
depth is over all generated tokens but each answer's first, which always has full depth.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import tiny_corpus

import ouro_sgl

EXIT_MODES = ("ouro", "ouro_delayed", "random_lookahead", "lookahead")
THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LONGEST_ANSWER = 40  # tokens; no right answer is longer
SAMPLES = (
    "Hello!",
    "Who are you?",
    "What is the capital of France?",
    "What is 7 + 5?",
    "What is 345 + 278?",
    "Tell me a story about a cat.",
)


class Run:
    """Greedy answers to all items under one setting, and what became of them."""

    def __init__(self, engine: ouro_sgl.Engine, items: Sequence[tiny_corpus.Item], **params: Any) -> None:
        prompts = [tiny_corpus.chat_prompt(item.question) for item in items]
        sampling = {"temperature": 0.0, "max_new_tokens": LONGEST_ANSWER, **params}
        answers = engine.generate(prompts, sampling)
        depths = [answer["meta_info"]["exit_depths"][1:] for answer in answers]
        self.depth = sum(map(sum, depths)) / max(1, sum(map(len, depths)))
        self.kinds: dict[str, list[bool]] = {}
        for item, answer in zip(items, answers, strict=True):
            self.kinds.setdefault(item.kind, []).append(item.is_right(answer["text"]))

    @property
    def accuracy(self) -> float:
        right = [ok for results in self.kinds.values() for ok in results]
        return sum(right) / len(right)

    def cells(self) -> list[str]:
        """Mean depth, accuracy, and the accuracy of each kind."""
        by_kind = [sum(results) / len(results) for results in self.kinds.values()]
        return [f"{self.depth:.2f}", *(f"{100 * value:.0f}" for value in (self.accuracy, *by_kind))]


def print_row(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def print_head(title: str, names: Sequence[str]) -> None:
    print(f"\n{title}\n")
    print_row(names)
    print_row(["---"] * len(names))


def print_samples(engine: ouro_sgl.Engine) -> None:
    for threshold in (0.3, 0.5, 1.0):
        print(f"\nReplies at exit_threshold {threshold}, with the loops that each token ran:\n")
        prompts = [tiny_corpus.chat_prompt(question) for question in SAMPLES]
        params = {"temperature": 0.0, "max_new_tokens": 100, "exit_threshold": threshold}
        for question, answer in zip(SAMPLES, engine.generate(prompts, params), strict=True):
            depths = "".join(map(str, answer["meta_info"]["exit_depths"]))
            print(f"- {question} → {answer['text']} `{depths}`", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model-path", default=None, help="checkpoint folder (default: the bundled ouro-tiny)"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--per-kind", type=int, default=20, help="problems of each kind")
    parser.add_argument("--seed", type=int, default=7, help="of the problems")
    parser.add_argument("--samples", action="store_true", help="also show replies to everyday questions")
    args = parser.parse_args()

    items = tiny_corpus.held_out_items(args.seed, args.per_kind)
    kinds = list(tiny_corpus.HARD)
    server_args = {"device": args.device, "max_running_requests": 64}
    print(f"{len(items)} held-out problems; accuracy in percent.")

    with ouro_sgl.Engine(args.model_path, **server_args) as engine:
        print_head("By loops (every token runs as many)", ["max_loops", "mean depth", "all", *kinds])
        for loops in range(1, engine.model.total_loops + 1):
            run = Run(engine, items, exit_threshold=1.0, max_loops=loops)
            print_row([str(loops), *run.cells()])

        has_lookahead = (Path(engine.args.model_path) / "lookahead.safetensors").exists()
        modes = EXIT_MODES if has_lookahead else EXIT_MODES[:-1]
        names = [f"{mode} {column}" for mode in modes for column in ("depth", "accuracy")]
        print_head("By threshold and exit mode", ["exit_threshold", *names])
        last_exited: dict[float, Run] = {}
        for threshold in THRESHOLDS:
            runs = [Run(engine, items, exit_threshold=threshold, exit_mode=mode) for mode in modes]
            last_exited[threshold] = runs[0]
            print_row([f"{threshold:.1f}", *(cell for run in runs for cell in run.cells()[:2])])
        if args.samples:
            print_samples(engine)

    with ouro_sgl.Engine(args.model_path, kv_layout="shared", **server_args) as engine:
        layouts = ("last_exited", "shared")
        names = [f"{layout} {column}" for layout in layouts for column in ("depth", "accuracy")]
        print_head("By K/V layout, exit mode ouro", ["exit_threshold", *names])
        for threshold in THRESHOLDS:
            run = Run(engine, items, exit_threshold=threshold)
            print_row([f"{threshold:.1f}", *last_exited[threshold].cells()[:2], *run.cells()[:2]])


if __name__ == "__main__":
    main()
