"""The model as plainly as it can be written: what the worker is tested against.

One unpadded row, no cache: every output token recomputes the whole sequence from its embeddings.
Slow on purpose, greedy only; the logits are returned so that callers can check sampling.

A K/V table with one entry per (layer, position) is filled loop by loop, and each loop overwrites
the entries of the positions that still run. A position that has left keeps the entry of its last
loop. The two layouts differ only in the order of the work:

- ``last_exited``: all positions go through loop 1, then all through loop 2, ... So loop d of a
  query finds, at an earlier position that ran e loops, the K/V of loop min(d, e).
- ``shared``: the prompt goes through all its loops, then each generated position through all of
  its own. So a generated query finds the K/V of the last loop of every earlier position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ouro_sgl.messages import ExitMode, RowParams
from ouro_sgl.models.config import OuroConfig
from ouro_sgl.models.weights import Head, Weights, gate_head, random_lookahead_head


@dataclass
class ReferenceOutput:
    """One generated sequence; entry i of every list belongs to output token i.

    ``scores[i][m - 1]`` is the number compared with the threshold after loop m: F(m) of the exit
    gate, or the sigmoid of a lookahead head. It is empty where nothing is decided (the first
    output, ``trace``). ``logits``: fp32 [outputs, vocab], the row that token i was taken from.
    ``prompt_logits``: fp32 [P, vocab], row j predicts position j + 1.
    """

    output_ids: list[int]
    exit_depths: list[int]
    scores: list[list[float]]
    logits: torch.Tensor
    prompt_logits: torch.Tensor


class ExitRule:
    """When one token leaves the loop: feed it the state after each loop, in order."""

    def __init__(self, params: RowParams, total_loops: int, head: Head) -> None:
        self.params = params
        self.total_loops = total_loops
        self.weight, self.bias = (tensor.cpu() for tensor in head)
        self.survival = torch.ones((), dtype=torch.float32)
        self.threshold = torch.tensor(params.exit_threshold, dtype=torch.float32).item()
        self.pending = False
        self.scores: list[float] = []

    def leaves(self, loop: int, state: torch.Tensor) -> bool:
        """Whether the token leaves after ``loop`` (1-based); ``state`` [hidden] closes that loop."""
        params = self.params
        hazard = torch.sigmoid((self.weight * state.float().cpu()).sum() + self.bias)
        if params.exit_mode in (ExitMode.OURO, ExitMode.OURO_DELAYED):
            self.survival = self.survival * (1.0 - hazard)
            score = (1.0 - self.survival).item() if loop < self.total_loops else 1.0
        else:
            score = hazard.item()
        self.scores.append(score)
        was_pending = self.pending
        triggered = self.threshold < 1.0 and score >= self.threshold
        if params.exit_mode == ExitMode.OURO:
            return loop == params.max_loops or (triggered and loop >= params.min_loops)
        if params.exit_mode == ExitMode.OURO_DELAYED:
            self.pending = triggered and loop >= params.min_loops
        else:
            self.pending = triggered and loop + 1 >= params.min_loops
        return loop == params.max_loops or was_pending


class ReferenceModel:
    """A looped model over ``weights`` (by Hugging Face key; computes in their dtype and device).

    ``lookahead`` is the trained head of the checkpoint, needed only for ``ExitMode.LOOKAHEAD``.
    """

    def __init__(
        self,
        config: OuroConfig,
        weights: Weights,
        *,
        lookahead: Head | None = None,
        lookahead_seed: int = 0,
    ) -> None:
        self.config = config
        self.weights = weights
        gate = gate_head(weights)
        self.heads: dict[ExitMode, Head] = {
            ExitMode.OURO: gate,
            ExitMode.OURO_DELAYED: gate,
            ExitMode.RANDOM_LOOKAHEAD: random_lookahead_head(lookahead_seed, config.hidden_size),
        }
        if lookahead is not None:
            self.heads[ExitMode.LOOKAHEAD] = lookahead

    @torch.inference_mode()
    def generate(
        self,
        input_ids: list[int],
        params: RowParams,
        layout: str = "last_exited",
        forced_ids: list[int] | None = None,
    ) -> ReferenceOutput:
        """Continue ``input_ids`` greedily (ties: the lowest id) until an end id or the length.

        Of ``params`` only the limits, ``end_ids`` and the exit fields count; sampling does not.
        With ``forced_ids`` those are the outputs, whatever the logits say.
        """
        if layout not in ("last_exited", "shared"):
            raise ValueError(f"unknown layout {layout!r}")
        total_loops = self.config.total_loops
        prompt_len = len(input_ids)
        ids = list(input_ids)
        depths = [total_loops] * prompt_len  # loops run by every position so far
        output = ReferenceOutput([], [], [], torch.empty(0), torch.empty(0))
        rows = []
        prompt_states = self._states(ids, prompt_len, depths, None, layout)
        output.prompt_logits = self._logits(prompt_states)
        for index in range(params.max_new_tokens):
            rule: ExitRule | None = None
            if index == 0:
                state = prompt_states[-1]
            else:
                if params.exit_mode == ExitMode.TRACE:
                    assert params.exit_trace is not None
                    depths.append(params.exit_trace[index])
                else:
                    rule = ExitRule(params, total_loops, self.heads[params.exit_mode])
                    depths.append(params.max_loops)  # at most; the rule may end it earlier
                state = self._states(ids, prompt_len, depths, rule, layout)[-1]
            logits = self._logits(state)
            rows.append(logits)
            token = forced_ids[index] if forced_ids is not None else _argmax(logits)
            output.output_ids.append(token)
            output.exit_depths.append(depths[-1])
            output.scores.append(rule.scores if rule is not None else [])
            ids.append(token)
            if token in params.end_ids:
                break
        if rows:
            output.logits = torch.stack(rows)
        return output

    def _states(
        self,
        ids: list[int],
        prompt_len: int,
        depths: list[int],
        rule: ExitRule | None,
        layout: str,
    ) -> torch.Tensor:
        """The state [positions, hidden] in which each position left the loop.

        ``depths[j]`` is the number of loops of position j. With a ``rule`` the last entry is an
        upper bound, lowered in place when the rule says that the position leaves.
        """
        config = self.config
        count = len(ids)
        last = count - 1
        hidden = self.weights["model.embed_tokens.weight"][ids]
        shape = (config.num_layers, count, config.num_kv_heads, config.head_dim)
        keys, values = hidden.new_zeros(shape), hidden.new_zeros(shape)
        if layout == "last_exited":
            blocks = [range(count)]
        else:
            blocks = [range(prompt_len), *(range(j, j + 1) for j in range(prompt_len, count))]
        for block in blocks:
            for loop in range(1, config.total_loops + 1):
                running = [j for j in block if depths[j] >= loop]
                if not running:
                    break
                hidden[running] = self._loop(hidden[running], torch.tensor(running), keys, values)
                if rule is not None and last in running and rule.leaves(loop, hidden[last]):
                    depths[last] = loop
        return hidden

    def _loop(
        self, x: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """One pass of all layers over the states ``x`` [n, hidden] at ``positions`` [n].

        Writes its K and V into ``keys`` and ``values`` [layers, positions, kv heads, head size]
        before it attends over them.
        """
        config, w = self.config, self.weights
        positions = positions.to(x.device)
        cos, sin = self._rotary(positions, x.dtype)
        visible = torch.arange(keys.shape[1], device=x.device) <= positions[:, None]  # [n, positions]
        group = config.num_heads // config.num_kv_heads
        for layer in range(config.num_layers):
            name = f"model.layers.{layer}."
            y = self._norm(x, name + "input_layernorm.weight")
            q = F.linear(y, w[name + "self_attn.q_proj.weight"]).view(len(x), -1, config.head_dim)
            k = F.linear(y, w[name + "self_attn.k_proj.weight"]).view(len(x), -1, config.head_dim)
            v = F.linear(y, w[name + "self_attn.v_proj.weight"]).view(len(x), -1, config.head_dim)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            keys[layer, positions] = k
            values[layer, positions] = v
            all_k = keys[layer].float().repeat_interleave(group, dim=1)  # [positions, heads, head size]
            all_v = values[layer].float().repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", q.float(), all_k) * config.head_dim**-0.5
            weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
            attention = torch.einsum("hqk,khd->qhd", weights, all_v).to(x.dtype).flatten(1)
            y = F.linear(attention, w[name + "self_attn.o_proj.weight"])
            x = x + self._norm(y, name + "input_layernorm_2.weight")
            y = self._norm(x, name + "post_attention_layernorm.weight")
            gate = F.silu(F.linear(y, w[name + "mlp.gate_proj.weight"]))
            up = F.linear(y, w[name + "mlp.up_proj.weight"])
            y = F.linear(gate * up, w[name + "mlp.down_proj.weight"])
            x = x + self._norm(y, name + "post_attention_layernorm_2.weight")
        return self._norm(x, "model.norm.weight")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean_square = x.float().square().mean(dim=-1, keepdim=True)
        scaled = x.float() * torch.rsqrt(mean_square + self.config.rms_norm_eps)
        return scaled.to(x.dtype) * self.weights[name]

    def _rotary(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [n, 1, head size] of the angles of ``positions``; angles in fp32."""
        half = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32, device=positions.device)
        frequencies = self.config.rope_theta ** (-half / self.config.head_dim)
        angles = positions.float()[:, None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        return F.linear(states, self.weights["lm_head.weight"]).float()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions, split-half: dimension i is paired with i + head size / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _argmax(logits: torch.Tensor) -> int:
    """The lowest id of the largest logit."""
    return int((logits == logits.max()).nonzero()[0])
