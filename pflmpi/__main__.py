"""`python -m pflmpi`, and what `torchrun -m pflmpi` starts."""

import sys

from pflmpi.cli import main

sys.exit(main())
