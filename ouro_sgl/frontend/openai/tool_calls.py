"""Tool calls in the text of an answer.

Two forms. A model calls on its own account as Hermes and Qwen models do,

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

and where the client demands a call, the output is constrained to a JSON list of
``{"name": ..., "parameters": {...}}``. A call is reported when it is complete. What cannot be read as a
call of a known function stays in the text, so that nothing is lost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from ouro_sgl.errors import RequestError
from ouro_sgl.frontend.openai.reasoning import held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON of an object


class CallParser(Protocol):
    """The calls of one sequence."""

    def feed(self, piece: str) -> tuple[str, list[ToolCall]]:
        """What ``piece`` adds: (content, calls)."""

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What is left at the end: (content, calls)."""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _load(text: str) -> Any:
    """A JSON value.

    Raises:
        ValueError: ``text`` is none, holds half a character, or is nested too deeply.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _call(value: Any, names: frozenset[str]) -> ToolCall:
    """Raises ValueError if ``value`` is no call of a known function."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in names:
        raise ValueError("not a call of a known function")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are no object")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


class MarkedCalls:
    """Calls between ``<tool_call>`` and ``</tool_call>``, text around them.

    White space next to a call is not part of the text, except between two words.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._space = ""  # white space that a call may follow, not handed out yet
        self._pending = ""  # text outside: a part of the marker; inside: the call so far
        self._inside = False
        self._after_call = False  # nothing but white space since the last call
        self._has_text = False

    def feed(self, piece: str) -> tuple[str, list[ToolCall]]:
        content: list[str] = []
        calls: list[ToolCall] = []
        marker = CLOSE if self._inside else OPEN
        # A marker can begin in what is pending, but only in its last characters.
        start = max(0, len(self._pending) - len(marker) + 1)
        text = self._pending + piece
        while True:
            place = text.find(CLOSE if self._inside else OPEN, start)
            start = 0
            if place < 0:
                break
            if self._inside:
                call = self._read(text[:place])
                if call is None:
                    content.append(self._shown(OPEN + text[:place] + CLOSE))
                else:
                    calls.append(call)
                    self._space, self._after_call = "", True
                text = text[place + len(CLOSE) :]
            else:
                content.append(self._outside(text[:place]))
                text = text[place + len(OPEN) :]
            self._inside = not self._inside
        if not self._inside:
            held = held_back(text, OPEN)
            content.append(self._outside(text[: len(text) - held]))
            text = text[len(text) - held :]
        self._pending = text
        return "".join(content), calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        text, self._pending = self._pending, ""
        if self._inside:
            # Some models end their turn instead of closing the call.
            call = self._read(text)
            if call is not None:
                self._space = ""
                return "", [call]
            text = OPEN + text
        elif self._after_call and not text:
            return "", []
        return self._shown(text), []

    def _read(self, text: str) -> ToolCall | None:
        try:
            return _call(_load(text), self._names)
        except ValueError:
            return None

    def _outside(self, text: str) -> str:
        """Text between calls, but for the white space at its end."""
        if self._after_call and not self._has_text:
            text = text.lstrip()
        kept = text.rstrip()
        if not kept:
            self._space += text
            return ""
        shown = self._shown(kept)
        self._space = text[len(kept) :]
        return shown

    def _shown(self, text: str) -> str:
        shown = self._space + text
        self._space, self._after_call, self._has_text = "", False, True
        return shown


class ListedCalls:
    """A constrained output: the whole text is a JSON list of calls."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._pieces: list[str] = []

    def feed(self, piece: str) -> tuple[str, list[ToolCall]]:
        self._pieces.append(piece)
        return "", []

    def finish(self) -> tuple[str, list[ToolCall]]:
        text = "".join(self._pieces)
        self._pieces = []
        try:
            values = _load(text)
            if not isinstance(values, list):
                values = [values]
            return "", [_call(value, self._names) for value in values]
        except ValueError:
            return text, []  # cut short


def calls_schema(functions: Sequence[dict[str, Any]], *, single: bool) -> dict[str, Any]:
    """JSON schema of a list of calls, for :class:`ListedCalls`.

    Args:
        functions: each with ``name`` and perhaps ``parameters``, a JSON schema.
        single: exactly one call.

    Raises:
        RequestError: two functions define the same name under ``$defs`` differently.
    """
    definitions: dict[str, Any] = {}
    for function in functions:
        # References start at the root of a schema, so definitions must lie there.
        shared = (function.get("parameters") or {}).get("$defs")
        for name, definition in shared.items() if isinstance(shared, dict) else ():
            if definitions.setdefault(name, definition) != definition:
                raise RequestError(f"tools: $defs/{name} is defined in two ways")
    items = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "parameters": function.get("parameters") or {"type": "object"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": items[0] if len(items) == 1 else {"anyOf": items},
    }
    if single:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return schema
