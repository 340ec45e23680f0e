"""What the sections of `hostile.py` share: commands run to their end, and what came of each."""

import contextlib
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

PATIENCE = 150.0  # seconds until a command counts as hanging


@dataclass(frozen=True)
class Result:
    """A command that ended: exit code (None: it hung and was killed) and what it printed."""

    code: int | None
    text: str


@dataclass
class Trial:
    """One attempt.

    Attributes:
        what: was done, in words; up to the first comma, the kind of blow.
        labels: what came of it.
        text: all that was printed.
        seconds: what the section says of it.
    """

    what: str
    labels: set[str] = field(default_factory=set)
    text: str = ""
    seconds: float | None = None

    def saw(self, result: Result) -> Result:
        """Note what a command printed, and whether it ended as no command may."""
        self.text += f"[{result.code}] {result.text}"
        self.labels |= {"hang"} if result.code is None else set()
        self.labels |= {"internal error"} if "internal error" in result.text else set()
        self.labels |= {"traceback"} if re.search(r'File "[^"]*/pflmpi/[^"]*\.py"', result.text) else set()
        return result


Attempt = Callable[[int, random.Random, Path], Trial]  # number, its random numbers, and a folder of its own


def warm_up() -> None:
    """Import what commands need, before the forks."""
    for name in ("experiment.run", "analysis.report", "analysis.integrity", "analysis.plots"):
        import_module(f"pflmpi.{name}")
    import_module("pflmpi.cli").parser()


def command(*words: object, seconds: float = PATIENCE, place: Path | None = None) -> Result:
    """Run `pflmpi WORDS` in a fork of this process, which has imported everything: a tenth of a second, not five.

    Args:
        seconds: after which it is killed.
        place: its home and working directory; its memory is then limited to 8 GiB.
    """
    with tempfile.TemporaryFile() as output:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _become(output.fileno(), [str(word) for word in words], place)
        code = _wait(child, seconds)
        output.seek(0)
        return Result(code, output.read().decode(errors="replace"))


def resume(trial: Trial, run: Path, config: Path, expected: str, *words: object) -> None:
    """Continue a run, or start it where it has no checkpoint, and compare its digest."""
    begun = any(run.glob("round_*.h5"))
    how = ["resume", run] if begun else ["run", config, "--out", run, "--continue"]
    compare(trial, run, trial.saw(command(*how, "--ranks", 1, "--quiet", *words)), expected)


def compare(trial: Trial, run: Path, result: Result, expected: str) -> None:
    """Whether a run that ended has the right bits, or was refused."""
    if result.code == 0:
        found = trial.saw(command("inspect", run, "--digest"))
        right = found.code == 0 and found.text.split()[-1] == expected
        trial.labels.add("continued" if right else "wrong bits")
    elif result.code is not None:
        trial.labels.add("refused" if result.code == 2 else "other")


def digest(run: Path) -> str:
    """Digest of the newest round."""
    return command("inspect", run, "--digest").text.split()[-1]


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder for one attempt."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        yield Path(name)


def _become(output: int, words: list[str], place: Path | None) -> None:
    code = 70
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        if place is not None:
            os.chdir(place)
            os.environ.update(COLUMNS="120", TMPDIR=str(place), HOME=str(place))
            tempfile.tempdir = str(place)
            resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        code = import_module("pflmpi.cli").main(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(child: int, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
