"""Arguments of `tune` over a test's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any


def over(defaults: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with changes: of `sweep` and `race` those fields that are not the library's defaults, or a dict's."""
    both = [name for name in ("sweep", "race") if name in defaults and name in changes]
    return {**defaults, **changes, **{name: replace(defaults[name], **_fields(changes[name])) for name in both}}


def _fields(part: Any) -> dict[str, Any]:
    if not is_dataclass(part):
        return dict(part)
    return {field.name: value for field in fields(part) if (value := getattr(part, field.name)) != field.default}
