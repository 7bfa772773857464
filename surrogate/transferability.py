"""The hyperparameters that transfer from a narrow model to a wide one, and those that do so less surely.

Tensor Programs V, table 1: what steers optimization transfers; what regularizes depends on the model's size
as well, since a narrow model overfits less.
"""

from __future__ import annotations

from collections.abc import Collection, KeysView, Mapping

from surrogate.checks import check_width_ratio, require

SAFE_RATIO = 1 / 4
"""Below this width ratio, regularization tuned on a surrogate is doubtful."""

_REGULARIZERS = ("dropout", "drop_path", "droppath", "weight_decay", "label_smoothing", "mixup", "cutmix", "augment")


def doubtful_hyperparameters(keys: Collection[str], width_ratio: float) -> list[str]:
    """Those of the tuned hyperparameters whose best value may differ between surrogate and target.

    Args:
        keys: Names in the search space; nested ones joined by any separator, such as `"model/dropout"`.
        width_ratio: Surrogate width over target width, in (0, 1].

    Returns:
        The doubtful keys, in their order; none at a ratio of 1/4 or more.

    Raises:
        ValueError: if `keys` is no list of names, or `width_ratio` no number in (0, 1].

    >>> doubtful_hyperparameters(["lr", "dropout", "weight_decay"], 1 / 8)
    ['dropout', 'weight_decay']
    >>> doubtful_hyperparameters(["lr", "dropout", "weight_decay"], 1 / 2)
    []
    """
    check_width_ratio(width_ratio)
    listed = isinstance(keys, list | tuple | set | frozenset | Mapping | KeysView)
    require(listed and all(isinstance(key, str) for key in keys), "keys", keys, "a list of names")
    if width_ratio >= SAFE_RATIO:
        return []
    return [key for key in keys if any(word in key.lower() for word in _REGULARIZERS)]
