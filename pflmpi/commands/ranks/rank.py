"""A rank of `pflmpi run`, `resume` or `join`: connected to the others, through all rounds, ended together with them."""

import argparse
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from pflmpi import early_signals, limits, outside
from pflmpi.commands.display.progress import RunProgress, show_summary
from pflmpi.commands.display.start_line import start_line
from pflmpi.commands.ranks.context import connect, end_of_jobs
from pflmpi.commands.ranks.launch import check_ranks, num_gpus, num_ranks, start_ranks
from pflmpi.commands.ranks.session import Session, Start
from pflmpi.config.load import Config
from pflmpi.errors import (
    ConfigError,
    PflmpiError,
    RunError,
    Stopped,
    TransportError,
    UserError,
    explained,
    show,
    write_exit_code,
)
from pflmpi.runtime.faults import CollectiveError
from pflmpi.runtime.stopping import Stop, noted_signals
from pflmpi.store.names import rounds
from pflmpi.text import for_shell
from pflmpi.transports import refuse_unless_fault_tolerant
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import ALONE, Launch, detect
from pflmpi.transports.peers import ended
from pflmpi.transports.process_exit import exit_process
from pflmpi.transports.slurm import end_of_job

# Seconds that the rank with the cause has to show it, and the launcher to stop us: an error that all ranks raise is
# shown by rank 0, and losing another rank is only a consequence.
_HEAD_START = 3.0


@dataclass(frozen=True)
class Prepared:
    """What a rank is to do.

    Attributes:
        config: the configuration.
        folder: of the run.
        start: starts or continues the run there, and returns the folder.
        join: connects to the ranks of a run that is under way; None where the ranks are those started together.
    """

    config: Config
    folder: Path
    start: Start
    join: Callable[[Launch], Transport] | None = None


def run_rank(options: argparse.Namespace, prepare: Callable[[Launch], Prepared]) -> int:
    """Run an experiment on this rank, or start all ranks if no launcher has; return the exit code.

    Between ranks the process ends here: in order if all ranks know why, otherwise by aborting all of them.
    """
    launch, session, resumable = ALONE, None, None  # `resumable`: the run that this process tells the user of
    try:
        launch = detect(os.environ)
        if options.stop_at_eof and launch.kind == "alone":
            threading.Thread(target=_stop_at_eof, name="stop-at-eof", daemon=True).start()
        if launch.rank > 0:
            logging.getLogger().setLevel(logging.ERROR)
        check_ranks(options.ranks)
        prepared = prepare(launch)
        config, join = prepared.config, prepared.join
        resumable = None if launch.rank or join is not None or options.announced else prepared.folder
        if config.runtime.faults == "continue":
            refuse_unless_fault_tolerant(config.runtime.transport, launch)
        ranks = num_ranks(options.ranks, config, launch, joins=join is not None)
        if low := limits.too_few_files(ranks):
            raise ConfigError(low)
        if launch.rank == 0 and not (options.quiet or options.announced):
            print(start_line(config, prepared.folder, ranks), file=sys.stderr, flush=True)
        if ranks > 1 and launch.kind == "alone":
            told = [] if join is not None else ["--announced", str(prepared.folder)]
            options.announced = None if join is not None else prepared.folder
            rank_main = partial(run_rank, options, prepare) if num_gpus(config.runtime) is None else None
            return start_ranks(ranks, [*options.words[:1], *told, *options.words[1:]], rank_main)
        transport = connect(config, launch) if join is None else join(launch)
        session = among = Session(transport, launch, prepared.folder)
        own_end = end_of_job if launch.rank == 0 else lambda _: None  # the job of those that join may be another one
        stop = Stop(end_of_jobs(transport) if join is None else own_end(os.environ), config.runtime.spare)
        with (
            RunProgress(config.training.rounds, options.quiet, options.bar, transport.rank) as progress,
            noted_signals(stop, lambda: bool(ended(among.transport.peers))),
        ):
            early_signals.begun()
            run = session.run(config, prepared.start, stop, progress, options.take_over)
        if session.transport.rank == 0:
            show_summary(run, config)
        _leave(session.transport, launch, 0)
    except (CollectiveError, Stopped) as reason:  # on every rank
        assert session is not None
        transport = session.transport
        error: PflmpiError = Stopped(f"{reason}; `pflmpi resume {for_shell(session.folder)}` continues")
        if isinstance(reason, CollectiveError):
            error = reason.error
        if transport.rank == 0:
            if options.debug:
                traceback.print_exception(reason)
            show(error, file=options.error_file)
        with suppress(TransportError):
            transport.barrier()  # so that no launcher kills rank 0 before it has shown the error
        _leave(transport, launch, error.exit_code)
    except KeyboardInterrupt:
        if resumable is not None and rounds(resumable):
            how = f"`pflmpi resume {for_shell(resumable)}` continues from the newest checkpoint"
            print(f"pflmpi: interrupted; {how}", file=sys.stderr)
        return _abort(session, 130, launch.rank)
    except Exception as caught:
        where = None if isinstance(caught, PflmpiError) else outside.cause(caught)
        fault = RunError(where) if where else explained(caught, UserError if session is None else RunError)
        if isinstance(fault, TransportError) or (session is None and launch.rank > 0):
            time.sleep(_HEAD_START)
        code = fault.exit_code if isinstance(fault, PflmpiError) else RunError.exit_code
        if code or launch.rank == 0:
            show(fault, options.debug, launch.rank, options.error_file)
        return _abort(session, code, launch.rank)


def _stop_at_eof() -> None:
    """Stop after the round once nobody holds the other end of stdin."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _leave(transport: Transport, launch: Launch, code: int) -> NoReturn:
    """End in order with the other ranks."""
    if launch.rank == 0 or transport.rank == 0 or transport.fault_tolerant:  # rank 0 may die now
        write_exit_code(os.environ, code)
    exit_process(transport, code)


def _abort(session: Session | None, code: int, rank: int) -> int:
    """End all ranks; alone, return the code."""
    sys.stdout.flush()
    if (rank if session is None else session.transport.rank) == 0:
        write_exit_code(os.environ, code)
    if session is not None and session.transport.size > 1:
        session.transport.abort(code)
    return code
