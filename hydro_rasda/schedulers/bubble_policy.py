"""Choose the bubbles in which guests run, by earlier waits of the host and by the time that guests cost it.

The host is a training in pipeline parallelism. A bubble is a time in which a rank of the host waits for another rank. A
guest is a process that trains trials in bubbles.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

WINDOW = 8
"""Number of latest steps from which the wait at a position is predicted."""

CONTROL = 16
"""One in `CONTROL` steps is a control step, without guests. Steps with guests are compared with control steps."""

LIMIT = 0.01
"""Largest share of the host's step time that guests may cost."""

SHORTEST_S = 1e-3
"""Guests run only in bubbles that are expected to last at least this number of seconds. Starting and stopping a guest
takes about 20 microseconds. Loading its data into the caches takes another 100."""


class WaitForecast:
    """Forecast how long the host will wait at a position in its step.

    The forecast uses earlier waits at the position, because each step repeats the same schedule.

    >>> forecast = WaitForecast()
    >>> for seconds in (0.05, 0.04, 0.06): forecast.saw(2, seconds)
    >>> forecast.expects(2), forecast.expects(3)
    (0.04, 0.0)
    """

    def __init__(self) -> None:
        self._seen: dict[object, deque[float]] = {}

    def saw(self, position: object, seconds: float) -> None:
        """Record that the host has waited `seconds` at a position."""
        self._seen.setdefault(position, deque(maxlen=WINDOW)).append(seconds)

    def expects(self, position: object) -> float:
        """Return the lower quartile of the latest waits at a position, in seconds; 0 before three waits."""
        seen = self._seen.get(position, ())
        return sorted(seen)[len(seen) // 4] if len(seen) >= 3 else 0.0


class Guard:
    """Tell which bubbles are long enough for guests: the more guests cost the host, the longer a bubble must be.

    Steps with guests are compared with control steps. If they are slower by more than `LIMIT`, even after the error of
    measurement is subtracted, `least` doubles. If they are slower by less than half of `LIMIT`, even after that error
    is added, `least` halves, down to `SHORTEST_S`.

    Attributes:
        least: Guests run only in bubbles that are expected to last at least this number of seconds.
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
        """Relative slowdown of steps with guests (by medians); NaN until steps with and without guests were seen."""
        if not self._with or not self._without:
            return float("nan")
        return statistics.median(self._with) / statistics.median(self._without) - 1

    def saw(self, seconds: float) -> None:
        """Record a step of the host that ends; its seconds include the time until the next step begins."""
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
    """Return the standard error of a median, from the median absolute deviation, which one slow step hardly changes."""
    middle = statistics.median(seconds)
    return 1.2533 * 1.4826 * statistics.median(abs(s - middle) for s in seconds) / math.sqrt(len(seconds))


class Margin:
    """Tell whether work that cannot be stopped, such as work on a GPU, fits into the rest of a bubble.

    Work is expected to last for the median time of the latest work of its kind, plus a share of that time. The median
    leaves out a single run that takes longer because it also loads code. The share doubles each time that work outlasts
    its bubble. Each time that work ends within its bubble, the share shrinks by 2 %.

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

        Until three times of this kind are recorded, work of this kind may begin in any bubble that is still open.
        """
        seen = self._seen.get(kind, ())
        return left > 0 and (len(seen) < 3 or statistics.median_low(seen) * (1 + self._share) <= left)

    def saw(self, kind: str, seconds: float, in_time: bool) -> None:
        """Record that work of this kind has ended after `seconds`, and whether it ended within its bubble."""
        self._seen.setdefault(kind, deque(maxlen=WINDOW)).append(seconds)
        self._share = max(0.1, self._share * 0.98) if in_time else min(4.0, self._share * 2)
