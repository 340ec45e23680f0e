"""A run whose ranks are processes of this machine, watched from a notebook or script."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from pflmpi.config import yaml_file
from pflmpi.config.load import Config
from pflmpi.errors import RunError, Stopped, recorded
from pflmpi.python.rounds import NewRounds, OnRound
from pflmpi.store import run_folder

_EVERY = 0.1  # seconds between two looks at the metrics


def run(config: Config, folder: Path, ranks: int | None, on_round: OnRound | None, resume: bool, quiet: bool) -> Path:
    """Run a configuration in other processes; return the folder. See `pflmpi.run`."""
    with TemporaryDirectory(prefix="pflmpi-") as scratch:
        file, errors = Path(scratch) / "config.yaml", Path(scratch) / "errors"
        file.write_text(yaml_file.dump(config.resolved()))
        words = ["run", str(file), "--out", str(folder), "--error-file", str(errors), "--stop-at-eof"]
        words += [] if ranks is None else ["--ranks", str(ranks)]
        words += [*(["--continue"] if resume else []), *(["--quiet"] if quiet else [])]
        done = run_folder.rounds(folder)[-1:] if resume and folder.is_dir() else []
        with NewRounds(folder, *(done or [0])) as rounds:
            code = _watch(words, rounds, on_round)
        if code != 0:
            raise recorded(errors) or _unexplained(code, folder)
    return folder


def _watch(words: list[str], rounds: NewRounds, on_round: OnRound | None) -> int:
    """Exit code of `pflmpi WORDS`; where this process is interrupted, the other one stops after its round first."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "pflmpi", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},  # as here
        start_new_session=True,  # an interrupt reaches this process alone, which decides
    ) as process:
        shower = threading.Thread(target=_show, args=(process,), name="pflmpi-progress", daemon=True)
        shower.start()
        try:
            while _ended(process, _EVERY) is None:
                _tell(rounds, on_round)
            _tell(rounds, on_round)
        except BaseException:
            _stop(process)
            raise
        finally:
            shower.join()
    return process.returncode


def _tell(rounds: NewRounds, on_round: OnRound | None) -> None:
    if on_round is not None:
        for row in rounds:
            on_round(row)


def _ended(process: "subprocess.Popen[str]", seconds: float) -> int | None:
    with suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    return None


def _stop(process: "subprocess.Popen[str]") -> None:
    """Let a run end after its round; at another interrupt, kill it."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait()
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def _show(process: "subprocess.Popen[str]") -> None:
    """Show what a process says where this one shows things, which in a notebook is no file."""
    assert process.stderr is not None
    for line in process.stderr:
        print(line, end="", file=sys.stderr, flush=True)


def _unexplained(code: int, folder: Path) -> Exception:
    if code == Stopped.exit_code:
        return Stopped(f"the run was asked to stop; go on with resume=True, out={str(folder)!r}")
    how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
    return RunError(f"the process of the run {how}; go on with resume=True, out={str(folder)!r}")
