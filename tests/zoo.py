"""A zoo of small models, each with a batch and an objective, for tests that must hold for every kind of module."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 5

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
"""Devices on which fused models are compared with separate ones."""


@dataclass(frozen=True)
class Case:
    """One kind of model.

    Attributes:
        name: Part of the test's name.
        build: Makes the model, with weights from torch's global random state.
        batch: Makes (input, target) from a seed.
        objective: Returns the loss of one model on one batch.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    objective: Callable[[Any, tuple[Tensor, Tensor]], Tensor]


def classify(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of a model's logits, which are its output or the output's `.logits`."""
    out = model(batch[0])
    return F.cross_entropy(getattr(out, "logits", out), batch[1])


def next_token(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of a causal language model."""
    logits = model(input_ids=batch[0], use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())


def vectors(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(6, 8, generator=g), torch.randint(CLASSES, (6,), generator=g)


def images(seed: int, channels: int = 3, size: int = 8) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(6, channels, size, size, generator=g), torch.randint(CLASSES, (6,), generator=g)


def sequences(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, 8, generator=g), torch.randint(CLASSES, (4,), generator=g)


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(11, (3, 7), generator=g), torch.randint(CLASSES, (3,), generator=g)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, CLASSES))


def convolution(*middle: nn.Module) -> nn.Module:
    """Build a convolution, `middle` with four channels in and out, and a linear head."""
    head = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES))
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(inplace=True), *middle, *head)


def batch_norm() -> nn.Module:
    return convolution(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=0.3), nn.MaxPool2d(2))


def norms() -> nn.Module:
    return convolution(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1), nn.InstanceNorm2d(4, affine=True), nn.GELU())


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x), inplace=True)


def resnet18(width: int = 4) -> nn.Module:
    """Build a ResNet-18 for CIFAR; the original has a `width` of 64."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    channels = width
    for stage in range(4):
        for block in range(2):
            stride = 2 if stage and not block else 1
            layers.append(BasicBlock(channels, width * 2**stage, stride))
            channels = width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def transformer_encoder(norm_first: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(48, CLASSES))


class SelfAttention(nn.Module):
    """Two layers of `nn.MultiheadAttention`: one has a mask, and the weights of the other enter the output."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.weighed = nn.MultiheadAttention(8, 4, batch_first=True, add_bias_kv=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        h, _ = self.attention(x, x, x, attn_mask=causal, need_weights=False)
        h, weights = self.weighed(h, h, h)
        logits: Tensor = self.head(h.mean(1) + weights.mean())
        return logits


class Recurrent(nn.Module):
    """A recurrent layer over [N, T, 8], then a head on the last state."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(layer.hidden_size * (2 if layer.bidirectional else 1), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.layer(x)
        logits: Tensor = self.head(out[:, -1])
        return logits


class Tied(nn.Module):
    """A small language model whose output layer has the embedding's weight. The embedding has a `padding_idx`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.mix(self.embed(x))))
        return logits


def tied_loss(model: Tied, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0])[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())


class Peculiar(nn.Module):
    """A module with frozen, unused and scalar parameters, counters and averages, and a method besides `forward`."""

    count: Tensor
    average: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(8, CLASSES)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("scale", torch.linspace(1, 2, 8), persistent=False)

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(self.frozen(x)) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        h = self.encode(x)
        if self.training:
            self.count += 1
            self.average = torch.lerp(self.average, h.detach().mean(0), 0.1)
        logits: Tensor = self.head(h - self.average) / self.temperature
        return logits


class Seq2Seq(nn.Module):
    """`nn.Transformer`, encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.transformer(x, x.flip(1)).mean(1))
        return logits


class Loose(nn.Module):
    """A module with parameters in lists and dicts, reductions, sorting, and writes into slices."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(8, CLASSES) / 3])
        self.biases = nn.ParameterDict({"out": torch.zeros(CLASSES)})

    def forward(self, x: Tensor) -> Tensor:
        w = self.weights[0]
        logits: Tensor = torch.einsum("ni,io->no", x, w) + w.sort(0).values[0] + torch.linalg.norm(w)
        logits = logits + self.biases["out"]
        logits[:, 0] = 2 * logits[:, 1]
        return logits


def parametrized() -> nn.Module:
    hidden = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley")
    return nn.Sequential(hidden, nn.PReLU(8), nn.LayerNorm(8), nn.Linear(8, 16), nn.GLU(), nn.Linear(8, CLASSES))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: nn.Module = BertForSequenceClassification(config)
    return model


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: nn.Module = ViTForImageClassification(config)
    return model


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=CLASSES)
    model: nn.Module = ResNetForImageClassification(config)
    return model


CASES = [
    Case("mlp", mlp, vectors, classify),
    Case("batch-norm", batch_norm, images, classify),
    Case("group-norm", norms, images, classify),
    Case("depthwise", lambda: convolution(nn.Conv2d(4, 8, 3, groups=4), nn.Conv2d(8, 4, 1)), images, classify),
    Case("transposed", lambda: convolution(nn.ConvTranspose2d(4, 4, 3, 2, 1, 1)), images, classify),
    Case("dilated", lambda: convolution(nn.Conv2d(4, 4, 3, dilation=2, stride=1)), images, classify),
    Case("padding-same", lambda: convolution(nn.Conv2d(4, 4, (3, 5), padding="same")), images, classify),
    Case("reflect", lambda: convolution(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")), images, classify),
    Case(
        "conv1d", lambda: nn.Sequential(nn.Conv1d(6, 4, 3), nn.Flatten(), nn.Linear(24, CLASSES)), sequences, classify
    ),
    Case("resnet18", resnet18, images, classify),
    Case("transformer", transformer_encoder, sequences, classify),
    Case("transformer-norm-first", lambda: transformer_encoder(norm_first=True), sequences, classify),
    Case("attention", SelfAttention, sequences, classify),
    Case("lstm", lambda: Recurrent(nn.LSTM(8, 5, 2, batch_first=True)), sequences, classify),
    Case(
        "lstm-bidirectional",
        lambda: Recurrent(nn.LSTM(8, 4, bidirectional=True, batch_first=True)),
        sequences,
        classify,
    ),
    Case("gru", lambda: Recurrent(nn.GRU(8, 5, batch_first=True)), sequences, classify),
    Case("rnn", lambda: Recurrent(nn.RNN(8, 5, batch_first=True)), sequences, classify),
    Case("seq2seq", Seq2Seq, sequences, classify),
    Case("parametrized", parametrized, vectors, classify),
    Case("loose", Loose, vectors, classify),
    Case("tied", Tied, tokens, tied_loss),
    Case("peculiar", Peculiar, vectors, classify),
    Case("gpt2", gpt2, tokens, next_token),
    Case("llama", llama, tokens, next_token),
    Case("bert", bert, tokens, classify),
    Case("vit", vit, images, classify),
    Case("resnet-hf", resnet, images, classify),
]
