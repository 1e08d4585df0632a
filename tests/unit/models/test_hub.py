"""Finding a checkpoint: local folders first, hub names next, and a plain word when there is neither."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from ouro_sgl.errors import ConfigError
from ouro_sgl.models.hub import FILES, resolve_checkpoint

OFFLINE = """
import sys
from ouro_sgl.errors import ConfigError
from ouro_sgl.models.hub import resolve_checkpoint
try:
    resolve_checkpoint("someone/some-model")
except ConfigError as error:
    print(error)
assert "torch" not in sys.modules
"""


def test_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    assert resolve_checkpoint(str(tmp_path / "model")) == tmp_path / "model"
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("model") == tmp_path / "model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_checkpoint("~/model") == tmp_path / "model"


def test_revision_of_a_local_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--revision main"):
        resolve_checkpoint(str(tmp_path), "main")


@pytest.mark.parametrize("path", ["/no/such/folder", "./missing", "a/b/c"])
def test_missing_folder_is_never_looked_up(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a path was sent to the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_checkpoint(path)


def test_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        resolve_checkpoint(str(tmp_path / "model.gguf"))


def test_hub_name_fetches_only_json_and_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def fetch(name: str, **kwargs: Any) -> str:
        calls.append((name, kwargs))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve_checkpoint("someone/some-model", "v2") == tmp_path
    assert calls == [("someone/some-model", {"revision": "v2", "allow_patterns": FILES})]
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in FILES)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("x"), "offline"),
        (OSError("disk full"), "disk full"),
    ],
)
def test_faults_of_fetching(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=f"'someone/some-model' is not a local folder.*{message}"):
        resolve_checkpoint("someone/some-model")


def test_name_that_cannot_be_one() -> None:
    with pytest.raises(ConfigError, match="cannot be a hub name"):
        resolve_checkpoint("some model?")


def test_offline_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE],
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert "'someone/some-model' is not a local folder, the hub cannot be reached (offline?)" in done.stdout
