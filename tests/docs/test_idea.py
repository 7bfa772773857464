"""The picture of the idea is the one that its script draws."""

import xml.etree.ElementTree as ElementTree

import pytest

from docs.idea import FINALISTS, FOLDER, HEIGHT, SCHEMES, SURVIVORS, WIDTH, draw


@pytest.mark.parametrize("name", SCHEMES)
def test_the_published_picture_is_drawn_by_the_script(name: str) -> None:
    assert (FOLDER / f"idea-{name}.svg").read_text(encoding="utf-8") == draw(SCHEMES[name]), "run `make pictures`"


def test_all_shapes_lie_inside() -> None:
    for rectangle in ElementTree.fromstring(draw(SCHEMES["light"])).iter("{http://www.w3.org/2000/svg}rect"):
        x, y, width, height = (float(rectangle.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + width <= WIDTH
        assert 0 <= y <= y + height <= HEIGHT


def test_each_finalist_survives_the_first_rung() -> None:
    """The eye follows four colours from the copies to full size."""
    assert SURVIVORS[:4] == list(FINALISTS)
