"""Models that take no width ratio, for `shrink`: each writes down its sizes in another way."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short: nn.Module = nn.Identity()
        if stride > 1:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu())) + self.short(x)
        return out.relu()


def resnet18(base: int = 64) -> nn.Module:
    """ResNet-18 for small images: 11 million parameters at base 64."""
    widths = [base, base, 2 * base, 2 * base, 4 * base, 4 * base, 8 * base, 8 * base]
    strides = [1, 1, 2, 1, 2, 1, 2, 1]
    blocks = [Residual(i, o, s) for i, o, s in zip([base, *widths], widths, strides)]
    stem = [nn.Conv2d(3, base, 3, 1, 1, bias=False), nn.BatchNorm2d(base), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * base, 10))


class Concatenated(nn.Module):
    """Two branches of different widths, concatenated, then flattened before a linear layer; 3x8x8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 16, 3, padding=1)
        self.right = nn.Conv2d(16, 24, 1)
        self.norm = nn.GroupNorm(10, 40)
        self.hidden = nn.Linear(40 * 64, 20)
        self.scale = nn.Parameter(torch.ones(20))
        self.readout = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x).relu()
        both = self.norm(torch.cat([left, self.right(left)], dim=1))
        out: Tensor = self.readout(self.hidden(both.flatten(1)) * self.scale)
        return out


class SplitAttention(nn.Module):
    """A causal language model that keeps its width and its number of heads in attributes."""

    def __init__(self, width: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.n_head, self.n_embd = heads, width
        self.embedding = nn.Embedding(20, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.readout = nn.Linear(width, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.n_head, width // self.n_head).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(self.n_embd, dim=2)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.readout(x + self.out(mixed.transpose(1, 2).reshape(batch, time, width)))
        return out


class HeadDimAttention(SplitAttention):
    """The same, with the size of a head in an attribute and the mask in a buffer."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = self.n_embd // self.n_head
        self.register_buffer("mask", torch.ones(8, 8).tril())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        batch, time, _ = x.shape
        q, k, v = (
            part.view(batch, time, self.n_head, self.head_dim).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=2)
        )
        logits = (q @ k.transpose(-1, -2)) * self.head_dim**-0.5
        weights = logits.masked_fill(self.mask[:time, :time] == 0, float("-inf")).softmax(-1)
        out: Tensor = self.readout(x + self.out((weights @ v).transpose(1, 2).reshape(batch, time, -1)))
        return out


class Literal(nn.Module):
    """One width is a number in the forward pass, another is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.second = nn.Linear(32, 16)
        self.readout = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.readout(self.second(self.first(x).view(-1, 32)).relu())
        return out


class SizedAttention(nn.Module):
    """Attention that states all of its sizes, as timm's does."""

    def __init__(self, width: int, heads: int, states: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.states = heads, width // heads, states
        if states:
            self.attn_dim = self.num_heads * self.head_dim
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, time, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2)
        out: Tensor = self.proj(mixed.reshape(batch, time, self.attn_dim if self.states else width))
        return out


class VisionTransformer(nn.Module):
    """One block over patches, written like timm's; 3x16x16 images."""

    def __init__(self, width: int, heads: int, patch: int, states: bool) -> None:
        super().__init__()
        self.num_features = self.embed_dim = width
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, (16 // patch) ** 2 + 1, width) * 0.02)
        self.norm, self.attention = nn.LayerNorm(width), SizedAttention(width, heads, states)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        x = x + self.attention(self.norm(x))
        out: Tensor = self.head((x + self.second(self.first(x).relu()))[:, 0])
        return out


class Experts(nn.Module):
    """A mixture of four experts, all of them weighed, or two for each example."""

    def __init__(self, routed: bool) -> None:
        super().__init__()
        self.routed = routed
        self.first, self.gate, self.out = nn.Linear(6, 32), nn.Linear(32, 4), nn.Linear(32, 3)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        mixed = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            of_expert = (weights * (chosen == i)).sum(-1, keepdim=True) if self.routed else self.gate(x)[:, i, None]
            mixed = mixed + of_expert * expert(x)
        out: Tensor = self.out(x + mixed)
        return out


class Windows(nn.Module):
    """Attention within windows of a picture of 8 x 8, with a learned bias for each pair of places, as in Swin."""

    index: Tensor

    def __init__(self, scale: float = 1.0, window: int = 4) -> None:
        super().__init__()
        width, self.heads, self.window = round(64 * scale), round(8 * scale), window
        self.first, self.head = nn.Linear(3, width), nn.Linear(width, 2)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, self.heads))
        places = torch.cartesian_prod(torch.arange(window), torch.arange(window))
        apart = (places[:, None] - places[None] + window - 1) * torch.tensor([2 * window - 1, 1])
        self.register_buffer("index", apart.sum(-1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        batch, height, width, channels = x.shape
        x = x.view(batch, height // self.window, self.window, width // self.window, self.window, channels)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window * self.window, channels)
        qkv = self.qkv(x).view(*x.shape[:2], 3, self.heads, channels // self.heads).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(*self.index.shape, -1).permute(2, 0, 1)
        weights = (qkv[0] @ qkv[1].mT / (channels // self.heads) ** 0.5 + bias).softmax(-1)
        x = x + self.proj((weights @ qkv[2]).transpose(1, 2).reshape(x.shape))
        out: Tensor = self.head(x.reshape(batch, height * width, channels).mean(1))
        return out


class Decoder(nn.Module):
    """Numbers of channels stand in its forward pass, as those of many an autoencoder do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.code = nn.Linear(6, 32), nn.Linear(32, 8)
        self.spread, self.deconv = nn.Linear(8, 64), nn.ConvTranspose2d(16, 24, 2, 2)
        self.last = nn.Conv2d(24, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.spread(self.code(self.encoder(x).relu())).view(-1, 16, 2, 2)
        out: Tensor = self.last(self.deconv(x).relu())
        return out


class Codebook(nn.Module):
    """The nearest of 12 codes, which are a buffer."""

    codes: Tensor

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width, self.number = width, 12
        self.register_buffer("codes", torch.randn(width, 12))

    def forward(self, x: Tensor) -> Tensor:
        nearest = (x.reshape(-1, self.width) @ self.codes).argmax(1)
        chosen = nn.functional.one_hot(nearest, self.number).type_as(x) @ self.codes.T
        return x + (chosen.view(x.shape) - x).detach()
