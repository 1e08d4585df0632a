"""The looped model, top to bottom.

One *round* is one pass over all layers; a token takes up to T of them, each at its own depth.
The model owns weights and arithmetic, not caches: attention is a callback that stores K and V
wherever the caller's slot table says and reads what the caller allows. Prefill and decode, one
depth or many in a batch, are the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from ouro_kernels.elementwise import silu
from ouro_kernels.exits import gate
from ouro_kernels.linear import linear
from ouro_kernels.norm import rms_norm
from ouro_kernels.rope import rope, rope_table

from ouro_sgl.models.config import OuroConfig

# (layer, query [M, heads, D], key [M, kv_heads, D], value [M, kv_heads, D]) -> [M, heads, D]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; linears are [out, in], norms [hidden]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor  # rows: all query heads, then key heads, then value heads
    attention_out: torch.Tensor
    attention_norm: torch.Tensor
    mlp_input_norm: torch.Tensor
    gate_up: torch.Tensor  # rows: gate, then up
    down: torch.Tensor
    mlp_norm: torch.Tensor


class OuroModel:
    """Weights by name (as in the checkpoint) to callable stages: prelude, core, gate, coda."""

    def __init__(
        self, config: OuroConfig, weights: dict[str, torch.Tensor], max_position: int | None = None
    ) -> None:
        self.config = config
        self.embedding = weights["model.embed_tokens.weight"]
        self.layers = [self._layer(weights, index) for index in range(config.num_layers)]
        self.final_norm = weights["model.norm.weight"]
        self.gate_weight = weights["model.early_exit_gate.weight"][0].float()
        self.gate_bias = weights["model.early_exit_gate.bias"][0].float()
        self.lm_head = weights["lm_head.weight"]
        self.dtype = self.embedding.dtype
        self.device = self.embedding.device
        self.cos, self.sin = rope_table(
            max_position or config.max_position, config.head_dim, config.rope_theta, self.dtype, self.device
        )

    def replace(self, weights: dict[str, torch.Tensor]) -> None:
        """Overwrite every weight in place with one of the same shape, from any device."""
        for index, layer in enumerate(self.layers):
            fresh = self._layer(weights, index)
            for field in fields(Layer):
                getattr(layer, field.name).copy_(getattr(fresh, field.name))
        self.embedding.copy_(weights["model.embed_tokens.weight"])
        self.final_norm.copy_(weights["model.norm.weight"])
        self.gate_weight.copy_(weights["model.early_exit_gate.weight"][0])
        self.gate_bias.copy_(weights["model.early_exit_gate.bias"][0])
        self.lm_head.copy_(weights["lm_head.weight"])

    @staticmethod
    def _layer(weights: dict[str, torch.Tensor], index: int) -> Layer:
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return Layer(
            input_norm=weights[prefix + "input_layernorm.weight"],
            qkv=torch.cat([weights[f"{attention}{name}_proj.weight"] for name in "qkv"]),
            attention_out=weights[attention + "o_proj.weight"],
            attention_norm=weights[prefix + "input_layernorm_2.weight"],
            # despite its name in the checkpoint this is the norm in front of the MLP
            mlp_input_norm=weights[prefix + "post_attention_layernorm.weight"],
            gate_up=torch.cat([weights[f"{mlp}{name}_proj.weight"] for name in ("gate", "up")]),
            down=weights[mlp + "down_proj.weight"],
            mlp_norm=weights[prefix + "post_attention_layernorm_2.weight"],
        )

    def prelude(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embedding: token_ids [M] int64 -> hidden [M, H], the state h_0."""
        return self.embedding[token_ids]

    def core(self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """One round: h_{t-1} [M, H] at positions [M] int64 -> h_t [M, H], the final norm included."""
        config, eps = self.config, self.config.rms_norm_eps
        heads, kv_heads = config.num_heads, config.num_kv_heads
        cos, sin = self.cos[positions], self.sin[positions]
        for index, layer in enumerate(self.layers):
            qkv = linear(rms_norm(hidden, layer.input_norm, eps), layer.qkv)
            qkv = qkv.view(-1, heads + 2 * kv_heads, config.head_dim)
            query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
            mixed = attend(index, rope(query, cos, sin), rope(key, cos, sin), value)
            mixed = linear(mixed.reshape(-1, heads * config.head_dim), layer.attention_out)
            hidden = hidden + rms_norm(mixed, layer.attention_norm, eps)
            gated, up = linear(rms_norm(hidden, layer.mlp_input_norm, eps), layer.gate_up).chunk(2, dim=-1)
            mixed = linear(silu(gated) * up, layer.down)
            hidden = hidden + rms_norm(mixed, layer.mlp_norm, eps)
        return rms_norm(hidden, self.final_norm, eps)

    def hazard(self, hidden: torch.Tensor) -> torch.Tensor:
        """The exit gate's lambda for h_t [M, H]: [M] fp32."""
        return gate(hidden, self.gate_weight, self.gate_bias)

    def coda(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the exit state: hidden [M, H] -> [M, V] fp32."""
        return linear(hidden, self.lm_head).float()
