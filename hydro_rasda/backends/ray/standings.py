"""What an experiment's trials came to at the milestones: in this process and, by its journal, in those before it."""

from __future__ import annotations

from hydro_rasda.backends.ray.journal import Journal, JournalEntry, replay
from hydro_rasda.schedulers import AshaState, Decision


class Standings:
    """The rungs, and what was decided of each trial.

    A killed process may have decided more than Ray had saved: what a restored trial repeats is not decided anew.
    """

    def __init__(self) -> None:
        self._journal: Journal | None = None
        self._rungs: AshaState | None = None
        self._known: set[str] = set()
        self._before: set[str] = set()
        self._stopped: dict[str, int] = {}
        self._undecided: dict[str, JournalEntry] = {}

    def open(self, journal: Journal) -> None:
        """Take in what earlier processes wrote, and write to the same journal from now on."""
        last = {entry.trial: entry for entry in journal.entries}
        self._journal, self._before = journal, set(last)
        self._undecided = {name: entry for name, entry in last.items() if entry.decision == Decision.WAIT}
        self._stopped = {
            entry.trial: entry.milestone
            for entry in journal.entries
            if entry.decision == Decision.STOP and entry.milestone is not None
        }

    def know(self, trial: str) -> None:
        """Count a trial's scores, those of an earlier process among them."""
        if trial in self._before and trial not in self._known:
            self._rungs = None
        self._known.add(trial)

    @property
    def rungs(self) -> AshaState:
        """The scores at each milestone, of the trials that are known."""
        if self._rungs is None:
            entries = self._journal.entries if self._journal else ()
            self._rungs = replay(entries, self._known)
        return self._rungs

    @rungs.setter
    def rungs(self, rungs: AshaState) -> None:
        self._rungs = rungs

    def append(self, entry: JournalEntry) -> None:
        """Write down a report; see `Journal.append`."""
        assert self._journal is not None
        self._journal.append(entry)

    def stop(self, trial: str, milestone: int) -> None:
        """A trial was stopped at a milestone, while it was paused there, or at the last."""
        self._stopped[trial] = milestone

    def stopped_at(self, trial: str) -> int | None:
        """The milestone that a trial was stopped at, whatever it repeats after that; None where it was not."""
        return self._stopped.get(trial)

    def take_undecided(self, trial: str) -> JournalEntry | None:
        """The report with which a restored trial waited to be decided; it is asked for once."""
        return self._undecided.pop(trial, None)
