from __future__ import annotations

from collections.abc import Callable

import pytest

from hydro_rasda.common.optional_packages import needed_by


def own_error() -> None:
    try:
        raise ImportError(name="sklearn.ensemble")
    except ImportError as error:
        raise ImportError("Tried to import a package") from error


def unnamed() -> None:
    raise ImportError("no library")


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        (lambda: __import__("nowhere.at_all"), "nowhere, which"),
        (own_error, "sklearn, which"),
        (unnamed, "a package that"),
    ],
)
def test_the_error_says_what_to_install(fails: Callable[[], object], told: str) -> None:
    message = rf"^a page needs {told} is not there: pip install 'hydro-rasda\[report\]'$"
    with pytest.raises(ImportError, match=message), needed_by("a page", "report"):
        fails()
