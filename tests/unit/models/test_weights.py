"""Loading a checkpoint: every way in which one can be wrong is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ouro_sgl.errors import ConfigError
from ouro_sgl.models.config import OuroConfig, load_config
from ouro_sgl.models.weights import (
    GATE_BIAS,
    GATE_WEIGHT,
    Weights,
    dummy_weights,
    expected_shapes,
    gate_head,
    load_lookahead_head,
    load_weights,
    random_lookahead_head,
)
from tests.models import rand_checkpoint

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return rand_checkpoint(tmp_path / "model")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(folder, load_config(folder), dtype, "cpu")


def edit(folder: Path, change: Callable[[Weights], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def shard(folder: Path, shards: int = 3) -> dict[str, str]:
    """Split the single file; returns the weight map."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(weights.items())[index::shards])
        save_file(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_tensor_count_of_the_published_shape() -> None:
    config = OuroConfig(
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=5632,
        num_layers=24,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        max_position=65536,
        total_loops=4,
        early_exit_threshold=1.0,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        dtype="bfloat16",
        end_ids=(0,),
    )
    shapes = expected_shapes(config)
    assert len(shapes) == 269
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 1_434_652_673


def test_single_file(folder: Path) -> None:
    weights = load(folder)
    stored = load_file(folder / "model.safetensors")
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], stored[name]) for name in stored)


def test_loaded_tensors_do_not_alias_the_file(folder: Path) -> None:
    weights = load(folder)
    before = weights[Q_PROJ].clone()
    size = (folder / "model.safetensors").stat().st_size
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(size // 4)
        file.write(b"\0" * (size // 2))
    assert torch.equal(weights[Q_PROJ], before)


def test_shards_equal_the_single_file(folder: Path) -> None:
    single = load(folder)
    shard(folder)
    sharded = load(folder)
    assert sharded.keys() == single.keys()
    assert all(torch.equal(sharded[name], single[name]) for name in single)


def test_dtype_is_converted_but_the_gate_stays_fp32(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    weights = load(folder, torch.bfloat16)
    assert {name for name, tensor in weights.items() if tensor.dtype == torch.float32} == {
        GATE_WEIGHT,
        GATE_BIAS,
    }
    assert torch.equal(weights[Q_PROJ], stored[Q_PROJ].bfloat16())
    weight, bias = gate_head(weights)
    assert weight.shape == (64,)
    assert bias.shape == ()
    assert torch.equal(weight, stored[GATE_WEIGHT][0])


def test_missing_tensor(folder: Path) -> None:
    edit(folder, lambda weights: weights.pop(Q_PROJ))
    with pytest.raises(ConfigError, match=rf"{Q_PROJ} is missing"):
        load(folder)


def test_unexpected_tensor(folder: Path) -> None:
    edit(folder, lambda weights: weights.update({"model.layers.2.extra": torch.zeros(3)}))
    with pytest.raises(ConfigError, match=r"unexpected tensor model\.layers\.2\.extra"):
        load(folder)


def test_only_rotary_buffers_are_ignored(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda weights: weights.update({name: torch.zeros(8)}))
    assert name not in load(folder)


def test_misshapen_tensor(folder: Path) -> None:
    edit(folder, lambda weights: weights.update({Q_PROJ: torch.zeros(64, 63)}))
    with pytest.raises(ConfigError, match=rf"{Q_PROJ} has shape \[64, 63\], expected \[64, 64\]"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.float8_e4m3fn])
def test_wrong_dtype(folder: Path, dtype: torch.dtype) -> None:
    edit(folder, lambda weights: weights.update({Q_PROJ: torch.zeros(64, 64).to(dtype)}))
    with pytest.raises(ConfigError, match=rf"{Q_PROJ} has dtype"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 200, 30_000, -1])
def test_file_cut_short(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        load(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        load(folder)


def test_missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00003\.safetensors does not exist"):
        load(folder)


def test_tensor_in_two_shards(folder: Path) -> None:
    weight_map = shard(folder)
    name, file = next(iter(weight_map.items()))
    other = next(value for value in weight_map.values() if value != file)
    part = load_file(folder / other)
    part[name] = load_file(folder / file)[name]
    save_file(part, folder / other)
    with pytest.raises(ConfigError, match=rf"{name} is also in"):
        load(folder)


def test_index_that_names_a_wrong_shard(folder: Path) -> None:
    weight_map = shard(folder)
    weight_map[Q_PROJ] = next(value for value in weight_map.values() if value != weight_map[Q_PROJ])
    write_index(folder, weight_map)
    with pytest.raises(ConfigError, match=rf"{Q_PROJ} is missing, but"):
        load(folder)


@pytest.mark.parametrize("weight_map", [None, {}, [], {Q_PROJ: "../elsewhere.safetensors"}, {Q_PROJ: 3}])
def test_malformed_index(folder: Path, weight_map: object) -> None:
    shard(folder)
    write_index(folder, weight_map)
    with pytest.raises(ConfigError, match=r"index\.json"):
        load(folder)


def test_dummy_weights_are_seeded_and_complete(folder: Path) -> None:
    config = load_config(folder)
    first, again, other = (dummy_weights(config, torch.bfloat16, "cpu", seed) for seed in (1, 1, 2))
    assert {name: tuple(tensor.shape) for name, tensor in first.items()} == expected_shapes(config)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[Q_PROJ], other[Q_PROJ])
    assert first[Q_PROJ].dtype == torch.bfloat16
    assert first[GATE_WEIGHT].dtype == torch.float32
    assert all(tensor.isfinite().all() for tensor in first.values())


def test_random_lookahead_head_is_seeded() -> None:
    weight, bias = random_lookahead_head(3, 256)
    assert weight.shape == (256,)
    assert weight.dtype == bias.dtype == torch.float32
    assert bias == 0
    assert torch.equal(weight, random_lookahead_head(3, 256)[0])
    assert not torch.equal(weight, random_lookahead_head(4, 256)[0])
    assert 0.5 < weight.norm() < 2.0  # so that its scores spread for states of unit mean square


def test_lookahead_head(folder: Path) -> None:
    assert load_lookahead_head(folder, 64) is None
    stored = {"weight": torch.randn(1, 64), "bias": torch.randn(1)}
    save_file(stored, folder / "lookahead.safetensors")
    head = load_lookahead_head(folder, 64)
    assert head is not None
    assert torch.equal(head[0], stored["weight"][0])
    assert torch.equal(head[1], stored["bias"][0])


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"weight": torch.zeros(1, 64)}, "must hold"),
        ({"weight": torch.zeros(1, 64), "bias": torch.zeros(1), "more": torch.zeros(1)}, "must hold"),
        ({"weight": torch.zeros(64), "bias": torch.zeros(1)}, "weight has shape"),
        ({"weight": torch.zeros(1, 64).half(), "bias": torch.zeros(1)}, "weight has dtype F16"),
    ],
)
def test_faulty_lookahead_head(folder: Path, stored: Weights, message: str) -> None:
    save_file(stored, folder / "lookahead.safetensors")
    with pytest.raises(ConfigError, match=rf"lookahead\.safetensors.*{message}"):
        load_lookahead_head(folder, 64)


def test_lookahead_head_cut_short(folder: Path) -> None:
    (folder / "lookahead.safetensors").write_bytes(b"\x10\0")
    with pytest.raises(ConfigError, match=r"lookahead\.safetensors is damaged"):
        load_lookahead_head(folder, 64)
