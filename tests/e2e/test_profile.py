"""Profiles over HTTP, as SGLang's clients ask for them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models import rand_checkpoint
from tests.server import Server, running_server


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, traces: Path) -> Iterator[Server]:
    model = rand_checkpoint(tmp_path_factory.mktemp("rand"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TORCH_PROFILER_DIR", str(traces))
        with running_server(model, "--num-slots", "2048") as running:
            yield running


def events(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return found


def test_a_profile_of_some_requests(server: Server, traces: Path) -> None:
    before = server.generate("abc", max_new_tokens=8, temperature=0)
    assert server.get("/start_profile").status == 200
    second = server.post("/start_profile")
    assert second.status == 400
    assert "is being taken" in second.json()["error"]["message"]
    during = server.generate("abc", max_new_tokens=8, temperature=0)
    assert (during["text"], during["meta_info"]["exit_depths"]) == (
        before["text"],
        before["meta_info"]["exit_depths"],
    )
    ended = server.post("/stop_profile")
    assert ended.status == 200
    (file,) = traces.iterdir()
    assert ended.body.decode() == f"the profile is written to {file}\n"
    assert sum(event.get("name") == "aten::mm" for event in events(file)) > 8
    assert server.get("/stop_profile").status == 400
    paths = server.get("/openapi.json").json()["paths"]
    for path in ("/start_profile", "/stop_profile"):
        for method in ("get", "post"):
            assert set(paths[path][method]["responses"]) >= {"200", "400", "401", "503"}, (method, path)


def test_a_folder_of_ones_own(server: Server, tmp_path: Path) -> None:
    refused = server.post("/start_profile", {"output_dir": str(tmp_path / "none")})
    assert refused.status == 400
    assert "none' is not a folder" in refused.json()["error"]["message"]
    unknown = server.post("/start_profile", {"num_steps": 5})
    assert unknown.status == 400
    assert "num_steps" in unknown.body.decode()
    assert server.post("/start_profile", {"output_dir": str(tmp_path)}).status == 200
    assert server.post("/stop_profile").status == 200
    assert len(list(tmp_path.iterdir())) == 1
    assert server.get("/health_generate").status == 200
