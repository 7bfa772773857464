"""A Ray cluster: `RASDAScheduler` and `elastic` for any Ray Tune script, and the Ray backend of `tune`."""

from typing import TYPE_CHECKING

from fusion.lazy_names import lazy_exports

if TYPE_CHECKING:
    from hydro_rasda.backends.ray.report_journal import JournalEntry as JournalEntry
    from hydro_rasda.backends.ray.report_journal import read_journal as read_journal
    from hydro_rasda.training.lr_rescaling import RescaledLR as RescaledLR
    from hydro_rasda.training.lr_rescaling import lr_factor as lr_factor
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__)
