"""The example on the package's page runs as it stands, in 20 lines, and learns."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import fusion


def test_the_example() -> None:
    page = (Path(fusion.__file__).parent / "README.md").read_text(encoding="utf-8")
    code = page.split("```python\n", 1)[1].split("```", 1)[0]
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(code, names)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    assert isinstance(names["best"], nn.Sequential)
    loss_K, y = names["loss_K"], names["y"]
    assert loss_K.shape == (6,)
    assert loss_K.min() < 0.2 * y.var()
