"""The embedded model as it is trained: a Nemotron-H trunk and its multi-token prediction head.

Parameter names are those of the checkpoint. Sequences are short, so the state-space layers use the quadratic
form of SSD (Dao and Gu, 2405.21060, section 3), which is the whole sequence as one chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. `pattern` has a character per layer: M Mamba-2, * attention, - MLP."""

    vocabulary: int
    pattern: str = "M-M*-M*-"
    mtp_pattern: str = "*-"
    hidden: int = 256
    mamba_heads: int = 8
    mamba_head_dim: int = 64
    state: int = 64
    conv: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    mlp: int = 768
    epsilon: float = 1e-5


class RMSNorm(nn.Module):
    """Root mean square norm, in float32; with a gate, of `x * silu(gate)`."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = x.float()
        if gate is not None:
            x = x * F.silu(gate.float())
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class Mamba(nn.Module):
    """A Mamba-2 mixer with one group, over [batch, length, hidden]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.inner = shape.mamba_heads * shape.mamba_head_dim
        channels = self.inner + 2 * shape.state
        self.in_proj = nn.Linear(shape.hidden, self.inner + channels + shape.mamba_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, shape.conv, groups=channels, padding=shape.conv - 1)
        dt = torch.exp(torch.empty(shape.mamba_heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.A_log = nn.Parameter(torch.log(torch.empty(shape.mamba_heads).uniform_(1, 16)))
        self.D = nn.Parameter(torch.ones(shape.mamba_heads))
        self.norm = RMSNorm(self.inner, shape.epsilon)
        self.out_proj = nn.Linear(self.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        shape = self.shape
        gate, mixed, dt = self.in_proj(x).split([self.inner, self.inner + 2 * shape.state, shape.mamba_heads], -1)
        mixed = F.silu(self.conv(mixed))
        values, b, c = mixed.split([self.inner, shape.state, shape.state], -1)
        values = values.view(batch, length, shape.mamba_heads, shape.mamba_head_dim).transpose(1, 2)
        dt = F.softplus(dt.float() + self.dt_bias).transpose(1, 2)  # [batch, heads, length]
        decay = torch.cumsum(dt * -torch.exp(self.A_log)[:, None], -1)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mask = torch.exp((decay[..., :, None] - decay[..., None, :]).masked_fill(future, -math.inf))
        weights = (c @ b.transpose(1, 2))[:, None] * mask.to(values.dtype) * dt[..., None, :].to(values.dtype)
        y = weights @ values + self.D[:, None, None] * values
        return self.out_proj(self.norm(y.transpose(1, 2).reshape(batch, length, self.inner), gate).to(x.dtype))

    def conv(self, x: Tensor) -> Tensor:
        """The causal depthwise convolution, as shifted products: faster on a CPU than grouped convolution."""
        weight = self.conv1d.weight[:, 0].to(x.dtype)
        padded = F.pad(x, (0, 0, self.shape.conv - 1, 0))
        taps = (padded[:, i : i + x.shape[1]] * weight[:, i] for i in range(self.shape.conv))
        return sum(taps, start=self.conv1d.bias.to(x.dtype))


class Attention(nn.Module):
    """Causal attention without positions, over [batch, length, hidden]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [batch, heads, length, head_dim], keys and values repeated."""
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        repeats = self.shape.heads // self.shape.kv_heads
        return q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)

    def merge(self, y: Tensor) -> Tensor:
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(2, 3)).float() * self.shape.head_dim**-0.5
        return self.merge(scores.masked_fill(future, -math.inf).softmax(-1).to(v.dtype) @ v)


class MLP(nn.Module):
    """Two matrices around a squared ReLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())


MIXERS: dict[str, type[Mamba] | type[Attention] | type[MLP]] = {"M": Mamba, "*": Attention, "-": MLP}


class Block(nn.Module):
    """One norm and one mixer, added to the residual."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.hidden, shape.epsilon)
        self.mixer = MIXERS[kind](shape)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class Trunk(nn.Module):
    """Embedding, layers and final norm: ids [batch, length] -> hidden states [batch, length, hidden]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Block(shape, kind) for kind in shape.pattern)
        self.norm_f = RMSNorm(shape.hidden, shape.epsilon)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm_f(x)


class Head(nn.Module):
    """The multi-token prediction head. Its first block joins in the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(shape, kind) for kind in shape.mtp_pattern)
        first, last = self.layers[0], self.layers[-1]
        first.enorm = RMSNorm(shape.hidden, shape.epsilon)
        first.hnorm = RMSNorm(shape.hidden, shape.epsilon)
        first.eh_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        last.final_layernorm = RMSNorm(shape.hidden, shape.epsilon)

    def join(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Hidden states of positions t and embeddings of tokens t + 1, as the first block's input."""
        first = self.layers[0]
        return first.eh_proj(torch.cat([first.enorm(embedded), first.hnorm(hidden)], -1))

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """One depth: [batch, length, hidden] twice -> what the LM head turns into tokens t + 2."""
        x = self.join(hidden, embedded)
        for layer in self.layers:
            x = layer(x)
        return self.layers[-1].final_layernorm(x)

    def unroll(self, hidden: Tensor, embedded: Tensor, positions: Tensor, depths: int) -> list[Tensor]:
        """Several depths from each of `positions` [batch, n], each fed with the output of the one before.

        `hidden` and `embedded` [batch, length, hidden] are of all tokens, and every position needs `depths` tokens
        after it. Depth d of position t turns into token t + 2 + d; each result is [batch, n, hidden]. A draft attends,
        as it does when it is used, to depth 0 up to t, and beyond that to the deeper entries of its own chain only.
        """
        attention, mlp = self.layers
        x = self.join(hidden[:, :-1], embedded[:, 1:])
        q, shared_keys, shared_values = attention.mixer.project(attention.norm(x))
        x, q = torch.take_along_dim(x, positions[..., None], 1), torch.take_along_dim(q, positions[:, None, :, None], 2)
        length = shared_keys.shape[2]
        future = (torch.arange(length) > positions[..., None])[:, None]
        outputs: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for depth in range(depths):
            if depth:
                x = self.join(outputs[-1], torch.take_along_dim(embedded, positions[..., None] + 1 + depth, 1))
                q, key, value = attention.mixer.project(attention.norm(x))
                keys.append(key)
                values.append(value)
            scores = (q @ shared_keys.transpose(2, 3)).masked_fill(future, -math.inf)
            own = [(q * key).sum(-1, keepdim=True) for key in keys]
            weights = torch.cat([scores, *own], -1).float().mul(q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
            y = weights[..., :length] @ shared_values
            for index, value in enumerate(values):
                y = y + weights[..., length + index, None] * value
            x = mlp(x + attention.mixer.merge(y))
            outputs.append(mlp.final_layernorm(x))
        return outputs


class DemoModel(nn.Module):
    """Trunk, LM head and multi-token prediction head, named as in the checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.mtp = Head(shape)
        nn.init.normal_(self.model.embeddings.weight, std=0.5)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        for name, parameter in self.named_parameters():
            if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                parameter.data *= 0.3
