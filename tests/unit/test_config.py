"""Settings: from flags and from keywords, what is refused and in which words."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from ouro_sgl import cli
from ouro_sgl.config import SETTINGS, ServerArgs, check_cpu, flag
from ouro_sgl.errors import ConfigError


def parse(line: str) -> ServerArgs:
    return cli.parse_args(line.split())


def test_no_flags_are_the_defaults() -> None:
    assert parse("") == ServerArgs()


def test_every_field_has_a_flag_that_sets_it() -> None:
    values = {
        "port": "8080",
        "dtype": "bfloat16",
        "device": "cpu",
        "load_format": "dummy",
        "log_level": "debug",
        "kv_layout": "shared",
        "schedule_policy": "lpm",
        "radix_insert_generated": "always",
        "attention_backend": "torch",
        "exit_mode": "lookahead",
        "default_exit_threshold": "0.5",
        "shutdown_timeout": "2.5",
        "rounds_in_flight": "3",
    }
    with_dummy_weights = {"random_seed"}
    gpu_only = {"mem_fraction_static", "memory_reserve_bytes"}
    for name, (kind, _) in SETTINGS.items():
        if name in gpu_only:
            continue
        if kind.base is bool:
            assert getattr(parse(flag(name)), name) is True
            continue
        text = values.get(name, "7")
        extra = " --load-format dummy" if name in with_dummy_weights else ""
        expected = text if kind.base is str else kind.base(text)
        assert getattr(parse(f"{flag(name)} {text}{extra}"), name) == expected
        assert getattr(parse(f"{flag(name)}={text}{extra}"), name) == expected


def test_help_names_every_flag_with_its_default() -> None:
    text = " ".join(cli.build_parser("serve").format_help().split())
    for name, (_, setting) in SETTINGS.items():
        assert flag(name) in text
        assert setting.help in text
        for alias in setting.flags:
            assert alias in text
    assert text.count("(default: ") >= len(SETTINGS)


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--model m", "model_path", "m"),
        ("--max-num-seqs 4", "max_running_requests", 4),
        ("--max-num-batched-tokens 64", "chunked_prefill_size", 64),
        ("--prefill-chunk-size 64", "chunked_prefill_size", 64),
        ("--chunked-prefill-size -1", "chunked_prefill_size", -1),
        ("--num-blocks 10", "num_slots", 160),
        ("--num-blocks 10 --num-slots 160 --block-size 16", "num_slots", 160),
        ("--rounds-in-flight auto", "rounds_in_flight", None),
        ("--no-async-scheduling", "rounds_in_flight", 1),
        ("--disable-overlap-schedule", "rounds_in_flight", 1),
        ("--async-scheduling", "rounds_in_flight", 2),
        ("--async-scheduling --rounds-in-flight 4", "rounds_in_flight", 4),
        ("--tp 1 --tp-size 1 --page-size 1", "model_path", ""),
        ("--port 1 --port 2", "port", 2),
        ("--prefill-chunk-size 64 --chunked-prefill-size 64", "chunked_prefill_size", 64),
    ],
)
def test_aliases_and_derived_flags(line: str, field: str, value: object) -> None:
    assert getattr(parse(line), field) == value


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--prot 1", ["--prot", "--port"]),
        ("--max-running-request 1", ["--max-running-requests"]),
        ("--model-pat x", ["--model-pat", "--model-path"]),  # no abbreviations
        ("--cuda-graph", ["--cuda-graphs"]),
        ("model", ["'model'"]),
        ("--port", ["--port", "expected one argument"]),
        ("--port x", ["--port", "'x'"]),
        ("--port 0", ["--port 0", "1 .. 65535"]),
        ("--context-length 1", ["--context-length 1", "at least 2"]),  # no prompt could have an answer
        ("--chunked-prefill-size 0", ["--chunked-prefill-size 0", "-1"]),
        ("--chunked-prefill-size -2", ["--chunked-prefill-size -2"]),
        ("--rounds-in-flight 9", ["--rounds-in-flight 9"]),
        ("--rounds-in-flight x", ["--rounds-in-flight", "'x'"]),
        ("--default-exit-threshold nan", ["--default-exit-threshold nan"]),
        ("--default-exit-threshold 1.5", ["1.5"]),
        ("--kv-layout page", ["'page'", "last_exited", "shared"]),
        ("--attention-backend fa3", ["'fa3'", "auto", "torch"]),
        ("--device tpu", ["'tpu'", "cpu", "cuda"]),
        ("--tp-size 2", ["--tp-size 2", "only 1"]),
        ("--page-size 16", ["--page-size 16", "only 1"]),
        ("--block-size 32", ["--block-size 32", "only 16"]),
        ("--device cpu --cuda-graphs", ["--cuda-graphs", "runs on the CPU"]),
        ("--device cpu --no-static-buffers", ["--static-buffers", "runs on the CPU"]),
        ("--device cpu --cuda-graph-max-bs=8", ["--cuda-graph-max-bs", "runs on the CPU"]),
        ("--device cpu --pad-to-power-of-two", ["--pad-to-power-of-two", "runs on the CPU"]),
        ("--device cpu --static-buffers", ["--static-buffers", "runs on the CPU"]),
        ("--device cpu --single-stream", ["--single-stream", "runs on the CPU"]),
        ("--trust-remote-code", ["never run"]),
        ("--enable-metrics", ["--enable-metrics is refused", "/metrics"]),
        ("--tool-call-parser qwen", ["--tool-call-parser is refused"]),
        ("--dp-size=2", ["--dp-size 2 is not served", "one server per GPU"]),
        ("--prot 5", ["unknown flag --prot; the nearest is --port"]),
        ("--device cpu --mem-fraction-static 0.5", ["--kv-cache-memory-bytes", "--num-slots"]),
        ("--device cpu --memory-reserve-bytes 5", ["--kv-cache-memory-bytes"]),
        ("--mem-fraction-static 0.5 --gpu-memory-utilization 0.6", ["0.5", "0.6", "differently"]),
        ("--max-num-seqs 4 --max-running-requests 5", ["--max-num-seqs 4", "--max-running-requests 5"]),
        ("--no-static-buffers --cuda-graphs", ["--static-buffers", "fixed addresses"]),
        ("--no-static-buffers --pad-to-power-of-two", ["--static-buffers"]),
        ("--disable-cuda-graph --cuda-graph-max-bs 4", ["--cuda-graph-max-bs", "off"]),
        ("--device cpu --attention-backend triton", ["triton", "CPU"]),
        ("--num-slots 5 --num-blocks 5", ["--num-blocks 5", "80", "5"]),
        ("--num-slots 5 --max-total-tokens 5", ["--num-slots", "--max-total-tokens"]),
        ("--num-slots 5 --kv-cache-memory-bytes 5", ["--num-slots", "--kv-cache-memory-bytes"]),
        ("--disable-cuda-graph --cuda-graphs", ["--disable-cuda-graph and --cuda-graphs contradict"]),
        ("--single-stream --no-single-stream", ["--single-stream and --no-single-stream contradict"]),
        ("--async-scheduling --disable-overlap-schedule", ["contradict"]),
        ("--async-scheduling --rounds-in-flight 1", ["synchronous"]),
        ("--no-async-scheduling --rounds-in-flight 2", ["--no-async-scheduling", "2"]),
        ("--disable-overlap-schedule --rounds-in-flight auto", ["auto"]),
        ("--enable-deterministic-inference --radix-insert-generated always", ["not bit-exact"]),
        ("--disable-radix-cache --radix-insert-generated always", ["--disable-radix-cache"]),
        ("--kv-layout shared --radix-insert-generated full_depth", ["--kv-layout shared"]),
        ("--disable-radix-cache --schedule-policy lpm", ["lpm", "--disable-radix-cache"]),
        ("--default-min-loops 3 --default-max-loops 2", ["--default-min-loops 3", "--default-max-loops 2"]),
        ("--exit-mode trace --default-exit-threshold 0.5", ["--default-exit-threshold", "trace"]),
    ],
)
def test_refusals_say_why(line: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(line)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_flag_that_resembles_none_gets_no_false_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--enable-torch-compile")
    assert str(caught.value) == "unknown flag --enable-torch-compile (--help lists all)"


@pytest.mark.parametrize("line", ["--disable-cuda-graph", "--no-cuda-graphs", "--no-pad-to-power-of-two"])
def test_off_is_what_the_cpu_does(line: str) -> None:
    check_cpu(parse(f"--device cpu {line}"))


def test_a_command_without_http_says_so() -> None:
    assert cli.parse_args(["--num-slots", "5"], http=False).num_slots == 5
    with pytest.raises(ConfigError, match="--port concerns the HTTP server"):
        cli.parse_args(["--port", "5"], http=False)
    assert "--port" not in cli.build_parser("chat", http=False).format_help()


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", "30000"), ("port", True), ("num_slots", 1.5), ("model_path", None), ("disable_radix_cache", 1)],
)
def test_keywords_are_checked_like_flags(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=flag(name)):
        ServerArgs(**{name: value})


def test_a_changed_copy_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="--port"):
        dataclasses.replace(ServerArgs(), port=0)


def test_settings_survive_the_file_between_the_processes() -> None:
    args = parse("--num-slots 99 --exit-mode lookahead --default-exit-threshold 0.25 --rounds-in-flight 2")
    assert msgspec.json.decode(msgspec.json.encode(args), type=ServerArgs) == args
