"""Server settings: one frozen dataclass, shared by the launcher and the three processes.

Every field carries its help, unit and limits; ``cli.py`` makes the command line from them and
:class:`ServerArgs` checks them, so a value is judged alike from a flag and from ``Engine(...)``.
An instance is consistent by construction: contradictions raise :class:`ConfigError`.

Not here: anything that needs the checkpoint (``launch.resolve``) or the device (the worker).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ouro_sgl.errors import ConfigError
from ouro_sgl.messages import ExitMode


@dataclass(frozen=True)
class Setting:
    """What a field means: the metadata of each field of :class:`ServerArgs`, under ``"setting"``."""

    group: str
    help: str  # one line
    unit: str | None = None
    choices: tuple[str, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    auto: str | None = None  # what None stands for, in words
    flags: tuple[str, ...] = ()  # other flag names, besides --field-name


def _setting(default: Any, group: str, help: str, **rest: Any) -> Any:
    return dataclasses.field(default=default, metadata={"setting": Setting(group, help, **rest)})


MODEL = "model"
HTTP = "HTTP server"
LOG = "log"
MEMORY = "memory"
SCHEDULING = "scheduling"
ROUNDS = "rounds"
EXIT = "early exit"

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
EXIT_MODES = {mode.name.lower(): mode for mode in ExitMode}


@dataclass(frozen=True)
class ServerArgs:
    """Settings of one server. ``None`` means "decided later", by whom is told in ``Setting.auto``.

    Raises:
        ConfigError: a value has the wrong type or range, cannot be served by this version, or
            contradicts another one; the message names the flags.
    """

    model_path: str = _setting(
        "",
        MODEL,
        "checkpoint: a folder in Hugging Face layout, or a name on the hub",
        auto="the bundled ouro-tiny",
        flags=("--model",),
    )
    tokenizer_path: str | None = _setting(
        None, MODEL, "folder that holds tokenizer.json", auto="the checkpoint's"
    )
    revision: str | None = _setting(
        None, MODEL, "branch, tag or commit of a checkpoint on the hub", auto="the main branch"
    )
    load_format: str = _setting(
        "auto", MODEL, "auto reads the weights, dummy makes random ones", choices=("auto", "dummy")
    )
    chat_template: str | None = _setting(
        None, MODEL, "file that holds a Jinja chat template", auto="the tokenizer's"
    )
    context_length: int | None = _setting(
        None,
        MODEL,
        "longest request, prompt and output together",
        unit="tokens",
        minimum=2,
        auto="the model's",
    )
    dtype: str = _setting(
        "auto",
        MODEL,
        "number format of weights and K/V; auto is float32 on the CPU, the checkpoint's on a GPU",
        choices=("auto", "float32", "bfloat16"),
    )
    device: str = _setting(
        "auto",
        MODEL,
        "where the model runs; auto is the GPU where torch finds one",
        choices=("auto", "cpu", "cuda"),
    )
    random_seed: int | None = _setting(
        None,
        MODEL,
        "seed of the random seeds of requests that give none, and of dummy weights",
        minimum=0,
        maximum=2**63 - 1,
        auto="drawn anew at each start; 0 for weights",
    )

    host: str = _setting("127.0.0.1", HTTP, "address to listen on")
    port: int = _setting(30000, HTTP, "port to listen on", minimum=1, maximum=65535)
    served_model_name: str | None = _setting(
        None, HTTP, "name of the model in answers of the HTTP server", auto="the model path as given"
    )
    api_key: str | None = _setting(
        None, HTTP, "bearer token that all but the health routes ask for", auto="no key is asked for"
    )
    max_body_bytes: int = _setting(8 << 20, HTTP, "longest request body", unit="bytes", minimum=1)
    shutdown_timeout: float = _setting(
        5.0, HTTP, "time that running requests get to finish at shutdown", unit="seconds", minimum=0
    )

    log_level: str = _setting("info", LOG, "least severe message to print", choices=LOG_LEVELS)

    mem_fraction_static: float | None = _setting(
        None,
        MEMORY,
        "share of the GPU's total memory for weights, buffers and K/V; refused on the CPU",
        minimum=0,
        maximum=1,
        auto="0.9 on a GPU",
        flags=("--gpu-memory-utilization",),
    )
    memory_reserve_bytes: int | None = _setting(
        None,
        MEMORY,
        "GPU memory to leave free; refused on the CPU",
        unit="bytes",
        minimum=0,
        auto="256 MiB on a GPU",
    )
    kv_cache_memory_bytes: int | None = _setting(
        None,
        MEMORY,
        "memory for K/V slots",
        unit="bytes",
        minimum=1,
        auto="what fits on a GPU, 512 MiB on the CPU",
    )
    num_slots: int | None = _setting(
        None,
        MEMORY,
        "number of K/V slots; one holds one token at one depth, all layers",
        unit="slots",
        minimum=1,
        auto="from the memory for K/V",
    )
    max_total_tokens: int | None = _setting(
        None,
        MEMORY,
        "tokens that the K/V slots hold at full depth: slots divided by the model's loops",
        unit="tokens",
        minimum=1,
        auto="from the number of slots",
    )
    kv_layout: str = _setting(
        "last_exited",
        MEMORY,
        "K/V of a generated token: one slot per loop it ran, or one slot shared by all loops",
        choices=("last_exited", "shared"),
    )

    max_running_requests: int | None = _setting(
        None,
        SCHEDULING,
        "requests that run at once",
        unit="requests",
        minimum=1,
        auto="128 on a GPU, 16 on the CPU",
        flags=("--max-num-seqs",),
    )
    max_queued_requests: int | None = _setting(
        None,
        SCHEDULING,
        "requests that may wait; more are refused with 503",
        unit="requests",
        minimum=0,
        auto="no limit",
    )
    chunked_prefill_size: int | None = _setting(
        None,
        SCHEDULING,
        "prompt tokens computed at once, of one or several requests; -1: as many as the context holds",
        unit="tokens",
        minimum=-1,
        auto="4096 on a GPU, 512 on the CPU",
        flags=("--prefill-chunk-size", "--max-num-batched-tokens"),
    )
    max_prefill_tokens: int | None = _setting(
        None,
        SCHEDULING,
        "prompt tokens of admitted requests that are in no chunk yet; one longer prompt still goes",
        unit="tokens",
        minimum=1,
        auto="no limit",
    )
    max_prefill_batches_before_decode: int = _setting(
        1,
        SCHEDULING,
        "prefill chunks launched before the next round, while one may be launched",
        unit="chunks",
        minimum=1,
    )
    admission_scan_limit: int = _setting(
        64, SCHEDULING, "waiting requests looked at for one that fits", unit="requests", minimum=1
    )
    max_admission_bypasses: int = _setting(
        8, SCHEDULING, "times that later requests may pass one that does not fit yet", minimum=0
    )
    min_coda_batch_size: int = _setting(
        1, SCHEDULING, "tokens that left the loop to collect before sampling them", unit="tokens", minimum=1
    )
    schedule_policy: str = _setting(
        "fcfs",
        SCHEDULING,
        "order of admission: by arrival, or longest cached prefix first",
        choices=("fcfs", "lpm"),
    )
    disable_radix_cache: bool = _setting(False, SCHEDULING, "do not share the K/V of common prompt prefixes")
    radix_insert_generated: str = _setting(
        "never",
        SCHEDULING,
        "cache generated tokens too: those before the first early exit, or all; not bit-exact",
        choices=("never", "full_depth", "always"),
    )
    enable_deterministic_inference: bool = _setting(
        False, SCHEDULING, "refuse settings under which equal requests may differ in their bits"
    )

    rounds_in_flight: int | None = _setting(
        None,
        ROUNDS,
        "rounds launched and not yet read; 1 is synchronous",
        unit="rounds",
        minimum=1,
        maximum=8,
        auto="4 on a GPU; 1 on the CPU, where more gain nothing",
    )
    attention_backend: str = _setting(
        "auto",
        ROUNDS,
        "attention kernels; auto is triton on a GPU, torch on the CPU",
        choices=("auto", "triton", "torch"),
    )
    cuda_graphs: bool | None = _setting(
        None,
        ROUNDS,
        "replay each round and most prefill chunks as one captured CUDA graph; GPU only",
        auto="on, on a GPU",
    )
    cuda_graph_max_bs: int | None = _setting(
        None,
        ROUNDS,
        "largest number of rows that gets a graph; rounds of more rows run eager; GPU only",
        unit="rows",
        minimum=1,
        auto="--max-running-requests",
        flags=("--cuda-graph-max-batch-size",),
    )
    cuda_graph_max_graphs: int | None = _setting(
        None,
        ROUNDS,
        "most graphs of rounds to capture, smallest row counts first; GPU only",
        minimum=1,
        auto="no limit",
    )
    cuda_graph_memory_reserve_bytes: int | None = _setting(
        None, ROUNDS, "GPU memory kept for graphs; GPU only", unit="bytes", minimum=0, auto="1 GiB on a GPU"
    )
    static_buffers: bool | None = _setting(
        None,
        ROUNDS,
        "keep the buffers of a round allocated; off: allocate them per round, eager only; GPU only",
        auto="on, on a GPU",
    )
    single_stream: bool | None = _setting(
        None,
        ROUNDS,
        "run prefill chunks between rounds, not beside them; GPU only",
        auto="on, on a GPU",
    )
    pad_to_power_of_two: bool | None = _setting(
        None,
        ROUNDS,
        "pad rounds to powers of two or to all rows, not to finer row counts; GPU only",
        auto="off, on a GPU",
    )
    debug_poison_slots: bool = _setting(
        False, ROUNDS, "fill K/V slots with NaN whenever they are handed out: a stray read then shows"
    )

    exit_mode: str = _setting(
        "ouro", EXIT, "exit policy of requests that name none", choices=tuple(EXIT_MODES)
    )
    lookahead_seed: int = _setting(
        0, EXIT, "seed of the head of exit mode random_lookahead", minimum=0, maximum=2**63 - 1
    )
    exit_trace: str | None = _setting(
        None, EXIT, "JSON file of exit depths that requests name by trace_id", auto="no file"
    )
    record_exit_trace: str | None = _setting(
        None, EXIT, "JSON file to write the exit depths of all requests to, at shutdown", auto="no file"
    )
    default_exit_threshold: float | None = _setting(
        None, EXIT, "exit_threshold of requests that give none", minimum=0, maximum=1, auto="the model's"
    )
    default_min_loops: int | None = _setting(
        None, EXIT, "min_loops of requests that give none", unit="loops", minimum=1, auto="1"
    )
    default_max_loops: int | None = _setting(
        None, EXIT, "max_loops of requests that give none", unit="loops", minimum=1, auto="all of the model's"
    )

    def __post_init__(self) -> None:
        for name, (kind, setting) in SETTINGS.items():
            _check_value(name, getattr(self, name), kind, setting)
        _check_device(self)
        _check_memory(self)
        _check_scheduling(self)
        _check_exit(self)


def nearest(name: str, known: Iterable[str]) -> str:
    """What an error about an unknown ``name`` ends with: nothing if no known name is like it."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; the nearest is {found[0]}" if found else ""


def flag(name: str) -> str:
    """The flag of a field: ``num_slots`` is ``--num-slots``."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Kind:
    """The type of a field: ``base`` is str, int, float or bool."""

    base: type
    optional: bool


def _kind(annotation: Any) -> Kind:
    if isinstance(annotation, types.UnionType):
        (base,) = (arm for arm in typing.get_args(annotation) if arm is not types.NoneType)
        return Kind(base, True)
    return Kind(annotation, False)


def _settings() -> dict[str, tuple[Kind, Setting]]:
    hints = typing.get_type_hints(ServerArgs)
    return {f.name: (_kind(hints[f.name]), f.metadata["setting"]) for f in dataclasses.fields(ServerArgs)}


SETTINGS = _settings()  # by field name, in the order of --help


def _check_value(name: str, value: Any, kind: Kind, setting: Setting) -> None:
    if value is None and kind.optional:
        return
    accepted: Any = (int, float) if kind.base is float else kind.base
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind.base is not bool):
        raise ConfigError(f"{flag(name)} must be of type {kind.base.__name__}, not {value!r}")
    if setting.choices and value not in setting.choices:
        raise ConfigError(f"{flag(name)} {value!r} is not one of {', '.join(setting.choices)}")
    if setting.minimum is not None:
        # This order of the comparison also refuses NaN.
        high = math.inf if setting.maximum is None else setting.maximum
        if not setting.minimum <= value <= high:
            limits = f"at least {setting.minimum}" if high == math.inf else f"in {setting.minimum} .. {high}"
            raise ConfigError(f"{flag(name)} {value} must be {limits}")


GPU_ONLY = (
    "mem_fraction_static",
    "memory_reserve_bytes",
    "cuda_graphs",
    "cuda_graph_max_bs",
    "cuda_graph_max_graphs",
    "cuda_graph_memory_reserve_bytes",
    "static_buffers",
    "single_stream",
    "pad_to_power_of_two",
)

OFF_ON_CPU = ("cuda_graphs", "pad_to_power_of_two")  # who asks for less gets what there is


def check_cpu(args: ServerArgs) -> None:
    """Refuse what only a GPU worker can do; called once the device is known to be the CPU.

    Raises:
        ConfigError: names the flag.
    """
    for name in GPU_ONLY:
        value = getattr(args, name)
        if value is False and name in OFF_ON_CPU:
            continue
        if value is not None:
            advice = (
                ": use --kv-cache-memory-bytes or --num-slots" if "memory" in name or "mem_" in name else ""
            )
            raise ConfigError(f"{flag(name)} concerns a GPU and this server runs on the CPU{advice}")
    if args.attention_backend == "triton":
        raise ConfigError("--attention-backend triton needs a GPU and this server runs on the CPU")


def _check_device(args: ServerArgs) -> None:
    if args.device == "cpu":
        check_cpu(args)
    static = args.static_buffers is not False
    if not static and args.cuda_graphs:
        raise ConfigError("--cuda-graphs needs --static-buffers: a graph replays fixed addresses")
    if not static and args.pad_to_power_of_two:
        raise ConfigError("--pad-to-power-of-two needs --static-buffers")
    if args.cuda_graphs is False or not static:
        for name in ("cuda_graph_max_bs", "cuda_graph_max_graphs", "cuda_graph_memory_reserve_bytes"):
            if getattr(args, name) is not None:
                raise ConfigError(f"{flag(name)} needs CUDA graphs, which are off")


def _check_memory(args: ServerArgs) -> None:
    sizes = ("num_slots", "max_total_tokens", "kv_cache_memory_bytes")
    given = [flag(name) for name in sizes if getattr(args, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} both set the number of K/V slots: give one of them")


def _check_scheduling(args: ServerArgs) -> None:
    if args.chunked_prefill_size == 0:
        raise ConfigError("--chunked-prefill-size 0 must be at least 1, or -1 for whole prompts")
    if args.radix_insert_generated != "never" and args.enable_deterministic_inference:
        raise ConfigError(
            f"--radix-insert-generated {args.radix_insert_generated} is not bit-exact, "
            "which --enable-deterministic-inference asks for"
        )
    off = None
    if args.disable_radix_cache:
        off = "--disable-radix-cache"
    elif args.kv_layout == "shared":
        off = "--kv-layout shared"
    if off and args.radix_insert_generated != "never":
        raise ConfigError(
            f"--radix-insert-generated {args.radix_insert_generated} needs the radix cache, "
            f"which is off with {off}"
        )
    if off and args.schedule_policy == "lpm":
        raise ConfigError(f"--schedule-policy lpm needs the radix cache, which is off with {off}")


def _check_exit(args: ServerArgs) -> None:
    low, high = args.default_min_loops, args.default_max_loops
    if low is not None and high is not None and low > high:
        raise ConfigError(f"--default-min-loops {low} is above --default-max-loops {high}")
    if args.exit_mode == "trace":
        for name in ("default_exit_threshold", "default_min_loops", "default_max_loops"):
            if getattr(args, name) is not None:
                raise ConfigError(
                    f"{flag(name)} does nothing with --exit-mode trace, which fixes every depth"
                )
