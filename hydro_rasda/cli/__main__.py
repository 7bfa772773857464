"""`python -m hydro_rasda.cli` is `hydro-rasda`."""

import sys

from hydro_rasda.cli.app import main

sys.exit(main())
