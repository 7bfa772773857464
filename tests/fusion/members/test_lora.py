"""K LoRA adapters over one frozen base: equal to K separate runs, at the memory of one base."""

import copy
import functools
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion import dry_run, fuse, pad_lora, trim_lora
from tests.fusion.training import Both, assert_same_states
from tests.zoo import gpt2

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")

CONFIGS: list[dict[str, Any]] = [
    {"optimizer": "adamw", "lr": 0.02, "weight_decay": 0.1},
    {"optimizer": "adam", "lr": 0.01},
    {"optimizer": "sgd", "lr": 0.5, "momentum": 0.9, "weight_decay": 0.01},
]
close = functools.partial(torch.testing.assert_close, rtol=1e-7, atol=1e-9)


@pytest.fixture(scope="module")
def base() -> nn.Module:
    torch.manual_seed(0)
    return gpt2().double()


def adapted(base: nn.Module, rank: int, alpha: int, dropout: float = 0.0) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(rank * 100 + alpha)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True
    )
    model = get_peft_model(copy.deepcopy(base), config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return model.double()


def tokens(seed: int) -> Tensor:
    return torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(seed))


def loss(model: Any, x: Tensor) -> Tensor:
    logits = model(input_ids=x, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def train_both(models: list[Any], fused: Any) -> None:
    both = Both(fused, models, CONFIGS, loss)
    for step in range(4):
        both.step(tokens(step), close=close)


def test_equal_ranks_and_different_alphas(base: nn.Module) -> None:
    models = [adapted(base, 2, alpha) for alpha in (2, 4, 16)]
    fused = fuse(models)
    assert dry_run(fused, loss, tokens(0)) is None
    train_both(models, fused)
    assert_same_states(fused, models, close)


def test_unequal_ranks_by_padding(base: nn.Module) -> None:
    models = [adapted(base, rank, 8) for rank in (1, 4, 2)]
    with pytest.raises(ValueError, match="lora_A"):
        fuse(models)
    fused = fuse(pad_lora(models))
    train_both(models, fused)
    for k, model in enumerate(models):
        padded = fused.unfuse(k)
        for name, p in padded.named_parameters():
            if "lora_A" in name:
                assert p.shape[0] == 4
                assert not p[model.peft_config["default"].r :].any()
            if "lora_B" in name:
                assert not p[:, model.peft_config["default"].r :].any()
        close(dict(trim_lora(padded).state_dict()), dict(model.state_dict()))


def test_unequal_ranks_of_convolutions() -> None:
    def convolution(rank: int) -> Any:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(rank)
        base = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 3)))
        config = LoraConfig(r=rank, target_modules=["conv"], init_lora_weights=False)
        return get_peft_model(base, config).double()

    models, x = [convolution(rank) for rank in (2, 4)], torch.randn(2, 3, 5, 5, dtype=torch.float64)
    fused = fuse(pad_lora(models))
    close(fused(x), torch.stack([model(x) for model in models]))
    trimmed: Any = trim_lora(fused.unfuse(0))
    close(dict(trimmed.state_dict()), dict(models[0].state_dict()))
    layer = trimmed.base_model.model.conv
    assert (layer.lora_A["default"].out_channels, layer.lora_B["default"].in_channels) == (2, 2)


def test_different_dropouts_zero_included(base: nn.Module) -> None:
    models = [adapted(base, 2, 8, dropout) for dropout in (0.0, 0.3, 0.6)]
    fused = fuse(pad_lora(models))
    assert all(values.tolist() == [0.0, 0.3, 0.6] for values in fused.settings.values())
    assert len(fused.settings) == 4
    loss_K = fused.map(loss, tokens(0))
    close(loss_K[0].detach(), loss(models[0], tokens(0)).detach())
    fused.eval()
    loss_K = fused.map(loss, tokens(0))
    for k, model in enumerate(models):
        close(loss_K[k].detach(), loss(model.eval(), tokens(0)).detach())


def test_memory_is_one_base_and_the_adapters(base: nn.Module) -> None:
    models = [adapted(base, 2, 8) for _ in range(5)]
    fused = fuse(models)
    frozen = sum(p.nbytes for p in models[0].parameters() if not p.requires_grad)
    adapter = sum(p.nbytes for p in models[0].parameters() if p.requires_grad)
    constants = sum(b.nbytes for b in models[0].buffers())
    held = sum(tensor.nbytes for tensor in (*fused.parameters(), *fused.buffers()))
    assert held == frozen + constants + 5 * adapter
    assert frozen == sum(p.nbytes for p in base.parameters())


def test_the_base_is_computed_once_up_to_the_first_adapter(base: nn.Module) -> None:
    fused = fuse([adapted(base, 2, 8) for _ in range(3)])

    def batched(model: Any, x: Tensor) -> Tensor:
        block = model.base_model.model.transformer
        embedded = block.wte(x)
        first = block.h[0].ln_1(embedded)
        assert not torch._C._functorch.is_batchedtensor(first)
        out: Tensor = block.h[0].attn.c_attn(first)
        assert torch._C._functorch.is_batchedtensor(out)
        return out.sum()

    assert fused.map(batched, tokens(0)).shape == (3,)


def test_pad_lora_shares_the_base_and_leaves_the_originals(base: nn.Module) -> None:
    models = [adapted(base, rank, 8) for rank in (1, 3)]
    padded = pad_lora(models)
    ours, theirs = dict(padded[0].named_parameters()), dict(models[0].named_parameters())
    assert all(ours[name] is p for name, p in theirs.items() if not p.requires_grad)
    assert any(ours[name].shape != p.shape for name, p in theirs.items())
    close(loss(padded[0], tokens(1)).detach(), loss(models[0], tokens(1)).detach())


def test_errors(base: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"`modules\[1\]` has LoRA adapters in other places"):
        pad_lora([adapted(base, 1, 8), base])
