"""Small models that take no width, one for each kind of layer; `scale` is for their narrow twins, built by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

SERIES, TOKENS, IMAGES, ROWS = (
    torch.randn(4, 5, 8),
    torch.randint(20, (4, 6)),
    torch.randn(2, 3, 16, 16),
    torch.randn(16, 6),
)


class Recurrent(nn.Module):
    """A recurrent layer behind a linear one, read at its last step or at its last hidden state."""

    def __init__(self, scale: float, kind: type[nn.RNNBase], *, state: bool = False, **settings: Any) -> None:
        super().__init__()
        width = round(64 * scale)
        if "proj_size" in settings:
            settings["proj_size"] = width // 2
        self.state = state
        self.first = nn.Linear(8, round(48 * scale))
        own: Any = kind
        self.rnn: nn.RNNBase = own(round(48 * scale), width, batch_first=True, **settings)
        self.head = nn.Linear(
            (width // 2 if "proj_size" in settings else width) * (2 if self.rnn.bidirectional else 1), 3
        )

    def forward(self, x: Tensor) -> Tensor:
        output, state = self.rnn(self.first(x))
        if self.state:
            last = state[0] if isinstance(state, tuple) else state
            output = last[-2 if self.rnn.bidirectional else -1 :].transpose(0, 1).flatten(1)[:, None]
        out: Tensor = self.head(output[:, -1])
        return out


class GivenState(nn.Module):
    """A GRU whose first hidden state is made by the model."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, round(64 * scale))
        self.head = nn.Linear(round(64 * scale), 3)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(1, len(x), self.rnn.hidden_size)
        out: Tensor = self.head(self.rnn(x.transpose(0, 1), state)[0][-1])
        return out


class Packed(nn.Module):
    """An LSTM over sequences of unequal lengths."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, round(64 * scale), batch_first=True)
        self.head = nn.Linear(round(64 * scale), 3)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([3, 5, 2, 4]), batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        out: Tensor = self.head(output.mean(1))
        return out


class Cell(nn.Module):
    """A cell in a loop of the model's own."""

    def __init__(self, scale: float, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        own: Any = kind
        self.cell, self.head = own(8, round(64 * scale)), nn.Linear(round(64 * scale), 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        out: Tensor = self.head(state[0] if isinstance(state, tuple) else state)
        return out


class EncoderDecoder(nn.Module):
    """torch's whole transformer, with masks: it reads from its values whether one is causal."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        width = round(64 * scale)
        self.embedding = nn.Embedding(20, width)
        self.blocks = nn.Transformer(width, round(8 * scale), 1, 1, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x, padding = self.embedding(tokens), tokens == 0
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        out: Tensor = self.head(self.blocks(x, x, tgt_mask=causal, **masks))
        return out


class CrossAttention(nn.Module):
    """Attention of torch's, whose keys and values may have a width of their own."""

    def __init__(self, scale: float, keys: int = 64) -> None:
        super().__init__()
        width, other = round(64 * scale), round(keys * scale)
        own = {} if keys == 64 else {"kdim": other, "vdim": other}
        self.query, self.key = nn.Linear(8, width), nn.Linear(8, other)
        self.attention = nn.MultiheadAttention(width, round(4 * scale), batch_first=True, **own)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.query(x), self.key(x)
        out: Tensor = self.head(query + self.attention(query, key, key)[0]).mean(1)
        return out


class GroupedQueries(nn.Module):
    """Attention as in Llama and Qwen, written by hand: a tensor of the model's own has the size of a head."""

    cos: Tensor
    sin: Tensor
    frequencies: Tensor

    def __init__(self, scale: float, kind: str) -> None:
        super().__init__()
        width, self.kind = round(128 * scale), kind
        self.n_heads, self.n_kv_heads, self.n_rep, self.head_dim = round(16 * scale), round(8 * scale), 2, 8
        self.embedding, self.head = nn.Embedding(20, width), nn.Linear(width, 3)
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = nn.Linear(width, width // 2), nn.Linear(width, width // 2)
        self.norm = nn.RMSNorm(8) if kind == "norm" else nn.Identity()
        self.temperature = nn.Parameter(torch.rand(self.n_kv_heads, 1)) if kind == "norm" else None
        frequencies = 100.0 ** -(torch.arange(4) / 4)
        angles = torch.outer(torch.arange(6), frequencies).repeat(1, 2)
        tables = {"frequencies": frequencies} if kind == "frequencies" else {"cos": angles.cos(), "sin": angles.sin()}
        for name, table in tables.items() if kind != "norm" else ():
            self.register_buffer(name, table, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        batch, time, _ = x.shape
        q = self._turned(self.query(x).view(batch, time, self.n_heads, self.head_dim))
        k = self._turned(self.key(x).view(batch, time, self.n_kv_heads, self.head_dim))
        v = self.value(x).view(batch, time, self.n_kv_heads, self.head_dim)
        k = k if self.temperature is None else k * self.temperature
        k, v = (part.unsqueeze(3).expand(-1, -1, -1, self.n_rep, -1).flatten(2, 3) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        out: Tensor = self.head(x + self.out(mixed.transpose(1, 2).reshape(batch, time, -1))).mean(1)
        return out

    def _turned(self, x: Tensor) -> Tensor:
        if self.kind == "norm":
            normed: Tensor = self.norm(x)
            return normed
        if self.kind == "frequencies":
            angles = torch.outer(torch.arange(x.shape[1]), self.frequencies).repeat(1, 2)
            cos, sin = angles.cos(), angles.sin()
        else:
            cos, sin = self.cos, self.sin
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


class Products(nn.Module):
    """A bilinear layer, as a hidden one or as the last."""

    def __init__(self, scale: float, *, last: bool = False) -> None:
        super().__init__()
        first, second = round(32 * scale), round(48 * scale)
        self.first, self.second = nn.Linear(8, first), nn.Linear(8, second)
        self.products = nn.Bilinear(first, second, 3 if last else round(24 * scale))
        self.head: nn.Module = nn.Identity() if last else nn.Linear(round(24 * scale), 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.products(self.first(x), self.second(x))).mean(1)
        return out


class Fourier(nn.Module):
    """A layer of a Fourier neural operator: complex weights for the lowest frequencies in space."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        width = round(32 * scale)
        self.first, self.local, self.head = nn.Conv1d(8, width, 1), nn.Conv1d(width, width, 1), nn.Conv1d(width, 3, 1)
        self.modes = nn.Parameter(torch.randn(width, width, 3, dtype=torch.cfloat) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.transpose(1, 2))
        low = torch.einsum("bix,iox->box", torch.fft.rfft(x), self.modes)
        out: Tensor = self.head((torch.fft.irfft(low, n=x.shape[-1]) + self.local(x)).relu()).mean(2)
        return out


def _enlarged(mode: str) -> tuple[Callable[[float], nn.Module], Tensor]:
    def build(scale: float) -> nn.Module:
        width = round(64 * scale)
        first, norm, last = nn.Conv2d(3, width, 3), nn.LocalResponseNorm(3), nn.Conv2d(width, 12, 3)
        up = nn.Upsample(scale_factor=1.5, mode=mode)
        return nn.Sequential(first, norm, up, nn.Conv2d(width, width, 3), nn.ReLU(), last, nn.PixelShuffle(2))

    return build, IMAGES


class Padded(nn.Module):
    """Images padded by hand before a convolution."""

    def __init__(self, scale: float, mode: str = "constant") -> None:
        super().__init__()
        width, self.mode = round(32 * scale), mode
        self.first, self.second = nn.Conv2d(3, width, 3), nn.Conv2d(width, width, 3)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(F.pad(self.first(x), (1, 1, 1, 1), mode=self.mode)).mean((2, 3)))
        return out


class Routed(nn.Module):
    """Experts of which each example gets two: by a mask, or by its own rows alone."""

    def __init__(self, scale: float, *, rows: bool, experts: int = 4) -> None:
        super().__init__()
        width, self.rows = round(32 * scale), rows
        self.first, self.gate, self.out = nn.Linear(6, width), nn.Linear(width, experts), nn.Linear(width, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        mixed = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if self.rows:
                row, place = torch.where(chosen == i)
                mixed.index_add_(0, row, expert(x[row]) * weights[row, place, None])
            else:
                mixed = mixed + expert(x) * (weights * (chosen == i)).sum(-1, keepdim=True)
        out: Tensor = self.out(x + mixed)
        return out


class StackedExperts(nn.Module):
    """Experts in one parameter, all of them weighed."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        width = round(32 * scale)
        self.first, self.gate, self.out = nn.Linear(6, width), nn.Linear(width, 4), nn.Linear(width, 3)
        self.up = nn.Parameter(torch.randn(4, width, 2 * width) / 6)
        self.down = nn.Parameter(torch.randn(4, 2 * width, width) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        hidden = torch.einsum("bi,eio->beo", x, self.up).relu()
        mixed = torch.einsum("beo,eoi->bei", hidden, self.down) * self.gate(x).softmax(-1)[..., None]
        out: Tensor = self.out(x + mixed.sum(1))
        return out


class PaddedChannels(nn.Module):
    """A shortcut that pads channels by a number, as the first residual networks for CIFAR do."""

    def __init__(self, *, third: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1)
        self.third = nn.Conv2d(32, 64, 1) if third else nn.Identity()
        self.head = nn.Linear(64 if third else 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.second(x).relu() + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 8, 8))
        out: Tensor = self.head(self.third(x).relu().mean((2, 3)))
        return out


class MixedByFourier(nn.Module):
    """A Fourier transform along the width, whose values grow with it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 32), nn.Linear(32, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + torch.fft.fft2(x).real
        out: Tensor = self.head(self.second(x).relu().mean(1))
        return out


class Bags(nn.Module):
    """Bags of words, of equal length or beginning at offsets."""

    def __init__(self, scale: float, *, offsets: bool) -> None:
        super().__init__()
        width, self.offsets = round(64 * scale), offsets
        self.embedding = nn.EmbeddingBag(20, width, padding_idx=0, include_last_offset=offsets)
        self.body, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        steps = tokens.shape[1]
        bags = (tokens.flatten(), torch.arange(0, tokens.numel() + 1, steps)) if self.offsets else (tokens,)
        out: Tensor = self.head(self.body(self.embedding(*bags)).relu())
        return out


class Latents(nn.Module):
    """Attention from learned queries, whose number no width decides (Jaegle et al. 2021)."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        width = round(64 * scale)
        self.queries, self.first = nn.Parameter(torch.randn(12, width) / 8), nn.Linear(8, width)
        self.attention = nn.MultiheadAttention(width, round(4 * scale), batch_first=True)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.first(x)
        out: Tensor = self.head(self.attention(self.queries.expand(len(x), -1, -1), keys, keys)[0]).mean(1)
        return out


class Maxout(nn.Module):
    """Each unit is the largest of three pieces (Goodfellow et al. 2013), by a quotient or by the width."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.pieces, self.width = 3, round(32 * scale)
        self.first, self.second = nn.Linear(8, 3 * self.width), nn.Linear(self.width, 3 * self.width)
        self.head = nn.Linear(self.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).unflatten(-1, (-1, self.pieces)).amax(-1)
        x = self.second(x).view(*x.shape[:-1], self.pieces, self.width).amax(-2)
        out: Tensor = self.head(x).mean(1)
        return out


class Shuffled(nn.Module):
    """Grouped convolutions, between which channels change their groups (Zhang et al. 2018)."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        width, self.groups = round(64 * scale), 4
        self.stem, self.head = nn.Conv2d(3, width, 3), nn.Linear(width, 3)
        self.first, self.second = (nn.Conv2d(width, width, 1, groups=self.groups) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x)).relu()
        samples, channels, *sizes = x.shape
        grouped = x.view(samples, self.groups, channels // self.groups, *sizes)
        out: Tensor = self.head(self.second(grouped.transpose(1, 2).flatten(1, 2)).mean((2, 3)))
        return out


def _recurrent(kind: type[nn.RNNBase], **settings: Any) -> tuple[Callable[[float], nn.Module], Tensor]:
    return lambda scale: Recurrent(scale, kind, **settings), SERIES


def _grouped_queries(kind: str) -> tuple[Callable[[float], nn.Module], Tensor]:
    return lambda scale: GroupedQueries(scale, kind), TOKENS


def _normed(make: Callable[[float], nn.Module]) -> tuple[Callable[[float], nn.Module], Tensor]:
    """Two convolutions with a norm between them."""

    def model(scale: float) -> nn.Module:
        width = round(64 * scale)
        last = nn.Sequential(nn.Conv2d(width, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(nn.Conv2d(3, width, 3), make(scale), nn.ReLU(), *last)

    return model, IMAGES


def _upsampled(norm: Callable[[nn.Module], nn.Module]) -> tuple[Callable[[float], nn.Module], Tensor]:
    """A transposed convolution whose weight a parametrization computes, as in networks that generate images."""

    def model(scale: float) -> nn.Module:
        width = round(64 * scale)
        up = norm(nn.ConvTranspose2d(width, width // 2, 3, 2, 1, output_padding=1))
        return nn.Sequential(nn.Conv2d(3, width, 3), up, nn.ReLU(), nn.Conv2d(width // 2, 3, 3))

    return model, IMAGES


def _cell(kind: type[nn.RNNCellBase]) -> tuple[Callable[[float], nn.Module], Tensor]:
    return lambda scale: Cell(scale, kind), SERIES


EXACT: dict[str, tuple[Callable[[float], nn.Module], Tensor]] = {
    "rnn": _recurrent(nn.RNN),
    "rnn, relu": _recurrent(nn.RNN, nonlinearity="relu"),
    "gru": _recurrent(nn.GRU),
    "gru, last state": _recurrent(nn.GRU, state=True),
    "gru, two layers, both ways": _recurrent(nn.GRU, state=True, num_layers=2, bidirectional=True),
    "gru, own state": (GivenState, SERIES),
    "lstm": _recurrent(nn.LSTM),
    "lstm, no bias": _recurrent(nn.LSTM, bias=False),
    "lstm, projected": _recurrent(nn.LSTM, proj_size=1),
    "lstm, both ways": _recurrent(nn.LSTM, bidirectional=True),
    "lstm, packed": (Packed, SERIES),
    "rnn cell": _cell(nn.RNNCell),
    "gru cell": _cell(nn.GRUCell),
    "lstm cell": _cell(nn.LSTMCell),
    "transformer": (EncoderDecoder, TOKENS),
    "attention": (CrossAttention, SERIES),
    "attention, other keys": (lambda scale: CrossAttention(scale, 40), SERIES),
    **{f"grouped queries, {kind}": _grouped_queries(kind) for kind in ("tables", "frequencies", "norm")},
    "instance norm": _normed(lambda scale: nn.InstanceNorm2d(round(64 * scale))),
    "instance norm, affine": _normed(lambda scale: nn.InstanceNorm2d(round(64 * scale), affine=True)),
    "group norm, plain": _normed(lambda scale: nn.GroupNorm(round(8 * scale), round(64 * scale), affine=False)),
    "group norm, no bias": _normed(lambda scale: nn.GroupNorm(round(8 * scale), round(64 * scale), bias=False)),
    "nearest": _normed(lambda _: nn.Upsample(scale_factor=2)),
    "interpolated": _normed(lambda _: nn.Upsample((9, 9), mode="bilinear")),
    "transposed, weight norm": _upsampled(weight_norm),
    "folded, local norm": _normed(lambda _: nn.Sequential(nn.Unfold(2), nn.Fold(14, 2), nn.LocalResponseNorm(3))),
    "bilinear": (Products, SERIES),
    "bilinear, last": (lambda scale: Products(scale, last=True), SERIES),
    "fourier operator": (Fourier, SERIES),
    "padded": (Padded, IMAGES),
    **{f"{mode}, pixel shuffle": _enlarged(mode) for mode in ("nearest", "bilinear", "bicubic")},
    "padded by reflection": (lambda scale: Padded(scale, "reflect"), IMAGES),
    "experts, masked": (lambda scale: Routed(scale, rows=False), ROWS),
    "experts, own rows": (lambda scale: Routed(scale, rows=True), ROWS),
    "experts, eight": (lambda scale: Routed(scale, rows=True, experts=8), ROWS),
    "experts, stacked": (StackedExperts, ROWS),
    "latents": (Latents, SERIES),
    "maxout": (Maxout, SERIES),
    "shuffled channels": (Shuffled, IMAGES),
    "bags": (lambda scale: Bags(scale, offsets=False), TOKENS),
    "bags, offsets": (lambda scale: Bags(scale, offsets=True), TOKENS),
}
"""Name -> the model and a batch. The narrow model has the sizes of its twin."""
