"""Draw the idea: fused narrow copies are halved, a few models race at full size, and one comes back trained.

    python -m docs.idea

writes `docs/idea-light.svg` and `docs/idea-dark.svg`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
WIDTH, HEIGHT = 760, 300
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"
TEXT = (
    "Four steps, from left to right. Many narrow copies of a model train as one fused model. At each rung the best "
    "ones go on. Four configurations race at full size, and two train to the end. The best one comes back trained."
)


class Scheme(NamedTuple):
    """The colors of a picture. Its background is transparent."""

    text: str
    faint: str
    box: str
    line: str
    finalists: tuple[str, str, str, str]
    """Colors of the four configurations that reach full size; the first color is the winner's."""


SCHEMES = {
    "light": Scheme("#1f2328", "#b6bec9", "#f3f5f8", "#8c959f", ("#d9480f", "#1c7ed6", "#2b8a3e", "#7048e8")),
    "dark": Scheme("#e6edf3", "#5b6673", "#1a2029", "#8b949e", ("#ff922b", "#4dabf7", "#51cf66", "#9775fa")),
}

FINALISTS = {8: 0, 3: 1, 17: 2, 22: 3}
"""Maps each finalist among the 24 drawn copies to the index of its color."""
SURVIVORS = [8, 3, 17, 22, 5, 11, 14, 20]
"""The copies that the first rung keeps."""


def model(x: float, y: float, width: float, colour: str, opacity: float = 1.0) -> str:
    """Draw a model as three layers around `(x, y)`."""
    height, gap = (5, 2) if width < 30 else (8, 3)
    layers = [(width, -height - gap), (width, 0.0), (width * 0.6, height + gap)]
    return "".join(
        f'<rect x="{x - w / 2:.1f}" y="{y + down - height / 2:.1f}" width="{w:.1f}" height="{height}" rx="1.5" '
        f'fill="{colour}" opacity="{opacity:g}"/>'
        for w, down in layers
    )


def words(x: float, head: str, tail: str, scheme: Scheme) -> str:
    """Write two lines below a step."""
    middle = f'<text x="{x}" text-anchor="middle" fill="{scheme.text}"'
    return (
        f'{middle} y="262" font-size="20" font-weight="600">{head}</text>{middle} y="288" font-size="18">{tail}</text>'
    )


def arrow(x: float, y: float, length: float, scheme: Scheme) -> str:
    """Draw an arrow to the right."""
    end = x + length
    return (
        f'<path d="M{x} {y}H{end - 5}M{end - 11} {y - 6}L{end - 4} {y}L{end - 11} {y + 6}" fill="none" '
        f'stroke="{scheme.line}" stroke-width="2.5" stroke-linecap="round" stroke-linejoin="round"/>'
    )


def copies(scheme: Scheme) -> str:
    """Draw the first step: 24 narrow copies in one box."""
    drawn = f'<rect x="8" y="24" width="164" height="204" rx="12" fill="{scheme.box}" stroke="{scheme.line}"/>'
    for i in range(24):
        colour = scheme.finalists[FINALISTS[i]] if i in FINALISTS else scheme.faint
        drawn += model(30 + 40 * (i % 4), 45 + 32 * (i // 4), 16, colour)
    return drawn


def rungs(scheme: Scheme) -> str:
    """Draw the second step: two rungs, from which only the best copies continue."""
    drawn = ""
    for x, kept, ended in ((236, SURVIVORS, []), (308, SURVIVORS[:4], SURVIVORS[4:])):
        for i, member in enumerate([*kept, *ended]):
            colour = scheme.finalists[FINALISTS[member]] if member in FINALISTS else scheme.faint
            drawn += model(x, 38 + 25.5 * i, 16, colour, 0.25 if member in ended else 1.0)
    drawn += f'<path d="M272 30V224" stroke="{scheme.line}" stroke-width="1.5" stroke-dasharray="3 5"/>'
    return drawn


def race(scheme: Scheme) -> str:
    """Draw the third step: four full-size models, two of which train to the end."""
    drawn = f'<path d="M604 30V224" stroke="{scheme.line}" stroke-width="2.5" stroke-dasharray="6 5"/>'
    for i, (colour, far) in enumerate(zip(scheme.finalists, (604, 604, 526, 526), strict=True)):
        y = 54 + 49 * i
        ends = far == 526
        drawn += model(416, y, 68, colour, 0.4 if ends else 1.0)
        drawn += (
            f'<path d="M460 {y}H{far - 3}" stroke="{colour}" stroke-width="5" stroke-linecap="round" '
            f'opacity="{0.4 if ends else 1:g}"/>'
        )
        if ends:
            drawn += (
                f'<path d="M{far + 5} {y - 6}l12 12m0 -12l-12 12" stroke="{scheme.line}" stroke-width="2.5" '
                'stroke-linecap="round"/>'
            )
    return drawn


def winner(scheme: Scheme) -> str:
    """Draw the last step: the trained model, with a tick."""
    colour = scheme.finalists[0]
    return (
        f'<circle cx="700" cy="126" r="50" fill="none" stroke="{colour}" stroke-width="3"/>'
        + model(700, 126, 64, colour)
        + f'<circle cx="737" cy="88" r="15" fill="{colour}"/>'
        + '<path d="M730 88l5 6l9 -11" fill="none" stroke="#fff" stroke-width="3" stroke-linecap="round" '
        'stroke-linejoin="round"/>'
    )


def draw(scheme: Scheme) -> str:
    """Return the picture as SVG."""
    steps = [
        copies(scheme) + words(90, "Narrow copies", "train as one model", scheme),
        arrow(180, 126, 32, scheme) + rungs(scheme) + words(280, "Halving", "keeps the best", scheme),
        arrow(334, 126, 36, scheme) + race(scheme) + words(480, "Race", "of four, at full size", scheme),
        arrow(612, 126, 34, scheme) + words(690, "Winner", "comes trained", scheme) + winner(scheme),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" role="img" aria-labelledby="what" font-family="{FONT}">',
            f'<title id="what">{TEXT}</title>',
            *steps,
            "</svg>\n",
        ]
    )


def main(names: Sequence[str] = tuple(SCHEMES)) -> None:
    """Write the pictures."""
    for name in names:
        (FOLDER / f"idea-{name}.svg").write_text(draw(SCHEMES[name]), encoding="utf-8")


if __name__ == "__main__":
    main()
