"""Where the project's folders are, and what its pages tell to type."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
HELPERS = ROOT / "tests" / "helpers"


def documented(page, words):
    """The words of the one command of a page that contains some words, without its comment."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    (line,) = [line for block in blocks for line in block.splitlines() if words in line]
    return shlex.split(line, comments=True)
