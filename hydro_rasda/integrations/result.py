"""The result of tuning another library's training."""

from __future__ import annotations

from hydro_rasda.results.result import TuneResult


class LibraryResult(TuneResult):
    """A `TuneResult`, with what another library needs besides."""

    @property
    def tuned(self) -> TuneResult:
        """The same result, for scripts that ask for it by this name."""
        return self
