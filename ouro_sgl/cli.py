"""The command line: flags to :class:`ServerArgs`.

Flags carry SGLang's names where SGLang has the concept and the common aliases beside them; all of
them are made from the metadata in ``config.py``. A flag is either served, refused with its reason
(``REFUSED``), or unknown and refused with the nearest name, if one is near. None is accepted and ignored.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from ouro_sgl.config import HTTP, MEMORY, ROUNDS, SETTINGS, Kind, ServerArgs, Setting, flag, nearest
from ouro_sgl.errors import ConfigError

SLOTS_PER_BLOCK = 16

# Flags with one legal value each: (names, value, why no other).
FIXED: tuple[tuple[tuple[str, ...], int, str], ...] = (
    (("--tp-size", "--tensor-parallel-size", "--tp"), 1, "one worker process serves the model"),
    (("--dp-size", "--data-parallel-size", "--dp"), 1, "start one server per GPU"),
    (("--page-size",), 1, "attention reads single slots"),
    (("--block-size",), SLOTS_PER_BLOCK, "--num-blocks counts 16 slots each"),
)

# Flags that a command line for SGLang often has and that set nothing here: name and reason.
REFUSED: dict[str, str] = {
    "--trust-remote-code": "code that comes with a checkpoint is never run",
    "--enable-metrics": "/metrics is always served",
    "--enable-cache-report": "answers always tell their cached tokens",
    "--tool-call-parser": "tool calls are read as Hermes and Qwen models write them",
    "--reasoning-parser": "what stands in <think> becomes reasoning_content, see separate_reasoning",
    "--grammar-backend": "llguidance is the only one",
    "--quantization": "weights are in the number format that --dtype names",
    "--kv-cache-dtype": "K/V has the number format of --dtype",
}


class _Once(argparse.Action):
    """Stores a value; two spellings of one setting with different values are an error."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        values = self.const if self.nargs == 0 else values
        spelling, earlier = namespace.given.get(self.dest, (option, values))
        if spelling != option and earlier != values:
            if self.nargs == 0:
                raise ConfigError(f"{spelling} and {option} contradict each other")
            raise ConfigError(f"{spelling} {earlier} and {option} {values} set the same value differently")
        namespace.given[self.dest] = (option, values)


class _Parser(argparse.ArgumentParser):
    """Raises :class:`ConfigError` instead of printing usage and leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _rounds(text: str) -> int | None:
    return None if text == "auto" else _integer(text)


def _help(setting: Setting, default: Any) -> str:
    shown = setting.auto if default is None or default == "" else "off" if default is False else default
    # argparse reads "%" as a format.
    return f"{setting.help} (default: {shown})".replace("%", "%%")


def _add(group: argparse._ArgumentGroup, name: str, kind: Kind, setting: Setting, default: Any) -> None:
    names = (flag(name), *setting.flags)
    text = _help(setting, default)
    if kind.base is bool and kind.optional:
        off = [name.replace("--", "--no-", 1) for name in names]
        group.add_argument(*names, dest=name, action=_Once, nargs=0, const=True, help=text)
        group.add_argument(*off, dest=name, action=_Once, nargs=0, const=False, help="its negation")
        return
    if kind.base is bool:
        group.add_argument(*names, dest=name, action=_Once, nargs=0, const=True, help=text)
        return
    parse: Any = {int: _integer, float: _number, str: str}[kind.base]
    metavar = {int: "N", float: "X", str: "TEXT"}[kind.base]
    if setting.unit or setting.choices:
        metavar = "|".join(setting.choices or (str(setting.unit).upper(),))
    if name == "rounds_in_flight":
        parse, metavar = _rounds, "N|auto"
    group.add_argument(*names, dest=name, action=_Once, type=parse, metavar=metavar, help=text)


def build_parser(prog: str, *, http: bool = True) -> argparse.ArgumentParser:
    """The parser of all served flags; ``--help`` shows each with its unit and default.

    Args:
        prog: the command, as shown.
        http: with the flags that concern the HTTP server alone.
    """
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [flags]",
        description="Serve a looped language model over HTTP." if http else "Run a looped language model.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110),
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    defaults = ServerArgs()
    for name, (kind, setting) in SETTINGS.items():
        if setting.group == HTTP and not http:
            continue
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        _add(groups[setting.group], name, kind, setting, getattr(defaults, name))
    memory, rounds = groups[MEMORY], groups[ROUNDS]
    memory.add_argument(
        "--num-blocks",
        action=_Once,
        type=_integer,
        metavar="BLOCKS",
        help=f"--num-slots in blocks of {SLOTS_PER_BLOCK} slots (default: not used)",
    )
    for names, value, why in FIXED:
        memory.add_argument(
            *names, action=_Once, type=_integer, metavar="N", help=f"only {value}: {why} (default: {value})"
        )
    rounds.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="--rounds-in-flight 2, or with --no-async-scheduling 1 (default: as --rounds-in-flight)",
    )
    rounds.add_argument(
        "--disable-cuda-graph",
        dest="cuda_graphs",
        action=_Once,
        nargs=0,
        const=False,
        help="the same as --no-cuda-graphs",
    )
    rounds.add_argument(
        "--disable-overlap-schedule", action="store_true", help="the same as --no-async-scheduling"
    )
    return parser


def _refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    name = unknown[0].split("=", 1)[0]
    if name in REFUSED:
        raise ConfigError(f"{name} is refused: {REFUSED[name]}")
    if not name.startswith("-"):
        raise ConfigError(f"unexpected argument {name!r}")
    if name in {flag(field) for field, (_, setting) in SETTINGS.items() if setting.group == HTTP}:
        raise ConfigError(f"{name} concerns the HTTP server, which this command does not start")
    known = [*parser._option_string_actions, *REFUSED]
    raise ConfigError(f"unknown flag {name}{nearest(name, known)} (--help lists all)")


def _take_fixed(values: dict[str, Any]) -> None:
    for names, only, why in FIXED:
        value = values.pop(names[0].removeprefix("--").replace("-", "_"), only)
        if value != only:
            raise ConfigError(f"{names[0]} {value} is not served, only {only}: {why}")


def _take_blocks(values: dict[str, Any]) -> None:
    blocks = values.pop("num_blocks", None)
    if blocks is None:
        return
    slots = blocks * SLOTS_PER_BLOCK
    if values.setdefault("num_slots", slots) != slots:
        raise ConfigError(f"--num-blocks {blocks} is {slots} slots, but --num-slots is {values['num_slots']}")


def _take_overlap(values: dict[str, Any], overlap: bool | None, disable: bool) -> None:
    rounds = values.get("rounds_in_flight")
    if overlap and disable:
        raise ConfigError("--async-scheduling and --disable-overlap-schedule contradict each other")
    if overlap and rounds == 1:
        raise ConfigError("--async-scheduling needs more than --rounds-in-flight 1, which is synchronous")
    if overlap is False or disable:
        name = "--disable-overlap-schedule" if disable else "--no-async-scheduling"
        if "rounds_in_flight" in values and rounds != 1:
            raise ConfigError(f"{name} is one round in flight, but --rounds-in-flight is {rounds or 'auto'}")
        values["rounds_in_flight"] = 1
    elif overlap and rounds is None:
        values["rounds_in_flight"] = 2


def parse_args(
    argv: Sequence[str], prog: str = "python -m ouro_sgl.launch_server", *, http: bool = True
) -> ServerArgs:
    """Settings from command-line words; see :func:`build_parser` for ``prog`` and ``http``.

    Raises:
        ConfigError: an unknown or refused flag, a bad value or a contradiction.
        SystemExit: ``--help`` was given and printed.
    """
    parser = build_parser(prog, http=http)
    namespace = argparse.Namespace(given={})
    known, unknown = parser.parse_known_args(list(argv), namespace)
    if unknown:
        _refuse_unknown(parser, unknown)
    values = {name: value for name, (_, value) in known.given.items()}
    _take_fixed(values)
    _take_blocks(values)
    _take_overlap(values, known.async_scheduling, known.disable_overlap_schedule)
    return ServerArgs(**values)
