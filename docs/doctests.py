"""What mkdocs needs to show the doctests of this code as examples: here they end a docstring without a heading."""

from typing import Any

import griffe


class DoctestsAsExamples(griffe.Extension):
    """Puts "Examples:", which Google's style asks for, before doctests that stand by themselves."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        docstring = obj.docstring
        if docstring is not None:
            docstring.value = docstring.value.replace("\nExample:\n", "\nExamples:\n")
        if docstring is None or "\n>>> " not in f"\n{docstring.value}":
            return
        before, _, doctests = f"\n{docstring.value}".partition("\n>>> ")
        indented = f">>> {doctests}".replace("\n", "\n    ")
        docstring.value = f"{before.strip()}\n\nExamples:\n    {indented}"
