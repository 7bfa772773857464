"""Choose the bubbles of a pipeline in which guests run, by earlier waits and by what guests cost the host."""

from __future__ import annotations

import math
import statistics
from collections import deque

WINDOW = 8
"""Number of latest steps from which the wait at a position is predicted."""

CONTROL = 16
"""One in `CONTROL` steps is a control step, without guests. The other steps are compared with it."""

LIMIT = 0.01
"""Largest share of the host's step time that guests may cost."""

SHORTEST_S = 1e-3
"""Least seconds of a bubble for guests. Starting and stopping a guest takes about 20 microseconds; loading its data
into the caches takes another 100."""


class WaitForecast:
    """Forecast how long the host will wait, by the position of the wait in its step: a schedule repeats itself.

    >>> forecast = WaitForecast()
    >>> for seconds in (0.05, 0.04, 0.06): forecast.saw(2, seconds)
    >>> forecast.expects(2), forecast.expects(3)
    (0.04, 0.0)
    """

    def __init__(self) -> None:
        self._seen: dict[object, deque[float]] = {}

    def saw(self, position: object, seconds: float) -> None:
        """Record a wait."""
        self._seen.setdefault(position, deque(maxlen=WINDOW)).append(seconds)

    def expects(self, position: object) -> float:
        """Return the seconds that three in four of the latest waits at a position reached; 0 before three waits."""
        seen = self._seen.get(position, ())
        return sorted(seen)[len(seen) // 4] if len(seen) >= 3 else 0.0


class Guard:
    """Tell which bubbles are long enough for guests: the more guests cost the host, the longer a bubble must be.

    Steps with guests are compared with control steps. If they are slower by more than `LIMIT`, and by more than chance
    explains, `least` doubles. If they are surely slower by less than half of `LIMIT`, `least` halves.

    Attributes:
        least: Least expected seconds of a bubble for guests.
    """

    def __init__(self) -> None:
        self.least = SHORTEST_S
        self._steps = 0
        self._forget()

    def _forget(self) -> None:
        self._with: deque[float] = deque(maxlen=16 * CONTROL)
        self._without: deque[float] = deque(maxlen=16)

    @property
    def lets_in(self) -> bool:
        """Tell whether the next step may have guests. The ranks of a host agree, because they count the same steps."""
        return self._steps % CONTROL != CONTROL - 1

    @property
    def cost(self) -> float:
        """Share by which steps with guests are slower, by medians; NaN until steps of both kinds were seen."""
        if not self._with or not self._without:
            return float("nan")
        return statistics.median(self._with) / statistics.median(self._without) - 1

    def saw(self, seconds: float) -> None:
        """Record a step that ends; its seconds include the time until the next step begins."""
        (self._with if self.lets_in else self._without).append(seconds)
        self._steps += 1
        if not (len(self._without) >= 8 and self._steps % CONTROL == 0):
            return
        error = 2 * (_error(self._with) + _error(self._without)) / statistics.median(self._without)
        if self.cost - error > LIMIT:
            self.least *= 2
            self._forget()
        elif self.least > SHORTEST_S and self.cost + error < LIMIT / 2:
            self.least /= 2
            self._forget()


def _error(seconds: deque[float]) -> float:
    """Return the standard error of a median, from the median absolute deviation: one slow step changes it little."""
    middle = statistics.median(seconds)
    return 1.2533 * 1.4826 * statistics.median(abs(s - middle) for s in seconds) / math.sqrt(len(seconds))


class Margin:
    """Tell whether work that cannot be stopped, such as work on a GPU, fits into the rest of a bubble.

    Work is expected to last as long as the latest work of its kind, plus a share. The median is used, so that one run
    that also loads code does not count. The share doubles each time that work outlasts its bubble; otherwise it shrinks
    by a fiftieth.

    >>> margin = Margin()
    >>> for seconds in (0.010, 0.009, 0.500): margin.saw("forward", seconds, in_time=True)
    >>> margin.fits("forward", 0.012), margin.fits("forward", 0.011)
    (True, False)
    """

    def __init__(self) -> None:
        self._share = 0.2
        self._seen: dict[str, deque[float]] = {}

    def fits(self, kind: str, left: float) -> bool:
        """Tell whether work of this kind may begin `left` seconds before the bubble ends.

        The first three of a kind may.
        """
        seen = self._seen.get(kind, ())
        return left > 0 and (len(seen) < 3 or statistics.median_low(seen) * (1 + self._share) <= left)

    def saw(self, kind: str, seconds: float, in_time: bool) -> None:
        """Record work that has ended, and whether it ended within its bubble."""
        self._seen.setdefault(kind, deque(maxlen=WINDOW)).append(seconds)
        self._share = max(0.1, self._share * 0.98) if in_time else min(4.0, self._share * 2)
