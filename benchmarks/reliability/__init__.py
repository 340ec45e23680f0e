"""The sections of `hostile.py`, which use the helpers of the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tests" / "helpers"))
