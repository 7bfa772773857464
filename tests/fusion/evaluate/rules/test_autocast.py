"""Under autocast, members compute in the precision in which each computes alone."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion import dry_run, fuse
from fusion.evaluate.rules import folded
from fusion.streams import Streams

K = 3
Function = Callable[[Tensor, Tensor], Tensor]
FUNCTIONS: dict[str, Function] = {
    "cross-entropy": lambda x, y: F.cross_entropy(x, y.softmax(1)),
    "binary": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "kl": lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
    "hinge": lambda x, y: F.hinge_embedding_loss(x, y.sign()),
    "ranking": lambda x, y: F.margin_ranking_loss(x, y, y.sign()),
    "triplet": lambda x, y: F.triplet_margin_loss(x, y, y.flip(0)),
    "nll": lambda x, y: F.nll_loss(x, y.argmax(1)),
    "prelu": lambda x, y: F.prelu(x, y[0].float()),
    "convolution": lambda x, y: F.conv1d(x[:, None], y[:, None].float(), torch.zeros(4)),
    "convolution of a shared weight": lambda x, y: F.conv1d(x[:, None], torch.ones(2, 1, 3), torch.zeros(2)),
    "transposed": lambda x, y: F.conv_transpose2d(x[None, None], torch.ones(1, 2, 3, 3), torch.zeros(2)),
    "distances": lambda x, y: torch.cdist(x, y),
    "fourier": lambda x, y: torch.fft.rfft(x).abs() + torch.fft.ifft2(y).real[:, :4],
    "bilinear": lambda x, y: F.bilinear(x.float(), y.float(), torch.ones(2, 6, 6)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_has_its_precision_and_values(name: str) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(K, 4, 6, dtype=torch.bfloat16) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        alone = torch.stack([FUNCTIONS[name](*pair) for pair in zip(x, y)])
        with folded(Streams(K)):
            together = torch.func.vmap(FUNCTIONS[name])(x, y)
    # On a CPU, torch rounds the products inside of a bilinear function to bfloat16.
    rtol, atol = (0.01, 0.05) if name == "bilinear" else (None, None)
    torch.testing.assert_close(together, alone, rtol=rtol, atol=atol)


def test_members_train_through_layers_that_they_share() -> None:
    """Without autocast's casts, these layers would get an input in bfloat16 and weights in float32."""
    models = [nn.Sequential(nn.Conv1d(2, 4, 3), nn.PReLU(), nn.Conv1d(4, 4, 3), nn.PReLU(4)) for _ in range(K)]
    for model in models:
        model[2].load_state_dict(models[0][2].state_dict())
        model[2].requires_grad_(False)
    fused = fuse(models)
    assert "2.weight" in fused.shared

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = model(x)
        return out.float().square().mean()

    x = torch.randn(5, 2, 9)
    assert dry_run(fused, loss, x) is None
    loss_K = fused.map(loss, x)
    loss_K.sum().backward()
    close = partial(torch.testing.assert_close, rtol=0.05, atol=0.01)
    for k, model in enumerate(models):
        alone = loss(model, x)
        alone.backward()
        close(loss_K[k], alone)
        for name, p in model.named_parameters():
            if p.requires_grad:
                grad_K = fused.stacked[name].grad
                assert grad_K is not None
                close(grad_K[k], p.grad)
