"""A run of which this process is a rank that a launcher has started; the process goes on after it."""

import os
import sys
import threading
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from pflmpi import early_signals, outside
from pflmpi.commands.context import connect, context_of, end_of_jobs
from pflmpi.commands.launch import num_ranks
from pflmpi.commands.progress import RunProgress
from pflmpi.commands.rank import start_line
from pflmpi.config.load import Config, parse
from pflmpi.errors import PflmpiError, RunError, Stopped, TransportError, explained, show, write_exit_code
from pflmpi.experiment import run as experiment
from pflmpi.python.rounds import OnRound, row
from pflmpi.runtime.faults import CollectiveError
from pflmpi.runtime.progress import Observer, Progress
from pflmpi.runtime.stopping import Stop, noted_signals
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import detect
from pflmpi.transports.peers import ended

_runs = count()  # of this process, whose ranks meet anew for each


def run(config: Config, folder: Path, ranks: int | None, on_round: OnRound | None, resume: bool, quiet: bool) -> Path:
    """Run a configuration together with the other ranks; return the folder. See `pflmpi.run`.

    An error that all ranks know of is raised on all. One of this rank alone ends all ranks: they would wait for it.
    """
    launch = replace(detect(os.environ), runs=next(_runs))
    size = num_ranks(ranks, config, launch)
    if launch.rank == 0 and not quiet:
        print(start_line(config, folder, size), file=sys.stderr, flush=True)
    config = parse(config.resolved())
    transport = connect(config, launch)
    if launch.rank == 0:
        write_exit_code(os.environ, "lost")
    raised: list[Exception] = []  # by `on_round`
    try:
        resumes = resume or launch.restarts > 0
        stop = Stop(end_of_jobs(transport), config.runtime.spare)
        main = threading.current_thread() is threading.main_thread()  # which alone can watch for signals
        with (
            RunProgress(config.training.rounds, quiet, False, transport.rank) as progress,
            noted_signals(stop, lambda: bool(ended(transport.peers))) if main else nullcontext(),
        ):
            early_signals.begun()
            placed, context = context_of(config, transport, launch, stop)
            observe = _telling(progress, on_round, stop, raised)
            found = experiment.run(placed, folder, context, observe, resume="if_there" if resumes else "never")
        transport.close(goes_on=True)
    except (CollectiveError, Stopped) as reason:  # on every rank
        if launch.rank == 0:
            write_exit_code(os.environ, "")
        with suppress(TransportError):
            transport.close(goes_on=True)
        if raised:
            raise raised[0] from None
        if isinstance(reason, CollectiveError):
            raise reason.error from reason
        raise Stopped(f"{reason}; go on with resume=True, out={str(folder)!r}") from reason
    except BaseException as error:
        _end_all(transport, error)
        raise
    if launch.rank == 0:
        write_exit_code(os.environ, "")  # the process goes on, and says itself how it ended
    if raised:
        raise raised[0]
    return found


def _telling(show_round: Observer, on_round: OnRound | None, stop: Stop, raised: list[Exception]) -> Observer:
    """An observer for the user's function too; what that raises stops all ranks after the round."""

    def tell(round: Progress) -> None:
        show_round(round)
        if on_round is None or raised:
            return
        try:
            on_round(row(round.columns))
        except Exception as error:
            raised.append(error)
            stop.reason = stop.reason or "on_round raised an error"

    return tell


def _end_all(transport: Transport, error: BaseException) -> None:
    """End all ranks if there are others: they wait for this one."""
    if transport.size > 1:
        where = None if isinstance(error, PflmpiError) or not isinstance(error, Exception) else outside.cause(error)
        shown = RunError(where) if where else explained(error, RunError) if isinstance(error, Exception) else error
        show(shown, rank=transport.rank)
        code = shown.exit_code if isinstance(shown, PflmpiError) else RunError.exit_code
        if not isinstance(shown, TransportError):
            write_exit_code(os.environ, code)
        transport.abort(code)
