"""An extension of mkdocs that shows doctests as examples. In this code, no heading stands before the doctests."""

from typing import Any

import griffe


class DoctestsAsExamples(griffe.Extension):
    """Insert the heading "Examples:", which Google's style demands, before doctests without a heading."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        docstring = obj.docstring
        if docstring is not None:
            docstring.value = docstring.value.replace("\nExample:\n", "\nExamples:\n")
        if docstring is None or "\n>>> " not in f"\n{docstring.value}":
            return
        before, _, doctests = f"\n{docstring.value}".partition("\n>>> ")
        indented = f">>> {doctests}".replace("\n", "\n    ")
        docstring.value = f"{before.strip()}\n\nExamples:\n    {indented}"
