"""Where the project's folders are, and what its pages tell to type."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
HELPERS = ROOT / "tests" / "helpers"
