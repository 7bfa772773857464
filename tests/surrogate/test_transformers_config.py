from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from surrogate import make_surrogate, shrink
from surrogate.output_sizes import output_shapes
from surrogate.roles_and_multipliers import width_plan
from surrogate.transformers_config import narrow_by_config, narrow_config
from surrogate.widths import shapes_of

TOKENS = torch.randint(100, (2, 8))
IMAGES = torch.randn(2, 3, 32, 32)
COMMON = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}


def build(name: str) -> tuple[nn.Module, Tensor]:
    t = transformers
    if name == "gpt2":
        sizes = {"vocab_size": 100, "n_positions": 32, "n_embd": 128, "n_layer": 2, "n_head": 8}
        return t.GPT2LMHeadModel(t.GPT2Config(bos_token_id=0, eos_token_id=1, **sizes)), TOKENS
    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(vocab_size=100, num_key_value_heads=4, **COMMON)), TOKENS
    if name == "bert":
        return t.BertForSequenceClassification(t.BertConfig(vocab_size=100, **COMMON)), TOKENS
    if name == "vit":
        return t.ViTForImageClassification(t.ViTConfig(image_size=32, patch_size=8, **COMMON)), IMAGES
    config = t.ResNetConfig(embedding_size=64, hidden_sizes=[64, 128], depths=[1, 1], layer_type="basic")
    return t.ResNetForImageClassification(config), IMAGES


READOUTS = {"gpt2": "lm_head", "llama": "lm_head", "bert": "classifier", "vit": "classifier", "resnet": "classifier.1"}


@pytest.mark.parametrize("name", READOUTS)
def test_each_family_at_a_quarter_of_its_width(name: str) -> None:
    model, batch = build(name)
    narrow = shrink(model, 1 / 4, batch)
    assert width_plan(narrow).readouts == {READOUTS[name]: 4.0}
    assert width_plan(narrow).rounded == ()
    assert width_plan(narrow).attention == {}
    assert output_shapes(narrow(batch).logits) == output_shapes(model(batch).logits)


def build_of_parts(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Models of two parts: an encoder and a decoder, or one for text and one for images."""
    t, labels = transformers, torch.randint(3, 99, (2, 6))
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    both = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    sizes = {"vocab_size": 99, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "scale_embedding": True}
    if name == "t5":
        own = {"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4}
        config: Any = t.T5Config(**own, decoder_start_token_id=0)
        return t.T5ForConditionalGeneration(config), {"input_ids": labels, "labels": labels}
    if name == "bart":
        config = t.BartConfig(max_position_embeddings=32, **sizes, **both, **special)
        return t.BartForConditionalGeneration(config), {"input_ids": labels, "labels": labels}
    if name == "whisper":
        config = t.WhisperConfig(
            num_mel_bins=8, max_source_positions=8, max_target_positions=8, **sizes, **both, **special
        )
        return t.WhisperForConditionalGeneration(config), {"input_features": torch.randn(2, 8, 16), "labels": labels}
    part = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {**part, "vocab_size": 99, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2}
    config = t.CLIPConfig(
        text_config=text, vision_config={**part, "image_size": 32, "patch_size": 8}, projection_dim=32
    )
    return t.CLIPModel(config), {"input_ids": labels, "pixel_values": IMAGES, "return_loss": True}


PARTS = {
    "t5": {"lm_head": 4.0},
    "bart": {"lm_head": 4.0},
    "whisper": {"proj_out": 4.0},
    "clip": {"visual_projection": 4.0, "text_projection": 4.0},
}


@pytest.mark.parametrize("name", PARTS)
def test_models_of_two_parts_at_a_quarter_of_their_width(name: str) -> None:
    model, batch = build_of_parts(name)
    plan = width_plan(shrink(model, 1 / 4, batch))
    assert plan.readouts == PARTS[name]
    # Each parameter is narrower but the temperature of CLIP.
    assert {*plan.params} - {*plan.narrower} <= {"logit_scale"}


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_factors_of_the_forward_pass_are_the_targets(name: str) -> None:
    """Roots of the hidden size: muP's multipliers are relative to the target's."""
    model, batch = build_of_parts(name)
    narrow: Any = shrink(model, 1 / 4, batch)
    if name == "bart":
        assert narrow.model.shared.embed_scale == 8.0
    else:
        assert narrow.model_dim == 64


def test_swin_has_fewer_heads_in_each_stage() -> None:
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=4
    )
    narrow: Any = shrink(transformers.SwinForImageClassification(config), 1 / 2, IMAGES)
    assert narrow.config.num_heads == [1, 2]
    assert {*width_plan(narrow).params} - {*width_plan(narrow).narrower} == {"classifier.bias"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "resnet"])
def test_following_sizes_agrees_with_the_configuration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build(name)
    by_config = shapes_of(shrink(model, 1 / 4, batch))
    monkeypatch.setattr(importlib.import_module("surrogate.shrink"), "narrow_by_config", lambda *_: None)
    assert shapes_of(shrink(model, 1 / 4, batch)) == by_config


def test_a_wrapper_that_shows_its_models_configuration_is_followed_instead() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.config: Any = inner.config

        def forward(self, images: Tensor) -> Any:
            return self.inner(images).logits

    model, batch = build("resnet")
    narrow = shrink(Wrapper(model), 1 / 4, batch)
    assert width_plan(narrow).readouts == {"inner.classifier.1": 4.0}


def test_modes_frozen_parameters_and_their_marks_are_the_targets() -> None:
    model: Any = build("gpt2")[0]
    model.transformer.h[0].eval()
    model.transformer.wte.weight.requires_grad_(False)
    model.transformer.wpe.weight.use_muon = False
    narrow: Any = shrink(model, 1 / 4, TOKENS)
    assert [part.training for part in narrow.modules()] == [part.training for part in model.modules()]
    assert [name for name, p in narrow.named_parameters() if not p.requires_grad] == ["transformer.wte.weight"]
    assert narrow.transformer.wpe.weight.use_muon is False


def test_a_model_with_another_part_than_its_configuration_makes_is_followed_instead() -> None:
    model: Any = build("gpt2")[0]
    model.transformer.drop = nn.Identity()
    assert narrow_by_config(model, 1 / 4) is None


def test_a_model_with_a_layer_of_a_size_of_its_own_is_followed_instead() -> None:
    class Tagger(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config, self.tags = config, nn.Linear(32, 5)
            self.bert: Any = transformers.BertModel(config, add_pooling_layer=False)

        def forward(self, tokens: Tensor) -> Any:
            return self.tags(self.bert(tokens).last_hidden_state)

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    narrow = shrink(Tagger(transformers.BertConfig(vocab_size=100, **sizes)), 1 / 4, TOKENS)
    assert narrow.get_parameter("tags.weight").shape == (5, 8)
    assert width_plan(narrow).readouts == {"tags": 4.0}


def test_head_size_stays_and_heads_are_rounded_up() -> None:
    narrow: Any = narrow_config(transformers.GPT2Config(), 1 / 8)
    assert (narrow.num_attention_heads, narrow.hidden_size) == (2, 128)  # 12 heads of 64: 1.5 become 2


def test_key_value_heads_divide_the_heads() -> None:
    config = transformers.LlamaConfig(hidden_size=768, num_attention_heads=24, num_key_value_heads=8)
    narrow: Any = narrow_config(config, 1 / 4)
    assert (narrow.num_attention_heads, narrow.num_key_value_heads) == (6, 2)


def test_sizes_of_experts_and_of_poolers_follow_the_hidden_size() -> None:
    own = {"num_key_value_heads": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
    experts: Any = narrow_config(transformers.Qwen2MoeConfig(**COMMON, **own), 1 / 4)
    assert (experts.moe_intermediate_size, experts.shared_expert_intermediate_size) == (16, 24)
    model = transformers.DebertaV2ForSequenceClassification(transformers.DebertaV2Config(vocab_size=100, **COMMON))
    assert width_plan(shrink(model, 1 / 4, TOKENS)).readouts == {"classifier": 4.0}


@pytest.mark.slow
def test_gpt2_as_published() -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    narrow = shrink(model, 1 / 8, TOKENS)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    assert narrow.get_parameter("transformer.wte.weight").shape == (50257, 128)
    assert width_plan(narrow).readouts == {"lm_head": 6.0}


def gpt2(config: dict[str, Any], width_ratio: float) -> nn.Module:
    sizes = {"vocab_size": 100, "n_positions": 32, "n_embd": int(256 * width_ratio), "n_layer": 1}
    heads = int(16 * width_ratio)
    model: nn.Module = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(bos_token_id=0, eos_token_id=1, n_head=heads, **sizes)
    )
    return model


def test_gpt2_starts_at_the_same_scale_at_any_width_which_mup_corrects() -> None:
    """Hidden weights: the target's / sqrt(1/4), though GPT-2's own initializer ignores the fan-in."""
    torch.manual_seed(0)
    narrow = dict(make_surrogate(gpt2, {}, 1 / 4, example_input=TOKENS).named_parameters())
    wide = dict(gpt2({}, 1.0).named_parameters())
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        key = f"transformer.h.0.{name}.weight"
        assert narrow[key].std().item() / wide[key].std().item() == pytest.approx(2.0, rel=0.05)
    key = "transformer.wte.weight"
    assert narrow[key].std().item() / wide[key].std().item() == pytest.approx(1.0, rel=0.05)
