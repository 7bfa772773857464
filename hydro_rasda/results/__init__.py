"""The outputs of a run: its record, its result, reports, exports, and the recipe of a winner."""

from typing import TYPE_CHECKING

from fusion.lazy_names import lazy_exports

if TYPE_CHECKING:
    from hydro_rasda.records.records import Cost as Cost
    from hydro_rasda.records.records import TrialRecord as TrialRecord
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__)
