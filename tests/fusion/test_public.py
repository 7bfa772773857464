"""The names that the package promises."""

import pytest

import fusion


def test_public_names() -> None:
    assert fusion.__all__ == [
        "FusedModel",
        "FusedOptimizer",
        "FusionMismatch",
        "FusionWarning",
        "GraphedStep",
        "LossScale",
        "clip_grad_norm_",
        "dry_run",
        "fuse",
        "fused_optimizer",
        "fusion_key",
        "lr_factor",
        "pad_lora",
        "plan_fusion",
        "trim_lora",
    ]
    assert all(hasattr(fusion, name) for name in fusion.__all__)
    assert len(fusion.__all__) == 15


@pytest.mark.parametrize("old", fusion._MOVED)
def test_a_name_that_has_moved_says_where(old: str) -> None:
    with pytest.raises(ImportError, match=f"`fusion.{old}` has moved. Write: from fusion") as raised:
        exec(f"from fusion import {old}")
    exec(str(raised.value).rpartition("Write: ")[2])
    with pytest.raises(AttributeError, match="module 'fusion' has no attribute 'tuna'"):
        getattr(fusion, "tuna")  # noqa: B009
