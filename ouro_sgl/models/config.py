"""What a checkpoint folder says about itself, without torch: shapes, loops, end ids.

Never relies on class defaults of the published code (they describe another model): every size
must stand in ``config.json``; only ``total_ut_steps`` (4), ``early_exit_threshold`` (1.0),
``num_key_value_heads`` (= heads), ``head_dim`` and the rope and norm constants have defaults.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ouro_sgl.errors import ConfigError

REQUIRED_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class OuroConfig:
    """Shapes and constants of one looped model. ``total_loops`` is T."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    total_loops: int
    early_exit_threshold: float
    rope_theta: float
    rms_norm_eps: float
    dtype: str  # of the checkpoint: bfloat16, float16 or float32
    end_ids: tuple[int, ...]  # from config.json and generation_config.json, sorted

    def slot_elements(self) -> int:
        """Numbers stored per slot: K and V of all layers of one (token, depth)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def read_json(path: Path) -> dict[str, Any]:
    """Load a JSON object.

    Raises:
        ConfigError: the file is missing, cut short or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _as_ids(value: Any, where: str, vocab_size: int) -> set[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise ConfigError(
                f"{where}: eos_token_id {token_id!r} is not an id below vocab_size {vocab_size}"
            )
    return set(ids)


def _size(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config.json: {name} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {name} must be a positive integer, not {value!r}")
    return value


def _number(raw: dict[str, Any], name: str, default: float) -> float:
    value = raw.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"config.json: {name} must be a number >= 0, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"config.json: {name} is too large") from None


def load_config(folder: Path) -> OuroConfig:
    """Read ``config.json`` (and ``generation_config.json`` if present) of a checkpoint folder.

    Raises:
        ConfigError: a value is missing, malformed or describes a model that is not served
            (another architecture, sliding window, scaled rope, another activation); names it.
    """
    raw = read_json(folder / "config.json")
    if raw.get("model_type") != "ouro":
        raise ConfigError(f"config.json: model_type is {raw.get('model_type')!r}, only 'ouro' is served")
    if raw.get("use_sliding_window") or raw.get("sliding_window") is not None:
        raise ConfigError("config.json: sliding_window attention is not supported")
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ConfigError(f"config.json: layer_types {kinds!r}: only full_attention is supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"config.json: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    for name in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if raw.get(name):
            raise ConfigError(f"config.json: {name} true is not supported")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ConfigError(f"config.json: rope scaling {rope!r} is not supported")
    partial = raw.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ConfigError(f"config.json: partial_rotary_factor {partial!r} is not supported, only 1.0")

    sizes = {name: _size(raw, name) for name in REQUIRED_SIZES}
    heads = sizes["num_attention_heads"]
    kv_heads = _size(raw, "num_key_value_heads", heads)
    head_dim = _size(raw, "head_dim", max(1, sizes["hidden_size"] // heads))
    if heads % kv_heads:
        raise ConfigError(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads")
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim {head_dim} must be even for rotary positions")
    threshold = _number(raw, "early_exit_threshold", 1.0)
    if threshold > 1.0:
        raise ConfigError(f"config.json: early_exit_threshold {threshold} must lie in [0, 1]")
    theta = _number(raw, "rope_theta", _number(rope, "rope_theta", 10000.0))
    dtype = raw.get("torch_dtype") or raw.get("dtype") or "bfloat16"
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"config.json: dtype {dtype!r} is not one of bfloat16, float16, float32")

    end_ids = _as_ids(raw.get("eos_token_id"), "config.json", sizes["vocab_size"])
    generation = folder / "generation_config.json"
    if generation.exists():
        extra = read_json(generation).get("eos_token_id")
        end_ids |= _as_ids(extra, "generation_config.json", sizes["vocab_size"])
    return OuroConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=sizes["max_position_embeddings"],
        total_loops=_size(raw, "total_ut_steps", 4),
        early_exit_threshold=threshold,
        rope_theta=theta,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        dtype=dtype,
        end_ids=tuple(sorted(end_ids)),
    )
