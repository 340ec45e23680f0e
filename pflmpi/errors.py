"""Errors, the exit code of each, and how they are shown.

    PflmpiError
    ├── UserError (2)            something the user can fix before the run starts
    │   ├── ConfigError          a key, a type, a value, or a combination of them
    │   ├── DataError            a dataset or partition that is missing, unreadable or impossible
    │   └── CheckpointError      a run on disk that is damaged or does not match
    ├── RunError (3)             a fault during the run
    │   ├── AlgorithmError       an algorithm that broke its contract
    │   └── TransportError       a rank died, left, or did not answer in time
    └── Stopped (75)             the run was asked to stop and did so after a complete round

Each message says what is wrong, the value found, what is allowed, and what to do.
"""

import contextlib
import json
import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pflmpi import limits
from pflmpi.text import printable, short_repr


class PflmpiError(Exception):
    """Base of all errors that are shown without a traceback."""

    exit_code = 3


class UserError(PflmpiError):
    """Invalid input: nothing was started, nothing is lost."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration that cannot be run."""


class DataError(UserError):
    """A dataset or partition that is missing, unreadable or impossible."""


class CheckpointError(UserError):
    """A run folder that is damaged or does not match the configuration."""


class RunError(PflmpiError):
    """A fault during the run; what is on disk stays intact."""


class AlgorithmError(RunError):
    """An algorithm raised, or returned what its contract does not allow; names its class and method."""


class TransportError(RunError):
    """A rank died, left, or did not answer in time."""


class Stopped(PflmpiError):
    """The run was asked to stop and did so after a complete round."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later


def show(error: BaseException, debug: bool = False, rank: int = 0, file: Path | None = None) -> None:
    """Print an error on the terminal, with its traceback if `debug` is set; or append it to a file for `recorded`."""
    if debug:
        traceback.print_exception(error)
    is_expected = isinstance(error, PflmpiError)
    where = f"rank {rank}: " if rank else ""
    if file is not None:
        text = str(error) if is_expected else "".join(traceback.format_exception(error))
        with open(file, "a") as lines:
            lines.write(json.dumps({"kind": kind_of(error), "text": where + text}) + "\n")
        return
    text = str(error) if is_expected else f"internal error: {short_repr(error, 300)}; --debug shows where"
    line = f"pflmpi: {where}{printable(text)}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError):  # stderr is closed, or a pipe that nobody reads
        os.write(2, line)  # one call, so that lines of several ranks do not mix


def recorded(file: Path) -> PflmpiError | None:
    """Read the first error that `show` appended to a file; None if there is none."""
    lines = file.read_text().splitlines() if file.exists() else []
    return of_kind(**json.loads(lines[0])) if lines else None


def kind_of(error: BaseException) -> str:
    """Name of the class of an error in the tree above, or of its nearest base class there."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__), RunError.__name__)


def of_kind(kind: str, text: str) -> PflmpiError:
    """Make an error of the class that `kind_of` named."""
    error: PflmpiError = globals()[kind](text)
    return error


_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "RANK", "SLURM_PROCID")  # the innermost launcher's first


def launched_rank(environ: Mapping[str, str]) -> str | None:
    """The rank of this process by its launcher's environment variables; None without a launcher."""
    return next((environ[name] for name in _RANKS if name in environ), None)


def write_exit_code(environ: Mapping[str, str], code: int | Literal["lost", ""]) -> None:
    """Write the exit code of the ranks to PFLMPI_EXIT_FILE for the wrappers in launch/; launchers may return another.

    Rank 0 writes "lost" while the ranks run, so that the file says so after a rank was killed or lost. The wrappers
    then restart the ranks, and trust an exit code 0 of the launcher only if the file confirms it. "lost" does not
    overwrite the 75 of a rank that a signal stopped before the run began.

    Raises:
        ConfigError: "lost" cannot be written. An exit code that cannot be written is left to the launcher.
    """
    path = environ.get("PFLMPI_EXIT_FILE")
    if path and code == "lost":
        try:
            _write_lost(path)
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}, which tells launch/ how the ranks end: {error.strerror}; free space in that "
                "folder and make it writable, or start in another folder"
            ) from error
    elif path:
        with contextlib.suppress(OSError):
            Path(path).write_text(f"{code}\n")


def _write_lost(path: str) -> None:
    with open(path, "a+") as file:
        file.seek(0)
        if file.read().strip() != str(Stopped.exit_code):
            file.truncate(0)
            file.write("lost\n")


def write_end(environ: Mapping[str, str]) -> None:
    """Write "ended" to PFLMPI_EXIT_FILE if rank 0 exits without having written a code, as the rank of a script does."""
    with contextlib.suppress(OSError):
        path = Path(environ["PFLMPI_EXIT_FILE"])
        if launched_rank(environ) in (None, "0") and not path.read_text().strip():
            path.write_text("ended\n")


def exit_code_before(environ: Mapping[str, str]) -> int | None:
    """The exit code of the ranks before a launcher restarted them; None if a rank was lost."""
    path = environ.get("PFLMPI_EXIT_FILE")
    text = Path(path).read_text().strip() if path and Path(path).exists() else ""
    return int(text) if text.isdecimal() else None


def explained(error: Exception, kind: type[PflmpiError] = UserError) -> Exception:
    """Turn an error about a limit of the system, or about a file, into one of class `kind`; return others unchanged."""
    text = None if isinstance(error, PflmpiError) else limits.explain_limit(error)
    if text is None and isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}; choose another path, or make it accessible"
    if text is None:
        return error
    explanation = kind(text)
    explanation.__cause__ = error
    return explanation
