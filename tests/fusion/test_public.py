"""The names that the package promises."""

import fusion


def test_public_names() -> None:
    assert fusion.__all__ == [
        "OPTIMIZERS",
        "SCHEDULES",
        "FusedAdam",
        "FusedAdamW",
        "FusedModel",
        "FusedOptimizer",
        "FusedSGD",
        "FusionMismatch",
        "FusionPlan",
        "FusionWarning",
        "GraphWarning",
        "GraphedStep",
        "LossScale",
        "Obstacle",
        "OutOfMemoryGuard",
        "clip_grad_norm_",
        "dry_run",
        "fuse",
        "fused_optimizer",
        "fusion_key",
        "keep_freed_memory",
        "lr_factor",
        "optimizer",
        "pad_lora",
        "plan_fusion",
        "trim_lora",
    ]
    assert all(hasattr(fusion, name) for name in fusion.__all__)
