"""For importers that have not moved to :mod:`hydro_rasda.checks` yet."""

from hydro_rasda.checks import check_int as check_int
