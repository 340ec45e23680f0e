"""`pflmpi.run`: in a notebook or script its ranks are processes; under a launcher each rank calls it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from pflmpi import early_signals, outside
from pflmpi.analysis.run import Run, open_run
from pflmpi.commands.launch import num_ranks
from pflmpi.commands.progress import RunProgress, round_display
from pflmpi.commands.rank import connect, end_of_jobs, make_context, show_start
from pflmpi.config import keywords, yaml_file
from pflmpi.config.argument_checks import as_integer, as_path, wrong_type
from pflmpi.config.load import Config, parse
from pflmpi.errors import (
    ConfigError,
    PflmpiError,
    RunError,
    Stopped,
    TransportError,
    exit_code_before,
    explained,
    recorded,
    show,
    write_exit_code,
)
from pflmpi.experiment import run as experiment
from pflmpi.python.fresh_process import fresh_process
from pflmpi.runtime.faults import CollectiveError
from pflmpi.runtime.progress import Observer, Progress
from pflmpi.runtime.stopping import Stop, noted_signals
from pflmpi.store import metrics_file
from pflmpi.text import short_name
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import detect
from pflmpi.transports.peers import describe_ended

__all__ = ["run"]

Row = dict[str, int | float]
OnRound = Callable[[Row], object]


@dataclass(frozen=True)
class _RunArguments:
    config: Config
    folder: Path
    ranks: int | None
    on_round: OnRound | None
    resume: bool
    changed_code: bool
    quiet: bool


_CONFIG = "a pflmpi.Config, or the path of a YAML file; pflmpi.Config(**sections) makes one from a mapping of sections"


def run(
    config: "Config | str | PathLike[str]",
    *,
    out: "str | PathLike[str] | None" = None,
    ranks: int | None = None,
    on_round: OnRound | None = None,
    resume: bool = False,
    changed_code: bool = False,
    quiet: bool = False,
    in_process: bool = False,
) -> Run:
    """Run a configuration to its end, and open the run.

    Alone, as in a notebook, the ranks are processes of this machine, and this process stays as it is. A small run is
    quicker with `in_process=True`: one rank, in this process, whose settings of torch are put back. Under mpirun,
    torchrun or srun every rank calls it, with the same arguments, as often as it likes. An interrupt (Ctrl-C) stops
    after the round with a checkpoint, a second one at once; `resume=True` goes on.

    Args:
        config: a `pflmpi.Config`, or the path of a YAML file.
        out: folder of the run (default: runs/NAME-TIME).
        ranks: processes to start (default: one per GPU, or per core); under a launcher it must be what that started.
        on_round: called after each round with its line of metrics.csv, under a launcher only on rank 0; if it raises,
            the run stops after that round and the error is raised here.
        resume: go on with the run in `out` if there is one, as `pflmpi run --continue` does.
        changed_code: go on even if your own Python files have changed since the run started.
        quiet: show no progress.
        in_process: start no process; without effect under a launcher.

    Raises:
        UserError: what cannot be run; nothing was started. `ConfigError` where `out` holds a run already.
        RunError: a fault during the run; what is on disk stays intact.
        Stopped: the run was asked to stop, by a signal or the end of a batch job, and did so after a complete round.
    """
    if ranks is not None and (ranks := as_integer("ranks", ranks)) < 1:
        raise ConfigError(f"ranks = {ranks!r}: must be a whole number of at least 1")
    if out == "":
        raise ConfigError("out = '' names no folder; give one, or None for runs/NAME-TIME")
    if resume and out is None:
        raise ConfigError("resume=True without out: give the folder of the run to go on with")
    if on_round is not None and not callable(on_round):
        raise wrong_type("on_round", on_round, "a function of one argument, the line of metrics.csv")
    if isinstance(config, Config):
        name = config.resolved()["algorithm"]["name"]
    else:
        path = as_path("config", config, _CONFIG)
        config, name = keywords.Config.load(path), path.stem
    default = Path("runs", f"{short_name(name)}-{time.strftime('%Y%m%d-%H%M%S')}")
    folder = default if out is None else as_path("out", out)
    arguments = _RunArguments(config, folder, ranks, on_round, resume, changed_code, quiet)
    start: Callable[[_RunArguments], Path]
    if detect(os.environ).kind != "alone":
        start = _run_on_this_rank
    else:
        start = _run_in_this_process if in_process else _run_in_processes
    return open_run(start(arguments))


def parse_row(line: Mapping[str, object]) -> Row:
    """Converts a line of metrics.csv to numbers; NaN where a round has no value."""
    return {
        name: int(str(value)) if metrics_file.is_count(name) else float(str(value) or "nan")
        for name, value in line.items()
    }


_POLL_SECONDS = 0.1


def _run_in_processes(arguments: _RunArguments) -> Path:
    with TemporaryDirectory(prefix="pflmpi-") as scratch:
        file, errors, rounds = (Path(scratch) / name for name in ("config.yaml", "errors", "rounds"))
        file.write_text(yaml_file.dump(arguments.config.resolved()))
        rounds.touch()
        words = ["run", str(file), "--out", str(arguments.folder), "--error-file", str(errors), "--stop-at-eof"]
        words += [] if arguments.ranks is None else ["--ranks", str(arguments.ranks)]
        words += [] if arguments.on_round is None else ["--rounds-file", str(rounds)]
        words += (
            ["--continue"] * arguments.resume
            + ["--changed-code"] * arguments.changed_code
            + ["--quiet"] * arguments.quiet
        )
        with rounds.open("rb") as lines:
            code = _run_command(words, lines, arguments.on_round)
        if code != 0:
            raise recorded(errors) or _explain_exit_code(code, arguments.folder)
    return arguments.folder


def _run_command(words: list[str], rounds: BinaryIO, on_round: OnRound | None) -> int:
    """Runs `pflmpi WORDS` and returns its exit code; if this process is interrupted, that one ends its round first."""
    environ = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}  # set by notebooks
    environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "pflmpi", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environ,
        start_new_session=True,  # only this process gets an interrupt
    ) as process:
        progress = threading.Thread(target=_show_stderr, args=(process,), name="pflmpi-progress", daemon=True)
        progress.start()
        try:
            while _wait(process, _POLL_SECONDS) is None:
                _report_rounds(rounds, on_round)
            _report_rounds(rounds, on_round)
        except BaseException:
            _stop_process(process)
            raise
        finally:
            progress.join()
    if exit_code_before(os.environ) is not None:
        write_exit_code(os.environ, "")  # this process goes on, and will write its own exit code
    return process.returncode


def _report_rounds(rounds: BinaryIO, on_round: OnRound | None) -> None:
    """Calls the user's function for the rounds since the last call."""
    while on_round is not None and (line := rounds.readline()):
        if not line.endswith(b"\n"):  # still being written
            rounds.seek(-len(line), os.SEEK_CUR)
            return
        on_round(parse_row(json.loads(line)))


def _wait(process: "subprocess.Popen[str]", seconds: float) -> int | None:
    with suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    return None


def _stop_process(process: "subprocess.Popen[str]") -> None:
    """Asks a run to stop after its round, and waits; kills it at another interrupt."""
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


def _show_stderr(process: "subprocess.Popen[str]") -> None:
    """Shows the standard error of a process on this one's, which in a notebook is no file."""
    assert process.stderr is not None
    show_round = round_display()
    for line in process.stderr:
        if line.startswith("round "):
            show_round(line.rstrip("\n"))
        else:
            print(line, end="", file=sys.stderr, flush=True)


def _explain_exit_code(code: int, folder: Path) -> Exception:
    if code == Stopped.exit_code:
        return Stopped(f"the run was asked to stop; go on with resume=True, out={str(folder)!r}")
    end = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
    return RunError(f"the process of the run {end}; go on with resume=True, out={str(folder)!r}")


def _run_in_this_process(arguments: _RunArguments) -> Path:
    if arguments.ranks not in (None, 1):
        raise ConfigError(f"ranks = {arguments.ranks} with in_process=True, which has 1; leave one of them out")
    with fresh_process():
        return _run_on_this_rank(replace(arguments, ranks=1), interrupts=_stop_at_interrupt)


@contextmanager
def _stop_at_interrupt(stop: Stop) -> Iterator[None]:
    """Stops after the round at an interrupt, and raises it then; raises a second one at once."""
    interrupted = False

    def handle(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, before)
        stop.reason = stop.reason or "interrupted"

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    except Stopped:
        if not interrupted:
            raise
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt


_run_numbers = count()  # ranks connect anew for each run of this process


def _run_on_this_rank(
    arguments: _RunArguments, interrupts: Callable[[Stop], AbstractContextManager[None]] | None = None
) -> Path:
    """Runs a configuration together with the other ranks; returns the folder.

    A collective error is raised on all ranks. An error of this rank alone ends all ranks, which would wait for it.
    """
    launch = replace(detect(os.environ), runs=next(_run_numbers))
    num_ranks(arguments.ranks, arguments.config, launch)
    config = parse(arguments.config.resolved())
    transport = connect(config, launch)
    on_round_errors: list[Exception] = []
    try:
        if launch.rank == 0:
            write_exit_code(os.environ, "lost")
        resumes = arguments.resume or launch.restarts > 0
        stop = Stop(end_of_jobs(transport), config.runtime.spare)
        is_main = threading.current_thread() is threading.main_thread()  # only it can handle signals
        with (
            RunProgress(config, arguments.quiet, False, transport.rank) as progress,
            noted_signals(stop, lambda: bool(describe_ended(transport.peers))) if is_main else nullcontext(),
            interrupts(stop) if is_main and interrupts else nullcontext(),
        ):
            early_signals.stop_watching()
            placed, context = make_context(config, transport, launch, stop)
            context = replace(
                context, announce=partial(show_start, config, arguments.folder, context, launch, arguments.quiet)
            )
            observe = _make_observer(progress, arguments.on_round, stop, on_round_errors)
            start = partial(
                experiment.run, placed, arguments.folder, context, observe, changed_code=arguments.changed_code
            )
            run = start(resume="if_there" if resumes else "never")
        transport.close(goes_on=True)
    except (CollectiveError, Stopped) as reason:  # raised on every rank
        if launch.rank == 0:
            write_exit_code(os.environ, "")
        with suppress(TransportError):
            transport.close(goes_on=True)
        if on_round_errors:
            raise on_round_errors[0] from None
        if isinstance(reason, CollectiveError):
            raise reason.error from reason
        raise Stopped(f"{reason}; go on with resume=True, out={str(arguments.folder)!r}") from reason
    except BaseException as error:
        _abort_all(transport, error)
        raise
    if launch.rank == 0:
        write_exit_code(os.environ, "")  # the process goes on, and will write its own exit code
    if on_round_errors:
        raise on_round_errors[0]
    return run


def _make_observer(show_round: Observer, on_round: OnRound | None, stop: Stop, errors: list[Exception]) -> Observer:
    """Returns an observer that also calls `on_round`; an error of that stops all ranks after the round."""

    def observe(round: Progress) -> None:
        show_round(round)
        if on_round is None or errors:
            return
        try:
            on_round(parse_row(round.columns))
        except Exception as error:
            errors.append(error)
            stop.reason = stop.reason or "on_round raised an error"

    return observe


def _abort_all(transport: Transport, error: BaseException) -> None:
    """Ends all ranks if there are others, which wait for this one."""
    if transport.size == 1:
        return
    shown: BaseException = error
    if isinstance(error, Exception):
        cause = None if isinstance(error, PflmpiError) else outside.describe_cause(error)
        shown = RunError(cause) if cause else explained(error, RunError)
    show(shown, rank=transport.rank)
    code = shown.exit_code if isinstance(shown, PflmpiError) else RunError.exit_code
    if not isinstance(shown, TransportError):
        write_exit_code(os.environ, code)
    transport.abort(code)
