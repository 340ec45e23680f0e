"""A disk with room for a part of a run only."""

import random
import subprocess
from pathlib import Path

from reliability.interruptions import Interruptions
from reliability.trials import Trial, command, compare, resume


class FullDisk:
    """A run, and how large it is."""

    def __init__(self, folder: Path) -> None:
        self._runs = Interruptions(folder)
        self._bytes = sum(path.stat().st_size for path in (folder / "whole").rglob("*") if path.is_file())

    def fill(self, number: int, draw: random.Random, folder: Path) -> Trial:
        """Run on a small disk, then continue with more room."""
        room = draw.randrange(1 << 16, self._bytes)
        trial, disk = Trial(f"{room >> 10} KiB"), folder / "disk"
        run, expected = disk / "run", self._runs.expected
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "none", disk], check=True)
        try:
            result = trial.saw(command("run", self._runs.config, "--out", run, "--ranks", 1, "--quiet"))
            if result.code not in (0, 2, 3) or (result.code and "No space left" not in result.text):
                trial.labels.add("other")
            subprocess.run(["mount", "-o", f"remount,size={8 * self._bytes}", disk], check=True)
            if result.code == 0:
                compare(trial, run, result, expected)
            elif result.code is not None:
                resume(trial, run, self._runs.config, expected)
        finally:
            subprocess.run(["umount", disk], check=True)
        return trial
