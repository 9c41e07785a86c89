"""`python -m tape_pe.cli`, which launchers such as torchrun start."""

import sys

from tape_pe.cli import main

sys.exit(main())
