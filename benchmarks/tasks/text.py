"""Tasks on text: characters of tiny shakespeare, for transformers and an LSTM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from benchmarks.tasks.task import GPU_TRIALS, Task, held, sizes
from benchmarks.transfer_tasks import CharTransformer, shakespeare_tokens, windows


def shakespeare(data: Path, reduced: bool) -> Task:
    """Characters of tiny shakespeare in windows of 32; a transformer of 4 layers, 128 wide, heads of 16."""
    tokens, vocabulary = shakespeare_tokens(data)
    return Task(
        name="shakespeare",
        model_fn=lambda config, ratio: CharTransformer(vocabulary, int(128 * ratio), layers=4),
        kind="token",
        train=windows(tokens, 0, 300 if reduced else 1000),
        held=held(windows(tokens, 1_000_000, 100), windows(tokens, 1_050_000, 100)),
        batch_sizes=(16, 32),
        **sizes(reduced, 64),
    )


def shakespeare_gpt(data: Path, reduced: bool) -> Task:
    """The first million characters of tiny shakespeare; a transformer of 6 layers, 384 wide, heads of 16."""
    tokens, vocabulary = shakespeare_tokens(data)
    return replace(
        shakespeare(data, reduced),
        name="shakespeare_gpt",
        model_fn=lambda config, ratio: CharTransformer(vocabulary, int(384 * ratio), layers=6),
        train=windows(tokens, 0, 1000 if reduced else 31_250),
        held=held(windows(tokens, 1_000_000, 1000), windows(tokens, 1_050_000, 1000)),
        batch_sizes=(64, 128),
        num_samples=12 if reduced else GPU_TRIALS,
        device="cuda",
    )


def recurrent(data: Path, reduced: bool) -> Task:
    """Characters of tiny shakespeare in windows of 32, an LSTM 128 wide; 1,000 windows to train on."""
    tokens, vocabulary = shakespeare_tokens(data)
    return replace(
        shakespeare(data, reduced),
        name="recurrent",
        model_fn=lambda config, ratio: CharLSTM(vocabulary, int(128 * ratio)),
        train=windows(tokens, 0, 1000),
        num_samples=48,
    )


def gated_recurrent(data: Path, reduced: bool) -> Task:
    """Characters of tiny shakespeare in windows of 32, a GRU 192 wide; 500 windows to train on."""
    tokens, vocabulary = shakespeare_tokens(data)
    return replace(
        recurrent(data, reduced),
        name="gated_recurrent",
        model_fn=lambda config, ratio: CharLSTM(vocabulary, int(192 * ratio), cell=nn.GRU),
        train=windows(tokens, 0, 500),
        choices={"schedule": ["constant", "cosine", "linear"]},
    )


def two_layers(data: Path, reduced: bool) -> Task:
    """The same as `gated_recurrent`, with an LSTM of two layers, 96 wide."""
    _, vocabulary = shakespeare_tokens(data)
    return replace(
        gated_recurrent(data, reduced),
        name="two_layers",
        model_fn=lambda config, ratio: CharLSTM(vocabulary, int(96 * ratio), layers=2),
    )


def wide_transformer(data: Path, reduced: bool) -> Task:
    """Characters of tiny shakespeare in windows of 32; a transformer of 4 layers, 512 wide, heads of 64."""
    tokens, vocabulary = shakespeare_tokens(data)
    return replace(
        gated_recurrent(data, reduced),
        name="wide_transformer",
        model_fn=lambda config, ratio: CharTransformer(vocabulary, int(512 * ratio), layers=4, head=64),
        train=windows(tokens, 0, 300 if reduced else 1000),
        lr=(1e-4, 1e-2),
    )


def wide_lstm(data: Path, reduced: bool) -> Task:
    """The same as `wide_transformer`, with an LSTM of two layers, 768 wide."""
    _, vocabulary = shakespeare_tokens(data)
    return replace(
        wide_transformer(data, reduced),
        name="wide_lstm",
        model_fn=lambda config, ratio: CharLSTM(vocabulary, int(768 * ratio), layers=2),
        lr=(1e-4, 1e-1),
    )


class CharLSTM(nn.Module):
    """A recurrent language model over characters: tokens [N, T] -> logits [N, T, vocabulary]."""

    def __init__(
        self, vocabulary: int, width: int, layers: int = 1, cell: type[nn.LSTM] | type[nn.GRU] = nn.LSTM
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = cell(width, width, num_layers=layers, batch_first=True)
        self.readout = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next character at each position."""
        hidden, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.readout(hidden)
        return logits
