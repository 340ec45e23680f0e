"""Where the project's folders are."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
HELPERS = ROOT / "tests" / "helpers"
