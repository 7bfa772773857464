"""A real Chromium, without a window, for pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
needs_chromium = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="there is no chromium, or no chromedriver")

WAIT_S = 60.0
DRAWN = "return document.querySelectorAll('.js-plotly-plot .main-svg').length > 0"
_COUNT = "document.querySelectorAll('{}').length"
ALL_DRAWN = f"return {_COUNT.format('.figure')} === {_COUNT.format('.js-plotly-plot')}"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver = start(str(tmp_path_factory.mktemp("chromium")))
    yield driver
    driver.quit()


def start(folder: str) -> Any:
    """Start Chromium, which leaves its temporary folders in `folder`."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for option in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "enable-unsafe-swiftshader"):
        options.add_argument(f"--{option}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(str(DRIVER), env={**os.environ, "TMPDIR": folder}))


def wait(browser: Any, script: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, WAIT_S, poll_frequency=0.1).until(lambda driver: driver.execute_script(script))


def open_page(browser: Any, url: str, width: int = 1100, height: int = 7000, scheme: str = "light") -> None:
    """Open a page in a window so high that all of it is drawn."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get_log("browser")
    browser.get(url)


def errors(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
