"""Pages in a real Chromium: drawn, clicked, turned dark, on a phone, without an error on its console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hydro_rasda.page import write_page
from hydro_rasda.results.records import RunRecord
from tests.hydro_rasda.browser import ALL_DRAWN, DRAWN, errors, needs_chromium, open_page, wait

pytestmark = needs_chromium


@pytest.mark.parametrize(
    "sort",
    ["over", "empty", *(pytest.param(s, marks=pytest.mark.slow) for s in ("interrupted", "single", "failed", "large"))],
)
def test_every_sort_of_run_is_drawn(browser: Any, sorts: dict[str, RunRecord], tmp_path: Path, sort: str) -> None:
    open_page(browser, write_page(sorts[sort], tmp_path / "page.html").as_uri())
    wait(browser, ALL_DRAWN)
    assert errors(browser) == []
    assert browser.title == f"{sort} · hydro_rasda"  # what is in choices and tracebacks did not run


def test_a_file_is_unpacked_under_its_policy(browser: Any, sorts: dict[str, RunRecord], tmp_path: Path) -> None:
    """It runs no script but its own, and asks for nothing."""
    open_page(browser, write_page(sorts["over"], tmp_path / "page.html").as_uri())
    wait(browser, ALL_DRAWN)
    drawn = "return document.getElementById('{}').{}"
    assert "WebGL is not" not in browser.execute_script(drawn.format("parallel-coordinates", "textContent"))
    sizes = browser.execute_script(drawn.format("learning-curves", "data.map((trace) => trace.x.length)"))
    assert sum(sizes) > len(sorts["over"].trials)
    assert browser.execute_script("return performance.getEntriesByType('resource').map((each) => each.name)") == []
    assert not browser.execute_script("return document.getElementById('undrawn').checkVisibility()")
    assert errors(browser) == []
    browser.execute_script("""
        const script = document.createElement('script');
        script.textContent = "document.title = 'taken over'";
        document.head.append(script);
        document.body.insertAdjacentHTML('beforeend', '<img src="data:," onerror="document.title = 1">');
    """)
    wait(browser, "return document.images.length > 0 && [...document.images].every((image) => image.complete)")
    assert browser.title == "over · hydro_rasda"
    assert any("Content Security Policy" in message for message in errors(browser))


@pytest.mark.parametrize("lacks", ["JavaScript", "DecompressionStream", "Plotly"])
def test_who_cannot_draw_the_figures_reads_what_to_do(
    browser: Any, sorts: dict[str, RunRecord], tmp_path: Path, lacks: str
) -> None:
    path = write_page(sorts["over"], tmp_path / "page.html")
    if lacks == "Plotly":  # as where a file was cut off on its way
        path.write_text(path.read_text().replace('id="packed-plotly">', 'id="packed-plotly">spoilt'))
    source = "delete window.DecompressionStream" if lacks == "DecompressionStream" else ""
    made = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": lacks == "JavaScript"})
    try:
        open_page(browser, path.as_uri())
        wait(browser, "return document.documentElement.className === ''")
        line = "To see the figures, allow JavaScript and open this page in "
        assert browser.execute_script("return document.getElementById('undrawn').innerText").startswith(line)
        shown = "return [...document.querySelectorAll('#undrawn, .figure')].filter((each) => each.checkVisibility())"
        assert len(browser.execute_script(shown)) == 1
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", made)
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.parametrize("sort", ["over", "large"])
def test_a_phone_shows_whole_titles_and_legends(
    browser: Any, sorts: dict[str, RunRecord], tmp_path: Path, sort: str
) -> None:
    open_page(browser, write_page(sorts[sort], tmp_path / "page.html").as_uri(), width=400, height=9000)
    wait(browser, ALL_DRAWN)
    outside = browser.execute_script("""
        const texts = [...document.querySelectorAll('.figure:not(.wide) text')];
        return texts.filter((text) => text.textContent.trim() && text.checkVisibility()).filter((text) => {
            const [inner, outer] = [text, text.closest('.figure')].map((each) => each.getBoundingClientRect());
            return inner.width && (inner.left < outer.left - 2 || inner.right > outer.right + 2);
        }).map((text) => text.textContent);
    """)
    assert outside == []


def test_what_is_below_is_drawn_when_it_comes_near(browser: Any, sorts: dict[str, RunRecord], tmp_path: Path) -> None:
    open_page(browser, write_page(sorts["over"], tmp_path / "page.html").as_uri(), height=800)
    wait(browser, DRAWN)
    assert not browser.execute_script(ALL_DRAWN)
    browser.execute_script("document.querySelector('nav a[href=\"#section-10\"]').click()")
    wait(browser, "return document.getElementById('timeline').classList.contains('js-plotly-plot')")
    assert errors(browser) == []


def test_clicks_and_colors(browser: Any, sorts: dict[str, RunRecord], tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    open_page(browser, write_page(sorts["over"], tmp_path / "page.html").as_uri(), scheme="dark")
    wait(browser, ALL_DRAWN)
    back = "return getComputedStyle(document.body).backgroundColor"
    ink = "return document.getElementById('learning-curves')._fullLayout.font.color"
    dark = browser.execute_script(back), browser.execute_script(ink)
    browser.find_element(By.CSS_SELECTOR, "#section-1 summary").click()
    assert browser.find_element(By.CSS_SELECTOR, "#section-1 table").is_displayed()
    browser.find_element(By.CSS_SELECTOR, "#learning-curves .legendtoggle").click()
    wait(browser, "return document.getElementById('learning-curves').data[0].visible === 'legendonly'")
    light = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", light)
    wait(browser, ink.replace("color", f"color !== '{dark[1]}'"))
    assert browser.execute_script(back) != dark[0]
    assert errors(browser) == []


def test_labels_of_logarithmic_axes_are_numbers(browser: Any, sorts: dict[str, RunRecord], tmp_path: Path) -> None:
    """Plotly's own would be 2 and 5 between 0.1 and 1, and 100μ for 0.0001."""
    open_page(browser, write_page(sorts["over"], tmp_path / "page.html").as_uri(), height=9000)
    wait(browser, ALL_DRAWN)
    ticks = browser.execute_script("""
        const axes = [...document.querySelectorAll('.js-plotly-plot')].flatMap((plot) =>
            Object.values(plot._fullLayout).filter((axis) => axis && axis.type === 'log'));
        return axes.flatMap((axis) => axis._vals.filter((tick) => tick.text).map((tick) => [10 ** tick.x, tick.text]));
    """)
    assert len(ticks) > 5
    assert [(value, text) for value, text in ticks if float(text.replace("−", "-")) != pytest.approx(value)] == []


def test_a_phone_scrolls_down_but_not_sideways(browser: Any, sorts: dict[str, RunRecord], tmp_path: Path) -> None:
    open_page(browser, write_page(sorts["over"], tmp_path / "page.html").as_uri(), width=390, height=9000)
    wait(browser, ALL_DRAWN)
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390
    assert errors(browser) == []
