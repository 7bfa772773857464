from __future__ import annotations

from tests.hydro_rasda.browser import browser as browser
