"""How narrow the surrogates of other libraries' models can be."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from surrogate import shrink


def width_or_full(model: nn.Module, width: Any, example: Callable[[], Any]) -> Any:
    """The width ratio that was asked for; 1, which is said, where the model cannot be made so narrow.

    Args:
        model: At full width; it takes no width ratio.
        width: What the user gave as `surrogate`; what is no width below 1 is left to `tune`.
        example: Gives what the model is called with, as `shrink` takes it.
    """
    if not isinstance(width, float) or not 0 < width < 1:
        return width
    try:
        shrink(model, width, example())
    except Exception as error:
        told = (str(error) or type(error).__name__).splitlines()[0]
        warnings.warn(f"the model is swept at its full width (`surrogate=1`), not at {width:g}: {told}", stacklevel=3)
        return 1
    return width
