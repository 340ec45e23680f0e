"""A rank of `pflmpi run` or `resume`: connects to the others, runs all rounds, and ends together with them."""

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

import pflmpi
from pflmpi import early_signals, limits, outside
from pflmpi.commands.launch import check_ranks, check_restarts, num_gpus, num_ranks, start_ranks
from pflmpi.commands.progress import RunProgress, show_summary, show_usage
from pflmpi.config.load import Config
from pflmpi.errors import (
    ConfigError,
    PflmpiError,
    RunError,
    Stopped,
    TransportError,
    UserError,
    exit_code_before,
    explained,
    show,
    write_exit_code,
)
from pflmpi.experiment.run import RankContext
from pflmpi.machine import cores, gpus, requested_gpus
from pflmpi.runtime.config import LEAST_TIMEOUT
from pflmpi.runtime.devices import choose_gpus, find_device, fix_kernels, gpu_messages, limit_memory
from pflmpi.runtime.faults import CollectiveError, all_or_none
from pflmpi.runtime.progress import Observer, Progress
from pflmpi.runtime.stopping import Stop, noted_signals
from pflmpi.store import job_file, run_folder
from pflmpi.store.names import rounds
from pflmpi.text import for_shell, join_truncated, pluralize, short_name
from pflmpi.transports import introduce, open_transport
from pflmpi.transports.base import Transport, exit_unconnected
from pflmpi.transports.detect import ALONE, Launch, detect
from pflmpi.transports.peers import Peer, describe_ended
from pflmpi.transports.slurm import find_end_of_job, read_allocation

_log = logging.getLogger(__name__)

Start = Callable[[Config, Path, RankContext, Observer], Path]  # starts or continues a run, and returns its folder

# Seconds before a rank shows an error that follows from another rank's: that one shows the cause, and the launcher then
# stops this rank.
_HEAD_START = 3.0


@dataclass(frozen=True)
class Prepared:
    """A run to start or continue: its configuration and folder, and the function that does it."""

    config: Config
    folder: Path
    start: Start


@dataclass
class _Rank:
    """State that the end of a rank depends on, filled in as the rank gets there."""

    launch: Launch = ALONE  # how it was started
    folder: Path | None = None  # of the run
    resumable: Path | None = None  # the run to name after Ctrl-C; None if another process does so
    transport: Transport | None = None  # to the other ranks; None before it is connected


def run_rank(options: argparse.Namespace, prepare: Callable[[Launch], Prepared]) -> int:
    """Run an experiment on this rank, or start all ranks if no launcher has; return the exit code.

    With several ranks the process exits here: in order if all ranks know why, otherwise by aborting all of them.
    """
    rank = _Rank()
    try:
        return _start(rank, options, prepare)
    except (CollectiveError, Stopped) as reason:  # raised on every rank
        _end_together(rank, reason, options)
    except KeyboardInterrupt:
        if rank.resumable is not None and rounds(rank.resumable):
            how = f"`pflmpi resume {for_shell(rank.resumable)}` continues from the newest checkpoint"
            print(f"pflmpi: interrupted; {how}", file=sys.stderr)
        return _abort(rank.transport, 130)
    except Exception as error:
        return _end_after(rank, error, options)


def _start(rank: _Rank, options: argparse.Namespace, prepare: Callable[[Launch], Prepared]) -> int:
    """Run this rank, or start all of them and wait for their exit code."""
    rank.launch = launch = detect(os.environ)
    if options.stop_at_eof and launch.kind == "alone":
        threading.Thread(target=_stop_at_eof, name="stop-at-eof", daemon=True).start()
    if launch.rank > 0:
        logging.getLogger().setLevel(logging.ERROR)
    check_ranks(options.ranks)
    check_restarts(options.restarts, launch, options.announced is not None)
    prepared = prepare(launch)
    config, rank.folder = prepared.config, prepared.folder
    rank.resumable = None if launch.rank or options.announced else prepared.folder
    ranks = num_ranks(options.ranks, config, launch)
    if problem := limits.check_file_limit(ranks):
        raise ConfigError(problem)
    if (ranks > 1 or options.restarts) and launch.kind == "alone":
        options.announced = prepared.folder
        rank_main = partial(run_rank, options, prepare) if num_gpus(config.runtime) is None else None
        words = [*options.words[:1], "--announced", str(prepared.folder), *options.words[1:]]
        return start_ranks(ranks, words, rank_main, options.restarts)
    if launch.restarts and (code := exit_code_before(os.environ)) is not None:
        return code  # torchrun restarts ranks after any exit code
    _run_rounds(rank, prepared, options)


def _run_rounds(rank: _Rank, prepared: Prepared, options: argparse.Namespace) -> NoReturn:
    """Connect to the other ranks, run all rounds, and end with them."""
    launch, config = rank.launch, prepared.config
    if launch.rank == 0:
        write_exit_code(os.environ, "lost")
    rank.transport = transport = connect(config, launch)
    stop = Stop(end_of_jobs(transport), config.runtime.spare)
    with (
        RunProgress(config, options.quiet, options.bar, transport.rank) as progress,
        noted_signals(stop, lambda: bool(describe_ended(transport.peers))),
    ):
        early_signals.stop_watching()
        resolved, context = make_context(config, transport, launch, stop, options.take_over)
        announce = partial(show_start, config, prepared.folder, context, launch, options.quiet)
        context = replace(context, announce=announce)
        observe = progress if options.rounds_file is None else _recording(progress, options.rounds_file)
        run = prepared.start(resolved, prepared.folder, context, observe)
    if transport.rank == 0:
        show_summary(run, config)
    _leave(transport, 0)


def _recording(observe: Observer, file: Path) -> Observer:
    """Make an observer that also appends the columns of each round to a file, as a line of JSON."""

    def record(round: Progress) -> None:
        observe(round)
        with file.open("a") as lines:
            lines.write(json.dumps(round.columns) + "\n")

    return record


def _end_together(rank: _Rank, reason: CollectiveError | Stopped, options: argparse.Namespace) -> NoReturn:
    """End all ranks, which all know the reason; rank 0 shows it."""
    transport = rank.transport
    assert transport is not None and rank.folder is not None
    if isinstance(reason, CollectiveError):
        error = reason.error
    else:
        error = Stopped(f"{reason}; `pflmpi resume {for_shell(rank.folder)}` continues")
    if transport.rank == 0:
        if options.debug:
            traceback.print_exception(reason)
        show(error, file=options.error_file)
        show_usage(rank.folder)
    with suppress(TransportError):
        transport.barrier()  # otherwise a launcher may kill rank 0 before it has shown the error
    _leave(transport, error.exit_code)


def _end_after(rank: _Rank, error: Exception, options: argparse.Namespace) -> int:
    """Show an error that only this rank has, and abort all ranks; without others, return its exit code."""
    connected = rank.transport is not None
    cause = None if isinstance(error, PflmpiError) else outside.describe_cause(error)
    fault = RunError(cause) if cause else explained(error, RunError if connected else UserError)
    if isinstance(fault, TransportError) or (not connected and rank.launch.rank > 0):
        time.sleep(_HEAD_START)
    code = fault.exit_code if isinstance(fault, PflmpiError) else RunError.exit_code
    if code or rank.launch.rank == 0:
        show(fault, options.debug, rank.launch.rank, options.error_file)
    return _abort(rank.transport, code, lost=isinstance(fault, TransportError))


def connect(config: Config, launch: Launch) -> Transport:
    """Connect to the other ranks; the process exits if that takes longer than the timeout."""
    runtime = config.runtime
    timeout = LEAST_TIMEOUT if runtime.timeout is None else runtime.timeout
    return open_transport(runtime.transport, launch, timeout, partial(exit_unconnected, launch.rank, os.environ))


def make_context(
    config: Config, transport: Transport, launch: Launch, stop: Stop, take_over: bool = False
) -> tuple[Config, RankContext]:
    """Agree with the other ranks on devices; return the configuration that results, and the context of this rank.

    Raises:
        CollectiveError: on all ranks, if the ranks cannot compute together.
    """
    visible_gpus = () if config.runtime.device == "cpu" else gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    introduce(transport, Peer.here(cores(), visible_gpus, requested_gpus(os.environ)))
    placement = all_or_none(transport, lambda: choose_gpus(transport.peers, config.runtime, config.training))
    if transport.rank == 0 and placement.remark():
        _log.warning("%s", placement.remark())
    device = find_device(placement, transport.rank)
    fix_kernels(device, config.runtime, config.training)
    limit_memory(placement, transport.rank, config.runtime)
    between_gpus = gpu_messages(placement, transport.name, config.runtime.between_gpus)
    if between_gpus.ranks:
        transport.use_gpus(between_gpus.ranks, device)
    if between_gpus.text and transport.rank == 0:
        _log.info("large messages: %s", between_gpus.text)
    if placement.serves_only:
        config = replace(config, runtime=config.runtime.model_copy(update={"server": "dedicated"}))
    start = _describe_start(transport.peers)
    context = RankContext(transport, device, placement.slots, placement.models, stop, launch.jobs, take_over, start)
    return config, context


def _describe_start(peers: Sequence[Peer]) -> job_file.Start:
    """Time, hosts, resources, interpreter and versions of this start; in a job, the resources are those allocated."""
    hosts = tuple(dict.fromkeys(peer.host for peer in peers))
    core_count = len({(peer.host, core) for peer in peers for core in peer.cores})
    gpu_count = len({gpu.uuid for peer in peers for gpu in peer.gpus})
    job_nodes, job_cores, job_gpus = read_allocation(os.environ)
    resources = (job_nodes or len(hosts), job_cores or core_count, job_gpus or gpu_count)
    versions = (pflmpi.__version__, torch.__version__)
    return job_file.Start(time.time(), hosts, len(peers), *resources, sys.executable, *versions)


def show_start(config: Config, folder: Path, context: RankContext, launch: Launch, quiet: bool) -> None:
    """Print a line on the run that starts, and one with interpreter, versions, ranks and hosts, job and restarts."""
    is_complete = max(run_folder.rounds(folder), default=0) >= config.training.rounds  # of which the user is told
    if is_complete or (quiet and not launch.jobs):
        return
    if not quiet:
        print(_format_run(config, folder, context.transport.size), file=sys.stderr, flush=True)
    words = [str(context.start), *(f"{job}, restart {restarts}" for job, restarts in launch.jobs.items())]
    words += [f"start {launch.restarts + 1} of these ranks"] if launch.restarts else []
    print("; ".join(words), file=sys.stderr, flush=True)


def end_of_jobs(transport: Transport) -> float | None:
    """Time at which this batch job ends, None if unknown; only rank 0 asks, to spare the queue manager."""
    job_end = find_end_of_job(os.environ) if transport.rank == 0 else None
    end = float(transport.maximum(np.array([-np.inf if job_end is None else job_end]))[0])
    return None if end == -np.inf else end


def _format_run(config: Config, folder: Path, ranks: int) -> str:
    """The run in one line, with the round after which it continues if there are checkpoints."""
    sections = config.resolved()
    models = sections["model"] if isinstance(sections["model"], list) else [sections["model"]]
    algorithm, *names = (short_name(section["name"]) for section in (sections["algorithm"], *models))
    parts = [f"{algorithm} with {join_truncated(list(dict.fromkeys(names)))} on {short_name(config.data.name)}"]
    if config.partition.clients:
        parts.append(pluralize(config.partition.clients, "client"))
    parts.append(pluralize(config.training.rounds, "round"))
    if checkpoints := run_folder.rounds(folder):
        parts.append(f"goes on after round {checkpoints[-1]}")
    devices = num_gpus(config.runtime)
    where = f"with {pluralize(devices, 'GPU')} on this node" if devices else "on CPU"
    return f"{', '.join(parts)}; {pluralize(ranks, 'rank')}, {where}; writes {folder}"


def _stop_at_eof() -> None:
    """Wait until the other end of stdin is closed, and ask for a stop after the round."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _leave(transport: Transport, code: int) -> NoReturn:
    if transport.rank == 0:
        write_exit_code(os.environ, code)
    transport.exit(code)


def _abort(transport: Transport | None, code: int, lost: bool = False) -> int:
    """Abort all ranks; without others, return the code.

    Args:
        lost: whether another rank was lost, so that the exit file keeps saying so.
    """
    sys.stdout.flush()
    if not lost:
        write_exit_code(os.environ, code)
    if transport is not None and transport.size > 1:
        transport.abort(code)
    return code
