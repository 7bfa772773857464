"""The names that the package promises, and how little they load."""

import subprocess
import sys

import fusion

PUBLIC: list[str] = vars(fusion)["__all__"]


def test_public_names() -> None:
    assert PUBLIC == [
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
    assert all(hasattr(fusion, name) for name in PUBLIC)
    assert len(PUBLIC) == 15


def test_a_star_imports_the_public_names_and_nothing_else() -> None:
    names: dict[str, object] = {}
    exec("from fusion import *", names)
    assert names.keys() - {"__builtins__"} == {*PUBLIC} <= {*dir(fusion)}
    assert not hasattr(fusion, "nothing")


def test_keys_need_no_torch() -> None:
    """Nor anything else: only a name of the package that needs torch loads it, when it is first used."""
    code = """
import sys
before = set(sys.modules)
from fusion.keys import check_settings, read
check_settings({"lr": 0.1, "optimizer": "sgd", "momentum.head": 0.9})
assert read({}, "batch_size") == 64
print({name.split(".")[0] for name in sys.modules.keys() - before} - sys.stdlib_module_names)
import fusion
fusion.fuse
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "{'fusion'}\nTrue\n"
