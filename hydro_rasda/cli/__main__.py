"""`python -m hydro_rasda.cli` is `hydro-rasda`."""

import sys

from hydro_rasda.cli.commands_and_exit_status import main

sys.exit(main())
