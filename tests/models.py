"""Checkpoint folders for tests, written as a user's would be: config, tokenizer, tensors.

- :func:`rand_checkpoint`: a small random looped model. Exits spread over all depths and the best
  two logits nearly always differ by much more than rounding.
- :func:`script_checkpoint`: a model whose every greedy answer is known in advance. The embedding
  is the identity, attention and MLP add nothing, and ``lm_head`` holds one large weight for the
  token that follows each token.

The byte-level tokenizers share one numbering: three special tokens, then byte b is id 3 + b
(:func:`byte_ids`), then whatever merges add.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ouro_sgl.models.config import OuroConfig, load_config
from ouro_sgl.models.weights import GATE_BIAS, GATE_WEIGHT, Weights, expected_shapes

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HEAD_DIM = 64  # of script models
SCRIPT_WEIGHT = 8.0

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# --------------------------------------------------------------------------- tokenizers


def byte_ids(text: str | bytes) -> list[int]:
    """Ids of ``text`` in the byte-level tokenizers, one per byte, no merges."""
    data = text.encode() if isinstance(text, str) else text
    return [3 + byte for byte in data]


def _byte_symbols() -> list[str]:
    """The printable stand-in of every byte value in byte-level BPE, by value."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, shifted = [], 0x100
    for byte in range(256):
        symbols.append(chr(byte if byte in printable else shifted))
        shifted += byte not in printable
    return symbols


def _add_specials(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def byte_tokenizer(words: Iterable[str] = ()) -> Tokenizer:
    """Byte-level BPE of 259 ids; every one of ``words`` (" the", "Paris") becomes one more token.

    A word is merged from left to right, so its prefixes are tokens too, numbered before it.
    """
    symbols = _byte_symbols()
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *symbols])}
    merges: list[tuple[str, str]] = []
    for word in words:
        pieces = [symbols[byte] for byte in word.encode()]
        merged = pieces[0]
        for piece in pieces[1:]:
            if (merged, piece) not in merges:
                merges.append((merged, piece))
                vocab[merged + piece] = len(vocab)
            merged += piece
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(merges))
    tokenizer.decoder = decoders.ByteLevel()
    return _add_specials(tokenizer)


def metaspace_tokenizer(words: Iterable[str] = (" the", " cat", " sat", "s")) -> Tokenizer:
    """BPE over printable ASCII whose spaces are "▁" and come back in the decoder (drops the first)."""
    symbols = ["▁", *(chr(code) for code in range(0x21, 0x7F)), "\n"]
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *symbols])}
    merges: list[tuple[str, str]] = []
    for word in words:
        merged, *rest = word.replace(" ", "▁")
        for piece in rest:
            if (merged, piece) not in merges:
                merges.append((merged, piece))
                vocab[merged + piece] = len(vocab)
            merged += piece
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return _add_specials(tokenizer)


# --------------------------------------------------------------------------- folders


def write_checkpoint(
    path: Path, config: Mapping[str, Any], weights: Weights, tokenizer: Tokenizer, end_ids: Sequence[int]
) -> Path:
    """Write all files of a checkpoint folder; returns ``path``."""
    path.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": {**config, "eos_token_id": end_ids[0] if end_ids else None, "bos_token_id": 0},
        "generation_config.json": {"eos_token_id": list(end_ids), "bos_token_id": 0},
        "tokenizer_config.json": {
            "eos_token": SPECIAL_TOKENS[0],
            "pad_token": SPECIAL_TOKENS[0],
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, value in files.items():
        (path / name).write_text(json.dumps(value, indent=2), encoding="utf-8")
    tokenizer.save(str(path / "tokenizer.json"))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path / "model.safetensors")
    return path


def raw_config(
    *,
    vocab_size: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    total_loops: int,
    dtype: str,
    max_position: int,
    threshold: float,
) -> dict[str, Any]:
    """The content of ``config.json``, but for the end ids."""
    return {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "total_ut_steps": total_loops,
        "early_exit_threshold": threshold,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def _parse(path: Path, config: Mapping[str, Any]) -> OuroConfig:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return load_config(path)


def rand_checkpoint(
    path: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    intermediate: int = 96,
    heads: int = 4,
    kv_heads: int = 2,
    vocab_size: int = 259,
    total_loops: int = 4,
    dtype: str = "float32",
    max_position: int = 1024,
    threshold: float = 1.0,
    end_ids: Sequence[int] = (0, 2),
    seed: int = 0,
) -> Path:
    """A random model with a byte-level tokenizer (ids from 259 on, if any, have no text).

    With ``exit_threshold`` near 0.7 its tokens leave after 1, 2, 3 and 4 loops.
    """
    raw = raw_config(
        vocab_size=vocab_size,
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        total_loops=total_loops,
        dtype=dtype,
        max_position=max_position,
        threshold=threshold,
    )
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, shape in expected_shapes(_parse(path, raw)).items():
        drawn = torch.randn(shape, generator=generator)
        if name == GATE_BIAS:
            weight = torch.full(shape, -0.4)
        elif name == GATE_WEIGHT:
            weight = drawn * 1.2 / math.sqrt(hidden)
        elif name == "lm_head.weight":
            weight = drawn * 4.0 / math.sqrt(hidden)
        elif name == "model.embed_tokens.weight":
            weight = drawn
        elif name.endswith(("layernorm_2.weight", "norm.weight", "layernorm.weight")):
            # Norms differ from 1, so that a forgotten or swapped one shows. Those on the block outputs
            # are small, so that the state still tells tokens apart after many layers and loops.
            scale = 0.6 if name.endswith("layernorm_2.weight") else 1.0
            weight = scale * (1.0 + 0.2 * drawn.clamp(-2, 2))
        else:
            weight = drawn * 1.5 / math.sqrt(shape[1])
        weights[name] = weight.to(DTYPES[dtype])
    return write_checkpoint(path, raw, weights, byte_tokenizer(), end_ids)


def chain_of(*sequences: Sequence[int]) -> dict[int, int]:
    """The ``chain`` in which every token of a sequence is followed by the next one.

    Raises:
        ValueError: a token would need two different successors.
    """
    chain: dict[int, int] = {}
    for sequence in sequences:
        for token, successor in itertools.pairwise(sequence):
            if chain.setdefault(token, successor) != successor:
                raise ValueError(f"token {token} is followed by both {chain[token]} and {successor}")
    return chain


def script_checkpoint(
    path: Path,
    chain: Mapping[int, int | Sequence[int]],
    *,
    tokenizer: Tokenizer | None = None,
    hazards: Mapping[int, float] | None = None,
    layers: int = 1,
    total_loops: int = 4,
    dtype: str = "float32",
    max_position: int = 1024,
    threshold: float = 1.0,
    end_ids: Sequence[int] = (0, 2),
) -> Path:
    """A model that answers token t with ``chain[t]``, at any number of loops.

    A list of successors makes an exact tie between them, an empty list a uniform distribution; a
    token that is not in ``chain`` is followed by id 0. ``hazards[t]`` is lambda of the exit gate
    after every loop of a position that holds token t (0.5 if not given), so with
    q = ``exit_threshold`` it leaves at the first m with 1 - (1 - lambda)^m >= q.
    """
    tokenizer = tokenizer or byte_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    hidden = -(-vocab_size // HEAD_DIM) * HEAD_DIM
    raw = raw_config(
        vocab_size=vocab_size,
        hidden=hidden,
        intermediate=HEAD_DIM,
        layers=layers,
        heads=hidden // HEAD_DIM,
        kv_heads=1,
        head_dim=HEAD_DIM,
        total_loops=total_loops,
        dtype=dtype,
        max_position=max_position,
        threshold=threshold,
    )
    generator = torch.Generator().manual_seed(0)
    weights: Weights = {}
    for name, shape in expected_shapes(_parse(path, raw)).items():
        if name == "model.embed_tokens.weight":
            weight = torch.eye(*shape)
        elif name == "lm_head.weight":
            weight = torch.zeros(shape)
            for token in range(vocab_size):
                successors = chain.get(token, 0)
                for successor in [successors] if isinstance(successors, int) else successors:
                    weight[successor, token] = SCRIPT_WEIGHT
        elif name == GATE_WEIGHT:
            # The state of token t is sqrt(hidden) in dimension t and 0 elsewhere, in every loop.
            weight = torch.zeros(shape)
            for token, hazard in (hazards or {}).items():
                weight[0, token] = math.log(hazard / (1.0 - hazard)) / math.sqrt(hidden)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "gate.bias")):
            weight = torch.zeros(shape)
        elif len(shape) == 1:
            weight = torch.ones(shape)
        else:
            weight = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
        weights[name] = weight.to(DTYPES[dtype])
    return write_checkpoint(path, raw, weights, tokenizer, end_ids)
