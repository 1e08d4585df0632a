"""``python -m ouro_sgl chat``: a terminal chat that shows the exit depth of each token by colour."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ouro_sgl import cli
from ouro_sgl.config import SETTINGS, ServerArgs
from ouro_sgl.errors import ConfigError, EngineDeadError, RequestError
from ouro_sgl.frontend.chat_template import ChatTemplate

if TYPE_CHECKING:
    from ouro_sgl.engine import Engine

# From shallow to deep, in the terminal's palette of 256 colours: green, cyan, yellow, red.
PALETTE = (42, 45, 220, 203)
DEFAULT_THRESHOLD = 0.5  # a model's own default is often 1.0, with which no token leaves early
MAX_NEW_TOKENS = 256
COMMANDS = "/threshold X   /reset   /quit"


class Painter:
    """Text in the colour of its depth, or plain text."""

    def __init__(self, total_loops: int, colour: bool) -> None:
        self._total_loops = total_loops
        self._colour = colour

    def paint(self, text: str, depth: int) -> str:
        """``text`` of a token that ran ``depth`` loops (1..T)."""
        if not self._colour or not text:
            return text
        steps = max(1, self._total_loops - 1)
        code = PALETTE[(depth - 1) * (len(PALETTE) - 1) // steps]
        return f"\x1b[38;5;{code}m{text}\x1b[0m"

    def dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._colour else text

    def legend(self) -> str:
        depths = range(1, self._total_loops + 1)
        return "loops per token: " + " ".join(self.paint(str(depth), depth) for depth in depths)


def wants_colour(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal whose user did not object (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Chat:
    """One conversation. Reads lines, writes answers.

    Args:
        engine: runs the model.
        template: turns messages into a prompt.
        threshold: exit threshold to begin with.
        out: where answers go.
    """

    def __init__(self, engine: Engine, template: ChatTemplate, threshold: float, out: TextIO) -> None:
        self._engine = engine
        self._template = template
        self._out = out
        self._painter = Painter(engine.model.total_loops, wants_colour(out))
        self.threshold = threshold
        self.messages: list[dict[str, str]] = []

    def run(self, lines: Iterable[str]) -> None:
        """Answer line after line until they end or one of them is ``/quit``."""
        self._say(f"{self._painter.legend()}   threshold {self.threshold}")
        self._say(self._painter.dim(COMMANDS))
        for line in lines:
            text = line.strip()
            if text == "/quit":
                return
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._turn(text)

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def _command(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name == "/reset":
            self.messages.clear()
            self._say("a new conversation")
        elif name == "/threshold":
            self._set_threshold(value)
        else:
            self._say(f"unknown command {name}; there are: {COMMANDS}")

    def _set_threshold(self, value: str) -> None:
        threshold = -1.0
        with suppress(ValueError):
            threshold = float(value)
        if 0.0 <= threshold <= 1.0:
            self.threshold = threshold
            self._say(f"threshold {threshold}")
        else:
            self._say(f"a threshold lies in 0 .. 1, not {value!r}")

    def _turn(self, text: str) -> None:
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            answer = self._stream(self._template.render(messages))
        except RequestError as error:
            self._say(f"{error.message} (/reset begins a new conversation)")
            return
        except KeyboardInterrupt:
            self._say(self._painter.dim(" [interrupted]"))
            return
        self.messages = [*messages, {"role": "assistant", "content": answer["text"]}]
        depths = answer["meta_info"]["exit_depths"]
        mean = sum(depths) / len(depths) if depths else 0.0
        self._say("\n" + self._painter.dim(f"[{len(depths)} tokens, {mean:.2f} loops on average]"))

    def _stream(self, prompt: str) -> dict[str, Any]:
        """Print the answer as it grows, token by token; the last chunk."""
        params = {
            "temperature": 0.0,
            "max_new_tokens": self._room(prompt),
            "exit_threshold": self.threshold,
        }
        detokenizer = self._engine.tokenizer.detokenizer(skip_special_tokens=True)
        shown = 0
        chunk: dict[str, Any] = {}
        for chunk in self._engine.generate(prompt, params, stream=True):
            depths = chunk["meta_info"]["exit_depths"]
            for token_id, depth in zip(chunk["output_ids"][shown:], depths[shown:], strict=True):
                self._out.write(self._painter.paint(_harmless(detokenizer.feed((token_id,))), depth))
            shown = len(depths)
            self._out.flush()
        return chunk

    def _room(self, prompt: str) -> int:
        """Tokens that an answer to ``prompt`` may have."""
        length = len(self._engine.tokenizer.encode(prompt))
        return max(1, min(MAX_NEW_TOKENS, self._engine.served_length - length))


def _harmless(text: str) -> str:
    """``text`` without characters that would command the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def _typed_lines() -> Iterable[str]:
    """What the user types, with line editing; Ctrl-D ends it, Ctrl-C drops a line."""
    with suppress(ImportError):
        import readline  # noqa: F401  # input() uses it once it is loaded
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


def _engine_settings(args: ServerArgs) -> dict[str, Any]:
    defaults = ServerArgs()
    values = {name: getattr(args, name) for name in SETTINGS}
    return {name: value for name, value in values.items() if value != getattr(defaults, name)}


def main(argv: Sequence[str]) -> int:
    """Parse, start the model, talk. A refusal is one line on standard error and exit code 2."""
    try:
        args = cli.parse_args(argv, prog="python -m ouro_sgl chat", http=False)
        if args.exit_mode == "trace":
            raise ConfigError("--exit-mode trace: a chat has no exit depths to follow")
        from ouro_sgl.engine import Engine

        with Engine(**_engine_settings(args)) as engine:
            file = Path(args.chat_template) if args.chat_template else None
            template = ChatTemplate(Path(engine.args.tokenizer_path or engine.args.model_path), file)
            threshold = args.default_exit_threshold
            chat = Chat(engine, template, DEFAULT_THRESHOLD if threshold is None else threshold, sys.stdout)
            chat.run(_typed_lines() if sys.stdin.isatty() else sys.stdin)
    except ConfigError as error:
        print(f"ouro_sgl: error: {error}", file=sys.stderr)
        return 2
    except EngineDeadError as error:
        print(f"ouro_sgl: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while the model loads; later ones end an answer or a line
        return 130
    return 0
