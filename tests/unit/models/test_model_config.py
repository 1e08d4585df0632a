"""What ``config.json`` may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ouro_sgl.errors import ConfigError
from ouro_sgl.models.config import load_config

RAW: dict[str, Any] = {
    "model_type": "ouro",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def write(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**RAW, **changes}))
    return folder


def test_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    assert (config.num_kv_heads, config.head_dim, config.total_loops) == (4, 16, 4)
    assert (config.early_exit_threshold, config.rms_norm_eps, config.dtype) == (1.0, 1e-6, "bfloat16")
    assert config.end_ids == ()
    assert config.slot_elements() == 2 * 2 * 4 * 16


def test_end_ids_of_both_files(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=0)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert load_config(tmp_path).end_ids == (0, 2)


def test_grouped_heads_and_both_spellings_of_rope(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, num_key_value_heads=2, rope_theta=5e5, rope_scaling=None))
    assert config.num_kv_heads == 2
    assert config.rope_theta == 5e5
    config = load_config(write(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 7e5}))
    assert config.rope_theta == 7e5


@pytest.mark.parametrize("name", [name for name in RAW if name != "model_type"])
@pytest.mark.parametrize("value", [None, 0, -3, 1.5, "64", True])
def test_every_size_must_stand_there(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        load_config(write(tmp_path, **{name: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"use_sliding_window": True}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "4 attention heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"early_exit_threshold": 1.5}, "early_exit_threshold"),
        ({"total_ut_steps": 0}, "total_ut_steps"),
        ({"torch_dtype": "int8"}, "dtype"),
        ({"eos_token_id": 300}, "eos_token_id 300"),
        ({"eos_token_id": [0, "2"]}, "eos_token_id"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"layer_types": 5}, "layer_types"),
        ({"rope_theta": 10**400}, "rope_theta is too large"),
        ({"rope_scaling": {"rope_theta": "10000"}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": [1]}}, "rope_theta"),
    ],
)
def test_what_is_not_served_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, **changes))


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"a": ', "[" * 100_000])
def test_unreadable_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_config(tmp_path)
