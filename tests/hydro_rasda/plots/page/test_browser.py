"""Pages in a real Chromium: drawn, clicked, turned dark, on a phone, without an error on its console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hydro_rasda.plots.page import write_page
from hydro_rasda.plots.page.write import list_page
from hydro_rasda.records.records import RunRecord
from tests.hydro_rasda.browser import ALL_DRAWN, DRAWN, errors, needs_chromium, open_page, wait

pytestmark = needs_chromium


@pytest.mark.parametrize(
    "sort",
    ["over", "empty", *(pytest.param(s, marks=pytest.mark.slow) for s in ("interrupted", "single", "failed", "large"))],
)
def test_every_sort_of_run_is_drawn(browser: Any, sorts: dict[str, RunRecord], tmp_path: Path, sort: str) -> None:
    open_page(browser, write_page([sorts[sort]], tmp_path / "page.html").as_uri())
    wait(browser, ALL_DRAWN)
    assert errors(browser) == []
    assert browser.title == f"{sort} · hydro_rasda"  # what is in choices and tracebacks did not run


def test_a_file_is_unpacked_under_its_policy(browser: Any, sorts: dict[str, RunRecord], tmp_path: Path) -> None:
    """It runs no script but its own, and asks for nothing."""
    open_page(browser, write_page([sorts["over"]], tmp_path / "page.html").as_uri())
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
    path = write_page([sorts["over"]], tmp_path / "page.html")
    if lacks == "Plotly":  # as where a file was cut off on its way
        path.write_text(path.read_text().replace('id="packed-plotly">', 'id="packed-plotly">spoilt'))
    source = "delete window.DecompressionStream" if lacks == "DecompressionStream" else ""
    made = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": lacks == "JavaScript"})
    try:
        open_page(browser, path.as_uri())
        wait(browser, "return document.documentElement.className === ''")
        line = "To see figures and trials, allow JavaScript and open this page in "
        assert browser.execute_script("return document.getElementById('undrawn').innerText").startswith(line)
        shown = "return [...document.querySelectorAll('#undrawn, .figure')].filter((each) => each.checkVisibility())"
        assert len(browser.execute_script(shown)) == 1
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", made)
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.parametrize("sort", ["over", pytest.param("large", marks=pytest.mark.slow)])
def test_a_phone_shows_whole_titles_and_legends(
    browser: Any, sorts: dict[str, RunRecord], tmp_path: Path, sort: str
) -> None:
    open_page(browser, write_page([sorts[sort]], tmp_path / "page.html").as_uri(), width=400, height=9000)
    wait(browser, ALL_DRAWN)
    outside = browser.execute_script("""
        const texts = [...document.querySelectorAll('.figure text:not(.bartext)')];
        return texts.filter((text) => text.textContent.trim() && text.checkVisibility()).filter((text) => {
            const [inner, outer] = [text, text.closest('.figure')].map((each) => each.getBoundingClientRect());
            return inner.width && (inner.left < outer.left - 2 || inner.right > outer.right + 2);
        }).map((text) => text.textContent);
    """)
    assert outside == []
    cut_off = browser.execute_script("""
        return [...document.querySelectorAll('.legend')].filter((legend) => {
            const parts = [...legend.querySelectorAll('.bg, .legendtext')];
            const [frame, ...texts] = parts.map((part) => part.getBoundingClientRect());
            return texts.some((text) => text.bottom > frame.bottom + 2 || text.right > frame.right + 2);
        }).map((legend) => legend.closest('.figure').id);
    """)
    assert cut_off == []
    sideways = "return [...document.querySelectorAll('.figure')].filter((each) => each.scrollWidth > each.clientWidth)"
    assert browser.execute_script(sideways) == []


def test_what_is_below_is_drawn_when_it_comes_near(browser: Any, sorts: dict[str, RunRecord], tmp_path: Path) -> None:
    open_page(browser, write_page([sorts["over"]], tmp_path / "page.html").as_uri(), height=800)
    wait(browser, DRAWN)
    assert not browser.execute_script(ALL_DRAWN)
    browser.execute_script("document.querySelector('nav a[href=\"#section-10\"]').click()")
    wait(browser, "return document.getElementById('timeline').classList.contains('js-plotly-plot')")
    assert errors(browser) == []


def test_clicks_and_colors(browser: Any, sorts: dict[str, RunRecord], tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    open_page(browser, write_page([sorts["over"]], tmp_path / "page.html").as_uri(), scheme="dark")
    wait(browser, ALL_DRAWN)
    back = "return getComputedStyle(document.body).backgroundColor"
    ink = "return document.getElementById('learning-curves')._fullLayout.font.color"
    dark = browser.execute_script(back), browser.execute_script(ink)
    browser.find_element(By.CSS_SELECTOR, "summary").click()
    assert browser.find_element(By.CSS_SELECTOR, "details pre").is_displayed()
    browser.find_element(By.CSS_SELECTOR, "#learning-curves .legendtoggle").click()
    wait(browser, "return document.getElementById('learning-curves').data[0].visible === 'legendonly'")
    light = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", light)
    wait(browser, ink.replace("color", f"color !== '{dark[1]}'"))
    assert browser.execute_script(back) != dark[0]
    assert errors(browser) == []


def table(browser: Any) -> list[list[str]]:
    """The cells that the table of trials shows."""
    cells = "[...row.cells].map((cell) => cell.textContent)"
    found: list[list[str]] = browser.execute_script(
        f"return [...document.querySelectorAll('#trials tbody tr')].map((row) => {cells})"
    )
    return found


def column(browser: Any, name: str) -> Any:
    return browser.find_element("xpath", f"//*[@id='trials']//th/button[.='{name}']")


TRIALS = "return document.querySelector('#trials input') !== null"


def test_the_table_of_trials_sorts_and_filters(browser: Any, sorts: dict[str, RunRecord], tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    record = sorts["over"]
    open_page(browser, write_page([record], tmp_path / "page.html").as_uri())
    wait(browser, TRIALS)
    assert int(table(browser)[0][0]) == record.best_trial
    column(browser, "lr").click()
    rates = [trial.config["lr"] for trial in record.trials]
    assert [float(row[6]) for row in table(browser)] == pytest.approx(sorted(rates), rel=1e-3)
    column(browser, "lr").send_keys(Keys.ENTER)
    assert [float(row[6]) for row in table(browser)] == pytest.approx(sorted(rates, reverse=True), rel=1e-3)
    sorted_by = "return [...document.querySelectorAll('[aria-sort]')].map((head) => [head.textContent, head.ariaSort])"
    assert browser.execute_script(sorted_by) == [["lr", "descending"]]
    column(browser, "val_loss").click()  # whoever has none comes last, in either direction
    assert [row[2] != "" for row in table(browser)] == [True] * 3 + [False] * 24
    field = browser.find_element("css selector", "#trials input")
    field.send_keys("ADAMW sgd")
    assert table(browser) == []
    field.clear()
    field.send_keys("optimizer=adamw </script>")  # a choice is text, and no part of the page
    found = [t for t in record.trials if t.config["optimizer"] == "adamw" and "script" in t.config["activation"]]
    assert {int(row[0]) for row in table(browser)} == {trial.trial for trial in found}
    told = browser.execute_script("return document.querySelector('#trials [role=status]').textContent")
    assert told == f"{len(found)} of 27 trials"
    assert errors(browser) == []


@pytest.mark.parametrize(
    "figure",
    [
        "learning-curves",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("narrow-vs-full", "slice-0", "best-over-time")),
    ],
)
def test_a_click_on_a_point_shows_its_trial(
    browser: Any, sorts: dict[str, RunRecord], tmp_path: Path, figure: str
) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    record = sorts["over"]
    open_page(browser, write_page([record], tmp_path / "page.html").as_uri())
    wait(browser, ALL_DRAWN)
    field = browser.find_element("css selector", "#trials input")
    field.send_keys("no such trial")
    points = browser.find_elements("css selector", f"#{figure} .scatterlayer .point")
    ActionChains(browser).move_to_element(points[-1]).pause(0.2).click().perform()
    wait(browser, "return document.querySelector('#trials [aria-current]') === document.activeElement")
    assert field.get_property("value") == ""
    chosen = browser.execute_script("return document.activeElement.cells[0].textContent")
    over = browser.execute_script(f"return document.querySelector('#{figure} .hoverlayer').textContent")
    assert f"trial {chosen}" in over
    assert errors(browser) == []


def test_a_large_table_shows_a_hundred_rows_at_once(browser: Any, sorts: dict[str, RunRecord], tmp_path: Path) -> None:
    open_page(browser, write_page([sorts["large"]], tmp_path / "page.html").as_uri(), width=400, height=900)
    wait(browser, TRIALS)
    browser.execute_script("arguments[0].click()", column(browser, "trial"))
    assert [int(row[0]) for row in table(browser)] == [*range(100)]
    browser.execute_script("arguments[0].click()", browser.find_element("xpath", "//button[.='Next']"))
    assert [int(row[0]) for row in table(browser)] == [*range(100, 200)]
    status = "return document.querySelector('#trials [role=status]').textContent"
    assert browser.execute_script(status) == "101 to 200 of 2000 trials"
    browser.execute_script("trials.show({text: 'trial 1234', data: {}})")
    assert browser.execute_script("return document.activeElement.cells[0].textContent") == "1234"
    assert len(table(browser)) == 100
    wide = "const box = document.querySelector('#trials .scroll'); return box.scrollWidth > box.clientWidth"
    assert browser.execute_script(wide)
    assert browser.execute_script("return document.documentElement.scrollWidth") == 400
    assert errors(browser) == []


@pytest.mark.slow
def test_labels_of_logarithmic_axes_are_numbers(browser: Any, sorts: dict[str, RunRecord], tmp_path: Path) -> None:
    """Plotly's own would be 2 and 5 between 0.1 and 1, and 100μ for 0.0001."""
    open_page(browser, write_page([sorts["over"]], tmp_path / "page.html").as_uri(), height=9000)
    wait(browser, ALL_DRAWN)
    ticks = browser.execute_script("""
        const axes = [...document.querySelectorAll('.js-plotly-plot')].flatMap((plot) =>
            Object.values(plot._fullLayout).filter((axis) => axis && axis.type === 'log'));
        return axes.flatMap((axis) => axis._vals.filter((tick) => tick.text).map((tick) => [10 ** tick.x, tick.text]));
    """)
    assert len(ticks) > 5
    assert [(value, text) for value, text in ticks if float(text.replace("−", "-")) != pytest.approx(value)] == []


def test_a_phone_scrolls_down_but_not_sideways(browser: Any, sorts: dict[str, RunRecord], tmp_path: Path) -> None:
    open_page(browser, write_page([sorts["over"]], tmp_path / "page.html").as_uri(), width=390, height=9000)
    wait(browser, ALL_DRAWN)
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390
    assert errors(browser) == []


def test_the_list_of_runs_shows_the_best_score_on_a_phone(
    browser: Any, sorts: dict[str, RunRecord], tmp_path: Path
) -> None:
    path = tmp_path / "list.html"
    path.write_text(list_page([("tune-20261128-130344", sorts["interrupted"], 1e9)], tmp_path))
    open_page(browser, path.as_uri(), width=400, height=900)
    ends = browser.execute_script(
        "return Object.fromEntries([...document.querySelectorAll('th')].map((head) => "
        "[head.textContent, head.getBoundingClientRect().right]))"
    )
    assert ends["best"] <= 400


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_runs_side_by_side_fit_phone_and_desk(
    browser: Any, sorts: dict[str, RunRecord], tmp_path: Path, width: int, scheme: str
) -> None:
    both = write_page([sorts["over"], sorts["large"]], tmp_path / "page.html")
    open_page(browser, both.as_uri(), width=width, scheme=scheme)
    wait(browser, ALL_DRAWN)
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    assert len(browser.find_elements("css selector", ".js-plotly-plot")) == 3
    assert errors(browser) == []
