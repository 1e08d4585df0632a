"""The tensors of a checkpoint, checked one by one before anything runs.

One dict by Hugging Face key is all that the worker and the reference model need. Every fault of a
checkpoint is a :class:`ConfigError` that names the tensor or file. Not here: where a checkpoint
comes from (``hub.py``) and what its ``config.json`` says (``config.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ouro_sgl.errors import ConfigError
from ouro_sgl.models.config import OuroConfig, read_json

Weights = dict[str, torch.Tensor]
Head = tuple[torch.Tensor, torch.Tensor]  # of an exit rule: weight fp32 [hidden], bias fp32 []

GATE_WEIGHT = "model.early_exit_gate.weight"
GATE_BIAS = "model.early_exit_gate.bias"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LOOKAHEAD_FILE = "lookahead.safetensors"
FLOAT_DTYPES = ("BF16", "F16", "F32")  # as safetensors spells them


def expected_shapes(config: OuroConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this shape holds, in the order of the forward pass."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}."
        shapes[name + "input_layernorm.weight"] = (hidden,)
        shapes[name + "self_attn.q_proj.weight"] = (q_size, hidden)
        shapes[name + "self_attn.k_proj.weight"] = (kv_size, hidden)
        shapes[name + "self_attn.v_proj.weight"] = (kv_size, hidden)
        shapes[name + "self_attn.o_proj.weight"] = (hidden, q_size)
        shapes[name + "input_layernorm_2.weight"] = (hidden,)
        shapes[name + "post_attention_layernorm.weight"] = (hidden,)
        shapes[name + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[name + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[name + "mlp.down_proj.weight"] = (hidden, inner)
        shapes[name + "post_attention_layernorm_2.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    shapes[GATE_WEIGHT] = (1, hidden)
    shapes[GATE_BIAS] = (1,)
    shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def load_weights(folder: Path, config: OuroConfig, dtype: torch.dtype, device: torch.device | str) -> Weights:
    """Read ``model.safetensors``, or the shards of ``model.safetensors.index.json``.

    All tensors come in ``dtype`` on ``device``, but for the exit gate, which stays fp32 because
    exits are decided in fp32. Names, shapes and dtypes of all files are checked before data is read.

    Raises:
        ConfigError: a tensor is missing, unexpected, stored twice, misshapen or not of a float
            dtype, or a file is missing or cut short; names it.
    """
    shapes = expected_shapes(config)
    files = _weight_files(folder)
    home: dict[str, Path] = {}
    for path in files:
        with _open(path) as handle:
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                if name.endswith("rotary_emb.inv_freq"):
                    continue  # a constant that old exports stored: recomputed in fp32
                if name not in shapes:
                    raise ConfigError(f"{path}: unexpected tensor {name}")
                if name in home:
                    raise ConfigError(f"{path}: tensor {name} is also in {home[name].name}")
                _check_tensor(path, name, handle.get_slice(name), shapes[name])
                home[name] = path
    missing = [name for name in shapes if name not in home]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ConfigError(f"{folder}: tensor {missing[0]} is missing{more}")

    weights: Weights = {}
    for path in files:
        with _open(path) as handle:
            for name in shapes:
                if home[name] == path:
                    # A copy, never a view of the mapped file: the file may change while we serve.
                    tensor = handle.get_tensor(name)
                    weights[name] = tensor.to(device, _dtype_of(name, dtype), copy=True)
    return weights


def dummy_weights(config: OuroConfig, dtype: torch.dtype, device: torch.device | str, seed: int) -> Weights:
    """Random weights of the right shapes, the same for one seed and device.

    Norms are 1, the gate's bias is 0, everything else is normal with deviation 1 / sqrt(fan in).
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights: Weights = {}
    for name, shape in expected_shapes(config).items():
        kept = _dtype_of(name, dtype)
        if name == GATE_BIAS:
            weights[name] = torch.zeros(shape, dtype=kept, device=device)
        elif len(shape) == 1:
            weights[name] = torch.ones(shape, dtype=kept, device=device)
        else:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
            weights[name] = (drawn / math.sqrt(shape[1])).to(kept)
    return weights


def gate_head(weights: Weights) -> Head:
    """The exit gate as a head: weight fp32 [hidden], bias fp32 []."""
    return weights[GATE_WEIGHT].float().reshape(-1), weights[GATE_BIAS].float().reshape(())


def random_lookahead_head(seed: int, hidden: int) -> Head:
    """The frozen head of ``random_lookahead``, on the CPU.

    Drawn on the CPU whatever device serves, so one seed means one head everywhere.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    weight = torch.randn(hidden, generator=generator, dtype=torch.float32) / math.sqrt(hidden)
    return weight, torch.zeros((), dtype=torch.float32)


def load_lookahead_head(folder: Path, hidden: int) -> Head | None:
    """The trained lookahead head beside a checkpoint, on the CPU; None if there is no such file.

    ``lookahead.safetensors`` holds ``weight`` fp32 [1, hidden] and ``bias`` fp32 [1].

    Raises:
        ConfigError: the file is not that; names the file and the tensor.
    """
    path = folder / LOOKAHEAD_FILE
    if not path.exists():
        return None
    shapes = {"weight": (1, hidden), "bias": (1,)}
    with _open(path) as handle:
        names = sorted(handle.keys())
        if names != sorted(shapes):
            raise ConfigError(f"{path} must hold the tensors bias and weight, not {names}")
        for name, shape in shapes.items():
            _check_tensor(path, name, handle.get_slice(name), shape, dtypes=("F32",))
        weight, bias = handle.get_tensor("weight").clone(), handle.get_tensor("bias").clone()
    return weight.reshape(-1), bias.reshape(())


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name in (GATE_WEIGHT, GATE_BIAS) else dtype


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in the order of their names."""
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.exists():
        raise ConfigError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: weight_map is missing")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(f"{index}: {tensor} lies in {name!r}, which is not a file name")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    for path in files:
        with _open(path) as handle:
            stored = set(handle.keys())
        for tensor, name in weight_map.items():
            if name == path.name and tensor not in stored:
                raise ConfigError(f"{path}: tensor {tensor} is missing, but {INDEX_FILE} says it is there")
    return files


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """A safetensors file, with its faults turned into errors that name it."""
    try:
        with safe_open(path, framework="pt", device="cpu") as handle:
            yield handle
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is damaged or not a safetensors file: {error}") from None


def _check_tensor(
    path: Path, name: str, tensor: Any, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOAT_DTYPES
) -> None:
    found = tuple(tensor.get_shape())
    if found != shape:
        raise ConfigError(f"{path}: tensor {name} has shape {list(found)}, expected {list(shape)}")
    if tensor.get_dtype() not in dtypes:
        raise ConfigError(f"{path}: tensor {name} has dtype {tensor.get_dtype()}, not {' or '.join(dtypes)}")
