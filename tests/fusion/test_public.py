"""The names that the package promises."""

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
