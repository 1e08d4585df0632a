"""Other weights for a running model: taken whole or not at all."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ouro_sgl.messages import ExitMode, RowParams, UpdateWeights
from ouro_sgl.models.weights import LOOKAHEAD_FILE
from ouro_sgl.worker.worker import WorkerSettings
from tests.models import rand_checkpoint
from tests.worker_driver import Driver, Model, Request

SETTINGS = WorkerSettings(max_rows=4, max_length=256)
PARAMS = {"max_new_tokens": 12, "temperature": 0.0, "logprobs": True, "exit_threshold": 0.7}
LOOKAHEAD = {"exit_mode": ExitMode.LOOKAHEAD}


def write_head(folder: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    head = {"weight": torch.randn(1, 64, generator=generator), "bias": torch.zeros(1)}
    save_file(head, folder / LOOKAHEAD_FILE)


def new_model(folder: Path, seed: int) -> Path:
    rand_checkpoint(folder, seed=seed)
    write_head(folder, seed)
    return folder


def answers(worker: object, plan_id: int = 0) -> list[object]:
    driver = Driver(worker, SETTINGS, 4, 4096, seed=0, eager=True)  # type: ignore[arg-type]
    driver.plan_id = driver.chunk_id = plan_id
    requests = [
        Request([40, 41, 42], RowParams(**PARAMS)),  # type: ignore[arg-type]
        Request([50, 60, 70], RowParams(**PARAMS, **LOOKAHEAD)),  # type: ignore[arg-type]
    ]
    results = driver.run(requests)
    return [result.comparable() for result in results]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    torch.set_num_threads(1)
    return new_model(tmp_path / "old", 1), new_model(tmp_path / "new", 2)


def test_an_updated_worker_answers_as_one_started_with_the_weights(folders: tuple[Path, Path]) -> None:
    old, new = folders
    fresh = [answers(Model(folder).worker(4096, SETTINGS)) for folder in folders]
    assert fresh[0] != fresh[1]
    worker = Model(old).worker(4096, SETTINGS)
    reply = worker.update_weights(UpdateWeights(str(new)))
    assert reply.ok, reply.message
    assert answers(worker) == fresh[1]


def test_the_lookahead_head_stays_if_none_comes_with_the_weights(folders: tuple[Path, Path]) -> None:
    old, new = folders
    worker = Model(old).worker(4096, SETTINGS)
    (new / LOOKAHEAD_FILE).unlink()
    assert worker.update_weights(UpdateWeights(str(new))).ok
    write_head(new, 1)  # the old one
    assert answers(worker) == answers(Model(new).worker(4096, SETTINGS))


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def lose_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")


def misshape_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].contiguous()
    save_file(tensors, folder / "model.safetensors")


def change_the_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))


def spoil_the_head(folder: Path) -> None:
    save_file({"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}, folder / LOOKAHEAD_FILE)


def remove(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (cut_short, "damaged"),
        (lose_a_tensor, r"model\.norm\.weight is missing"),
        (misshape_a_tensor, r"lm_head\.weight has shape"),
        (change_the_shape, "num_layers is 3, the model that is served has 2"),
        (spoil_the_head, "lookahead"),
        (remove, r"config\.json does not exist"),
    ],
)
def test_a_bad_folder_changes_nothing(folders: tuple[Path, Path], spoil: object, reason: str) -> None:
    old, new = folders
    spoil(new)  # type: ignore[operator]
    worker = Model(old).worker(4096, SETTINGS)
    reply = worker.update_weights(UpdateWeights(str(new)))
    assert not reply.ok
    assert re.search(reason, reply.message), reply.message
    assert answers(worker) == answers(Model(old).worker(4096, SETTINGS))
    for path in (str(new / "nowhere"), "n" * 300, "/n" * 5000, "n\0", ""):
        assert not worker.update_weights(UpdateWeights(path)).ok


def test_what_nobody_foresaw_changes_nothing(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("there is no memory for a second copy")

    old, new = folders
    worker = Model(old).worker(4096, SETTINGS)
    monkeypatch.setattr("ouro_sgl.worker.update.load_weights", fail)
    reply = worker.update_weights(UpdateWeights(str(new)))
    assert not reply.ok
    assert "no memory" in reply.message
    assert answers(worker) == answers(Model(old).worker(4096, SETTINGS))
