"""Train ouro-tiny: corpus, tokenizer, looped model, exit gate, lookahead head, checkpoint.

    python scripts/train_tiny.py --out ouro_sgl/assets/ouro-tiny              # six minutes on one H200
    python scripts/train_tiny.py --out ouro_sgl/assets/ouro-tiny --gate-only  # stages 2 and 3 again
    python bench/quality.py                                                   # look at the result

The stages follow "Scaling Latent Reasoning via Looped Language Models" (arXiv 2510.25741):

1. Language model and gate together: the next-token losses of the loops, weighted with the gate's
   exit distribution, minus ``ENTROPY_WEIGHT`` times the entropy of that distribution.
2. The gate alone, on a frozen model: where another loop lowers the loss it should go on, else leave.
3. Distilled for serving, not in the paper: a lookahead head that says after loop r what the gate
   will have said after loop r + 1.

A served token that left early has K/V of the loops that it ran only. The model is made used to that:
in half of the training rows some tokens leave at random depths, and later tokens read their K/V
as the KV layout ``last_exited`` keeps it (deeper loops see that of the exit loop). A quarter of
the rows is also read as the layout ``shared`` keeps it (every loop sees that of the exit loop).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiny_corpus
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS, HEAD_DIM, LOOPS = 2048, 256, 1024, 2, 4, 64, 4
MAX_POSITION, ROPE_THETA, NORM_EPS = 2048, 10000.0, 1e-6
ROW_LENGTH = 512  # tokens of one packed training row
ENTROPY_WEIGHT = 0.05  # stage 1, in nats of loss per nat of entropy
GAIN_POWER, EASY_SHARE = 0.5, 0.5  # stage 2, see there
SHARED_ROWS = 4  # one row in so many is also read as the layout ``shared`` keeps it
END_ID, PAD_ID = 0, 0
TRAINED, GENERATED = 1, 2  # bits of a token's flag

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


# --------------------------------------------------------------------------- data


def train_tokenizer(seed: int, num_documents: int) -> Tokenizer:
    """Byte-level BPE over the corpus; every digit is a token of its own."""
    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[tiny_corpus.END_OF_TEXT, tiny_corpus.TURN_START, tiny_corpus.TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for _ in range(num_documents) for text, _ in tiny_corpus.document(rng))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pack_rows(tokenizer_json: str, seed: int, num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fill rows with whole documents.

    Returns [num_rows, ROW_LENGTH] arrays: ids (uint16), the document's number in its row (uint8,
    255 for padding) and flags (uint8). A flag belongs to the position that READS the token, so
    position p is TRAINED when the token at p + 1 is, and GENERATED when a server would have made
    the token at p: from a random reply of the document (or a random place of plain text) onwards.
    """
    tokenizer = Tokenizer.from_str(tokenizer_json)
    rng = random.Random(seed)
    ids = np.full((num_rows, ROW_LENGTH), PAD_ID, np.uint16)
    numbers = np.full((num_rows, ROW_LENGTH), 255, np.uint8)
    flags = np.zeros((num_rows, ROW_LENGTH), np.uint8)
    row, used, number = 0, 0, 0
    while row < num_rows:
        segments = tiny_corpus.document(rng)
        encoded = tokenizer.encode_batch_fast([text for text, _ in segments])
        pieces = [encoding.ids for encoding in encoded]
        length = sum(map(len, pieces))
        if length > ROW_LENGTH:
            continue
        if used + length > ROW_LENGTH:
            row, used, number = row + 1, 0, 0
            if row == num_rows:
                break
        replies = [i for i, (_, trained) in enumerate(segments) if trained]
        reply = rng.choice(replies)
        first = used + sum(map(len, pieces[:reply]))
        if reply == 0:
            first += rng.randrange(1, max(2, len(pieces[0]) // 2))
        for piece, (_, trained) in zip(pieces, segments, strict=True):
            ids[row, used : used + len(piece)] = piece
            numbers[row, used : used + len(piece)] = number
            if trained:
                flags[row, max(used - 1, 0) : used + len(piece) - 1] |= TRAINED
            used += len(piece)
        start = used - length
        if start:
            flags[row, start - 1] &= ~TRAINED & 0xFF  # the document before must not predict this one
        flags[row, first:used] |= GENERATED
        number += 1
    return ids, numbers, flags


@dataclass
class Rows:
    """Packed rows on the training device: [N, ROW_LENGTH] ids, document numbers and flags."""

    ids: Tensor
    numbers: Tensor
    flags: Tensor

    def batches(self, batch_rows: int, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Endless batches; a new order every epoch."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.ids), generator=generator).to(self.ids.device)
            for chosen in order.split(batch_rows):
                if len(chosen) == batch_rows:
                    yield self.ids[chosen].long(), self.numbers[chosen], self.flags[chosen]


def make_rows(tokenizer: Tokenizer, seed: int, num_rows: int, workers: int, device: str) -> Rows:
    jobs = min(num_rows, 64)
    sizes = [num_rows // jobs + (i < num_rows % jobs) for i in range(jobs)]
    text = tokenizer.to_str()
    with ProcessPoolExecutor(workers) as pool:
        parts = list(pool.map(pack_rows, [text] * jobs, [seed * 1000 + i for i in range(jobs)], sizes))
    ids, numbers, flags = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Rows(
        torch.from_numpy(ids.astype(np.int32)).to(device),
        torch.from_numpy(numbers).to(device),
        torch.from_numpy(flags).to(device),
    )


# --------------------------------------------------------------------------- model


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + NORM_EPS)
        return y.to(x.dtype) * self.weight.to(x.dtype)


def rope_tables(length: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [length, HEAD_DIM]."""
    inverse = ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2, device=device).float() / HEAD_DIM)
    angles = torch.arange(length, device=device).float()[:, None] * inverse
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Split-half rotary positions; x [..., HEAD_DIM], cos and sin broadcast to it."""
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False))
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, HIDDEN]; each result [B, HEADS, S, HEAD_DIM]; cos and sin [.., S, HEAD_DIM]."""
        q, k, v = (
            projection(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q, cos, sin), rotate(k, cos, sin), v


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = MLP()
        self.input_layernorm = RMSNorm()
        self.input_layernorm_2 = RMSNorm()
        self.post_attention_layernorm = RMSNorm()
        self.post_attention_layernorm_2 = RMSNorm()

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Everything after attention: x [B, S, HIDDEN], attended [B, HEADS, S, HEAD_DIM]."""
        attended = self.self_attn.o_proj(attended.transpose(1, 2).flatten(-2))
        h = x + self.input_layernorm_2(attended)
        return h + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(h)))

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        frozen: Tensor,
        kept: tuple[Tensor, Tensor] | None,
        others: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One layer of one loop over packed rows; returns the new x and (K, V) as later tokens read it.

        x [B, S, HIDDEN]; frozen [B, 1, S, 1] bool: positions that left before this loop, whose K/V
        stays that of the loop before (``kept``). K and V are [B, HEADS, S, HEAD_DIM]; with ``others``
        each query reads those at earlier positions and its own of this loop. mask [B, 1, S, S] bool,
        with ``others`` [B, 1, S, 2 * S] over others and own.
        """
        q, k, v = self.self_attn.qkv(self.input_layernorm(x), cos, sin)
        if kept is not None:
            k, v = torch.where(frozen, kept[0], k), torch.where(frozen, kept[1], v)
        read = (k, v) if others is None else (torch.cat([others[0], k], 2), torch.cat([others[1], v], 2))
        return self.finish(x, F.scaled_dot_product_attention(q, *read, attn_mask=mask)), (k, v)


class Core(nn.Module):
    """``model.*`` of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = RMSNorm()
        self.early_exit_gate = nn.Linear(HIDDEN, 1)


class TinyOuro(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Core()
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        # The loop's states have unit mean square; the embedding starts it at the same scale.
        nn.init.normal_(self.model.embed_tokens.weight, std=1.0)
        nn.init.zeros_(self.model.early_exit_gate.weight)
        nn.init.constant_(self.model.early_exit_gate.bias, -1.0)

    def states(
        self, ids: Tensor, numbers: Tensor, depths: Tensor, others: list[tuple[Tensor, Tensor]] | None = None
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """The normed state after each loop, [B, S, HIDDEN] each, and each layer's K/V at the exit loop.

        ids [B, S]; numbers [B, S], attention stays within equal numbers; depths [B, S], a
        position's state is meaningful up to its depth. ``others``: the K/V that every loop reads at
        earlier positions (layout ``shared``); None: those of the same loop, or of the exit loop.
        """
        length = ids.shape[1]
        cos, sin = rope_tables(length, ids.device)
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        own = torch.eye(length, dtype=torch.bool, device=ids.device)
        mask = (numbers[:, :, None] == numbers[:, None, :]) & causal
        if others is not None:
            mask = torch.cat([mask & ~own, own.expand_as(mask)], -1)
        h = self.model.embed_tokens(ids)
        kept: list[tuple[Tensor, Tensor] | None] = [None] * LAYERS
        result = []
        for loop in range(1, LOOPS + 1):
            frozen = (depths < loop)[:, None, :, None]
            for i, layer in enumerate(self.model.layers):
                before = None if others is None else others[i]
                h, kept[i] = layer(h, cos, sin, mask[:, None], frozen, kept[i], before)
            h = self.model.norm(h)
            result.append(h)
        return result, [kv for kv in kept if kv is not None]

    def loss_of(self, state: Tensor, targets: Tensor) -> Tensor:
        """Next-token loss of one loop, fp32 [B, S]."""
        logits = self.lm_head(state).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)

    def gate(self, states: list[Tensor]) -> Tensor:
        """The gate's logits, fp32 [B, S, LOOPS]."""
        stacked = torch.stack(states, -2).float()
        with torch.autocast(stacked.device.type, enabled=False):
            return self.model.early_exit_gate(stacked).squeeze(-1)


def exit_distribution(gate_logits: Tensor) -> tuple[Tensor, Tensor]:
    """p_t and log p_t from gate logits [..., LOOPS]; the last gate value is not used."""
    stay = F.logsigmoid(-gate_logits[..., :-1]).cumsum(-1)
    before = F.pad(stay[..., :-1], (1, 0))
    logs = torch.cat([F.logsigmoid(gate_logits[..., :-1]) + before, stay[..., -1:]], -1)
    return logs.exp(), logs


def random_depths(flags: Tensor, generator: torch.Generator) -> Tensor:
    """Exit depths [B, S]: in half of the rows a third of the generated tokens leaves early."""
    shape, device = flags.shape, flags.device
    early = torch.randint(1, LOOPS, shape, generator=generator, device=device)
    leaves = torch.rand(shape, generator=generator, device=device) < 1 / 3
    leaves &= torch.rand((shape[0], 1), generator=generator, device=device) < 0.5
    leaves &= (flags & GENERATED) > 0
    return torch.where(leaves, early, LOOPS)


def next_targets(ids: Tensor) -> Tensor:
    return F.pad(ids[:, 1:], (0, 1), value=PAD_ID)


# --------------------------------------------------------------------------- stage 1


def expected_loss(gate_logits: Tensor, losses: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the chosen tokens of the expected loss minus the weighted entropy; and p [.., LOOPS]."""
    p, log_p = exit_distribution(gate_logits)
    each = (p * losses).sum(-1) + ENTROPY_WEIGHT * (p * log_p).sum(-1)
    return (each * chosen).sum() / chosen.sum().clamp(min=1), p


def stage_one(
    model: TinyOuro, rows: Rows, steps: int, time_limit: float, batch_rows: int, lr: float, seed: int
) -> None:
    """Train everything, for ``steps`` or ``time_limit`` seconds; prints the loss of every loop as it goes."""
    device = rows.ids.device
    fast = device.type == "cuda"
    layer_matrices = [p for name, p in model.named_parameters() if ".layers." in name and p.dim() == 2]
    matrix_ids = {id(p) for p in layer_matrices}
    others = [p for p in model.parameters() if id(p) not in matrix_ids]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(layer_matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.01, fused=fast),
    ]
    generator = torch.Generator(device).manual_seed(seed)
    if fast:
        torch._dynamo.config.recompile_limit = (
            32  # a layer has a variant per pass, and there are several layers
        )
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        model.model.norm.compile(dynamic=False)
    loss_of = torch.compile(model.loss_of, dynamic=False) if fast else model.loss_of
    batches = rows.batches(batch_rows, seed)
    started = time.monotonic()
    next_print = 0.0
    for step in range(steps):
        progress = max(step / steps, (time.monotonic() - started) / time_limit)
        if progress >= 1:
            break
        # Short warm-up, flat, then down to zero over the last 40 %.
        scale = min(1.0, (step + 1) / 100, (1 - progress) / 0.4)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
        ids, numbers, flags = next(batches)
        depths = random_depths(flags, generator)
        targets = next_targets(ids)
        # Tokens that leave early are there for the others to read; only the rest is trained on.
        full = ((flags & TRAINED) > 0) & (depths == LOOPS)
        with torch.autocast(device.type, torch.bfloat16, enabled=fast):
            states, kept = model.states(ids, numbers, depths)
            losses = torch.stack([loss_of(state, targets) for state in states], -1)  # [B, S, LOOPS]
            loss, p = expected_loss(model.gate(states), losses, full)
            # Layout shared: K/V of prompts as above, those of generated tokens found by two rounds
            # of substitution (a served token would read what its predecessors wrote, one by one).
            part = slice(0, max(1, batch_rows // SHARED_ROWS))
            generated = ((flags[part] & GENERATED) > 0)[:, None, :, None]
            prompt_kv = [(k[part], v[part]) for k, v in kept]
            others = prompt_kv
            for _ in range(2):
                states, kept = model.states(ids[part], numbers[part], depths[part], others)
                others = [
                    (torch.where(generated, k, k0), torch.where(generated, v, v0))
                    for (k, v), (k0, v0) in zip(kept, prompt_kv, strict=True)
                ]
            shared_losses = torch.stack([loss_of(state, targets[part]) for state in states], -1)
            chosen = full[part] & ((flags[part] & GENERATED) > 0)
            shared_loss, _ = expected_loss(model.gate(states), shared_losses, chosen)
        loss = loss + shared_loss / SHARED_ROWS
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if progress >= next_print:
            next_print += 0.04
            by_loop = losses[full].mean(0).tolist()
            mean_p = p[full].mean(0).tolist()
            by_loop_shared = shared_losses[chosen].mean(0).tolist()
            seconds = time.monotonic() - started
            print(
                f"step {step:6d}  {seconds:6.1f} s"
                f"  {(step + 1) * batch_rows * ROW_LENGTH / seconds / 1e6:5.2f} Mtok/s"
                f"  loss by loop {' '.join(f'{x:.4f}' for x in by_loop)}"
                f"  shared {' '.join(f'{x:.4f}' for x in by_loop_shared)}"
                f"  exit pdf {' '.join(f'{x:.2f}' for x in mean_p)}",
                flush=True,
            )


# --------------------------------------------------------------------------- stages 2 and 3


@torch.no_grad()
def frozen_features(
    model: TinyOuro, rows: Rows, num_tokens: int, batch_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of generated tokens that ran all loops: states, losses and what going on would gain.

    Returns fp32 [N, LOOPS, HIDDEN], [N, LOOPS] and [N, LOOPS - 1]. The gain after loop t is the loss
    of that loop minus the loss of the last one, in expectation over the last one's prediction:
    never negative, and free of the luck of the one token that the corpus happens to hold.
    """
    generator = torch.Generator(rows.ids.device).manual_seed(1)
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    count = 0
    for ids, numbers, flags in rows.batches(batch_rows, seed=2):
        depths = random_depths(flags, generator)
        chosen = ((flags & (TRAINED | GENERATED)) == TRAINED | GENERATED) & (depths == LOOPS)
        states = torch.stack(model.states(ids, numbers, depths)[0], -2)[chosen].float()
        logs = model.lm_head(states).float().log_softmax(-1)
        losses = -logs.gather(-1, next_targets(ids)[chosen][:, None, None].expand(-1, LOOPS, 1)).squeeze(-1)
        gains = (logs[:, -1:].exp() * (logs[:, -1:] - logs[:, :-1])).sum(-1).clamp(min=0)
        columns.append((states, losses, gains))
        count += len(states)
        if count >= num_tokens:
            break
    states, losses, gains = (torch.cat(column) for column in zip(*columns, strict=True))
    return states, losses, gains


def fit_logistic(features: Tensor, targets: Tensor, steps: int = 600) -> tuple[Tensor, Tensor]:
    """Weight [1, HIDDEN] and bias [1] of the logistic regression of soft targets [N] on [N, HIDDEN]."""
    weight = torch.zeros(1, HIDDEN, device=features.device, requires_grad=True)
    bias = torch.zeros(1, device=features.device, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=steps, history_size=20, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = features @ weight[0] + bias
        loss = F.binary_cross_entropy_with_logits(logits, targets) + 1e-6 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weight.detach(), bias.detach()


def stage_two(model: TinyOuro, states: Tensor, gains: Tensor) -> None:
    """Fit the gate to leave where the gain of going on is small, on a logarithmic scale.

    A token should leave with probability 1 / (1 + (gain / worth) ** GAIN_POWER). ``worth`` is the
    EASY_SHARE quantile of the gains after loop 1: at threshold 0.5 about that share of the tokens
    leaves there, and the other thresholds spread smoothly around it.
    """
    worth = gains[:, 0].quantile(EASY_SHARE)
    targets = torch.sigmoid(-GAIN_POWER * torch.log((gains + 1e-9) / worth))
    weight, bias = fit_logistic(states[:, :-1].flatten(0, 1), targets.flatten())
    with torch.no_grad():
        model.model.early_exit_gate.weight.copy_(weight.bfloat16())
        model.model.early_exit_gate.bias.copy_(bias.bfloat16())
    print(
        f"gate: worth {worth:.2e} nats, targets by loop",
        " ".join(f"{x:.3f}" for x in targets.mean(0).tolist()),
    )


def gate_cdf(model: TinyOuro, states: Tensor) -> Tensor:
    """F(1..LOOPS) of the gate, fp32 [N, LOOPS], from states [N, LOOPS, HIDDEN]."""
    with torch.no_grad():
        hazards = torch.sigmoid(model.model.early_exit_gate(states).squeeze(-1))
        return torch.cat([1 - (1 - hazards[:, :-1]).cumprod(-1), torch.ones_like(hazards[:, :1])], -1)


def fit_lookahead(model: TinyOuro, states: Tensor) -> dict[str, Tensor]:
    """The lookahead head, fp32: after loop r it gives the gate's F(r + 1)."""
    cdf = gate_cdf(model, states)
    weight, bias = fit_logistic(states[:, : LOOPS - 2].flatten(0, 1), cdf[:, 1 : LOOPS - 1].flatten())
    return {"weight": weight.cpu(), "bias": bias.cpu()}


def print_trade_off(model: TinyOuro, lookahead: dict[str, Tensor], states: Tensor, losses: Tensor) -> None:
    """Mean depth and loss by threshold, of single tokens that read full-depth K/V."""
    gate = gate_cdf(model, states)
    seen = torch.sigmoid(states @ lookahead["weight"][0].to(states) + lookahead["bias"].to(states))
    ahead = torch.cat([torch.zeros_like(seen[:, :1]), seen[:, : LOOPS - 2], torch.ones_like(seen[:, :1])], -1)
    print("threshold   gate: depth   loss   lookahead: depth   loss")
    for threshold in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        cells = []
        for cdf in (gate, ahead):
            loop = (cdf >= threshold).float().argmax(-1)  # the first that reaches it
            loss = losses.gather(1, loop[:, None]).mean()
            cells += [f"{loop.float().mean() + 1:.2f}", f"{loss:.4f}"]
        print("{:9.1f}{:>14}{:>9}{:>16}{:>9}".format(threshold, *cells))


# --------------------------------------------------------------------------- checkpoint


def save(out: Path, model: TinyOuro, tokenizer: Tokenizer, lookahead: dict[str, Tensor]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITION,
        "initializer_range": 0.02,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "total_ut_steps": LOOPS,
        "early_exit_threshold": 1.0,
        "bos_token_id": END_ID,
        "eos_token_id": END_ID,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tiny_corpus.END_OF_TEXT,
        "eos_token": tiny_corpus.TURN_END,
        "pad_token": tiny_corpus.END_OF_TEXT,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITION,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {"bos_token_id": END_ID, "eos_token_id": [0, 2], "pad_token_id": PAD_ID}
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))
    weights = {
        name: tensor.detach().bfloat16().cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    save_file(lookahead, out / "lookahead.safetensors", metadata={"format": "pt"})
    for file in out.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner can read


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20_000, help="optimizer steps of stage 1 at most")
    parser.add_argument(
        "--time-limit", type=float, default=310.0, help="seconds after which stage 1 ends early"
    )
    parser.add_argument("--batch-rows", type=int, default=128, help=f"rows of {ROW_LENGTH} tokens per step")
    parser.add_argument("--rows", type=int, default=230_000, help="rows of the corpus")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (both optimizers)")
    parser.add_argument("--workers", type=int, default=16, help="processes that make the corpus")
    parser.add_argument("--gate-rows", type=int, default=4000, help="rows of new text for stages 2 and 3")
    parser.add_argument("--gate-tokens", type=int, default=200_000, help="tokens of stages 2 and 3")
    parser.add_argument(
        "--gate-only", action="store_true", help="keep the model in --out, redo stages 2 and 3"
    )
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    started = time.monotonic()
    model = TinyOuro().to(args.device)
    if args.gate_only:
        tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
        weights = load_file(args.out / "model.safetensors")
        model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    else:
        tokenizer = train_tokenizer(args.seed, min(100_000, args.rows * 5))
        rows = make_rows(tokenizer, args.seed, args.rows, args.workers, args.device)
        print(
            f"{sum(p.numel() for p in model.parameters()):,} parameters, "
            f"{tokenizer.get_vocab_size()} token ids, {int((rows.numbers != 255).sum()):,} corpus tokens "
            f"({int((rows.flags & TRAINED).sum()):,} trained), {time.monotonic() - started:.0f} s",
            flush=True,
        )
        stage_one(model, rows, args.steps, args.time_limit, args.batch_rows, args.lr, args.seed)
        print(f"stage 1 done, {time.monotonic() - started:.0f} s", flush=True)
        torch.compiler.set_stance("force_eager")  # the later stages run other shapes a few times
    with torch.no_grad():  # what is served is rounded to bf16; everything after sees that
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    rows = make_rows(tokenizer, args.seed + 1, args.gate_rows, args.workers, args.device)
    states, losses, gains = frozen_features(model, rows, args.gate_tokens, min(args.batch_rows, 32))
    print("loss by loop (bf16 weights, new text)", " ".join(f"{x:.4f}" for x in losses.mean(0).tolist()))
    stage_two(model, states, gains)
    lookahead = fit_lookahead(model, states)
    print_trade_off(model, lookahead, states, losses)
    save(args.out, model, tokenizer, lookahead)
    print(f"saved, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
