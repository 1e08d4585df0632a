"""Which launches are taken over: the decision alone, without SGLang."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from ouro_sgl import sglang_plugin
from ouro_sgl.sglang_plugin import flag_value, is_ouro, launch


def folder_of(path: Path, config: object) -> str:
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], None),
        (["--port", "1"], None),
        (["--model-path", "m", "--port", "1"], "m"),
        (["--port", "1", "--model-path=m"], "m"),
        (["--model", "m"], "m"),
        (["--model-path", "a", "--model", "b"], "b"),
        (["--model-path=a=b"], "a=b"),
        (["--model-path"], None),
        (["--model-path-x", "m"], None),
    ],
)
def test_flag_value(argv: list[str], expected: str | None) -> None:
    assert flag_value(argv, "--model-path", "--model") == expected


def test_local_folders(tmp_path: Path) -> None:
    assert is_ouro(folder_of(tmp_path, {"model_type": "ouro"})) is True
    assert is_ouro(folder_of(tmp_path, {"model_type": "llama"})) is False
    assert is_ouro(folder_of(tmp_path, {})) is False
    assert is_ouro(folder_of(tmp_path, [])) is False


def test_what_cannot_be_known(tmp_path: Path) -> None:
    assert is_ouro(None) is None
    assert is_ouro(str(tmp_path)) is None  # no config.json
    assert is_ouro(folder_of(tmp_path, "{")) is None
    assert is_ouro("/no/such/folder") is None
    assert is_ouro("no/such-model") is None  # the tests run offline


def test_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path, {"model_type": "ouro"})
    calls: list[tuple[Any, ...]] = []

    def download(name: str, file: str, revision: str | None) -> str:
        calls.append((name, file, revision))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert is_ouro("someone/some-ouro", "v1") is True
    assert calls == [("someone/some-ouro", "config.json", "v1")]


def test_hook_lets_other_models_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[list[str]] = []
    monkeypatch.setattr(sglang_plugin, "launch", launched.append)
    other = ["--model-path", folder_of(tmp_path, {"model_type": "llama"}), "--port", "1"]
    assert sglang_plugin._around_parsing(lambda argv: ("parsed", argv), other) == ("parsed", other)
    assert launched == []
    ours = ["--model-path", folder_of(tmp_path, {"model_type": "ouro"})]
    sglang_plugin._around_parsing(lambda argv: None, ours)
    assert launched == [ours]


def test_launch_replaces_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execv", lambda path, argv: calls.append((path, argv)))
    launch(("--model-path", "a b"))
    assert calls == [
        (sys.executable, [sys.executable, "-m", "ouro_sgl.launch_server", "--model-path", "a b"])
    ]


@pytest.mark.parametrize(
    ("group", "function"),
    [
        ("sglang.serve_backends", sglang_plugin.serve_backend),
        ("sglang.srt.plugins", sglang_plugin.register_hooks),
    ],
)
def test_installed_entry_points(group: str, function: object) -> None:
    (found,) = [entry for entry in entry_points(group=group) if entry.value.startswith("ouro_sgl.")]
    assert found.load() is function
