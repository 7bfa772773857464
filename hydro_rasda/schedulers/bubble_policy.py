"""Choose the bubbles of a pipeline that guests get, by the waits of earlier steps and the guests' cost to the host."""

from __future__ import annotations

import math
import statistics
from collections import deque

WINDOW = 8
"""Number of last steps by which the wait at a position is predicted."""

CONTROL = 16
"""One step in so many is a control step: it has no guests, and the others are compared with it."""

LIMIT = 0.01
"""Share of its step time that guests may cost the host."""

SHORTEST_S = 1e-3
"""To let a guest run and to stop it again takes about 20 microseconds; its data come to the caches in another 100."""


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
        """Take in a wait."""
        self._seen.setdefault(position, deque(maxlen=WINDOW)).append(seconds)

    def expects(self, position: object) -> float:
        """Return the seconds that three in four of the last waits at a position reached; 0 before there were three."""
        seen = self._seen.get(position, ())
        return sorted(seen)[len(seen) // 4] if len(seen) >= 3 else 0.0


class Guard:
    """Tell which bubbles are long enough for guests: the more guests cost the host, the longer a bubble must be.

    Steps with guests are compared with control steps. If they are slower by more than `LIMIT`, and by more than chance
    explains, the least length doubles. If they are surely slower by less than half of `LIMIT`, it halves.

    Attributes:
        least: Seconds that a bubble must be expected to last.
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
        """Tell whether the next step may have guests. All ranks of a host that count the same steps agree."""
        return self._steps % CONTROL != CONTROL - 1

    @property
    def cost(self) -> float:
        """Share by which the steps with guests are slower, by the medians; NaN before any can be compared."""
        if not self._with or not self._without:
            return float("nan")
        return statistics.median(self._with) / statistics.median(self._without) - 1

    def saw(self, seconds: float) -> None:
        """Take in the step that ends, the time to the next one's beginning included."""
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
    """Standard error of a median, by the median absolute deviation: one slow step says little."""
    middle = statistics.median(seconds)
    return 1.2533 * 1.4826 * statistics.median(abs(s - middle) for s in seconds) / math.sqrt(len(seconds))


class Margin:
    """Tell whether work that cannot be stopped, such as work on a GPU, fits the rest of a bubble.

    Work is expected to last as long as the last ones of its kind, and a share longer. The median is taken, so that one
    that also loads code does not count. The share doubles each time that work was not over by the bubble's end, and
    shrinks by a fiftieth each time that it was.

    >>> margin = Margin()
    >>> for seconds in (0.010, 0.009, 0.500): margin.saw("forward", seconds, in_time=True)
    >>> margin.fits("forward", 0.012), margin.fits("forward", 0.011)
    (True, False)
    """

    def __init__(self) -> None:
        self._share = 0.2
        self._seen: dict[str, deque[float]] = {}

    def fits(self, kind: str, left: float) -> bool:
        """Tell whether a quantum of this kind may begin `left` seconds before the bubble ends; the first three may."""
        seen = self._seen.get(kind, ())
        return left > 0 and (len(seen) < 3 or statistics.median_low(seen) * (1 + self._share) <= left)

    def saw(self, kind: str, seconds: float, in_time: bool) -> None:
        """Take in a quantum that is over, and whether it was by the bubble's end."""
        self._seen.setdefault(kind, deque(maxlen=WINDOW)).append(seconds)
        self._share = max(0.1, self._share * 0.98) if in_time else min(4.0, self._share * 2)
