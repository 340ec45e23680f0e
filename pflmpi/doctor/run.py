"""Runs the doctor: collects facts on every rank, checks and shows them on rank 0.

Ranks that cannot connect each show their own facts.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from rich.table import Table

from pflmpi.doctor.checks import Problem, advise_connection, find_problems, group_by, rank_numbers
from pflmpi.doctor.facts import (
    RankFacts,
    collect_facts,
    find_mpi,
    find_visible_gpus,
    gather_facts,
    inspect_folder,
    read_config,
    try_device,
)
from pflmpi.errors import ConfigError, PflmpiError, UserError, write_exit_code
from pflmpi.machine import requested_gpus
from pflmpi.terminal import console, print_json
from pflmpi.text import first_line, format_bytes, format_ranges, join_truncated, pluralize, scaled_bytes
from pflmpi.transports import introduce, open_transport
from pflmpi.transports.base import Transport, flush_output
from pflmpi.transports.detect import ALONE, Launch, detect
from pflmpi.transports.peers import Peer

if TYPE_CHECKING:
    from pflmpi.config.load import Config

_PROBLEMS_FOUND = 1  # exit code
_TIMEOUT = 60.0  # seconds for the other ranks to connect, and to answer
_REPORT_SECONDS = 3.0  # for the other ranks to report too: a launcher stops them once one has ended
_MAX_ROWS = 16  # ranks that have a row each; of more ranks, equal ones share a row
_log = logging.getLogger(__name__)


def check_environment(config: Path | None, run: Path | None, environ: Mapping[str, str], as_json: bool) -> int:
    """Shows facts and problems of all ranks; returns the exit code, or ends the process with it.

    Args:
        config: the configuration to be run.
        run: folder of a run, which need not exist yet; None for the default folder.
        as_json: print one JSON object, on rank 0.

    Raises:
        ConfigError: there is only one rank, and the configuration cannot be used.
    """
    launch, contradiction = _detect_launch(environ)
    run_config, settings = read_config(config, run)
    if launch.kind == "alone" and config is not None and settings.error:
        raise ConfigError(settings.error)
    folder = (run or Path("runs")).absolute()
    facts = collect_facts(launch, run_config, settings, environ)
    here = Peer.here(facts.machine.cores, find_visible_gpus(run_config, environ), requested_gpus(environ))

    def report_alone(error: str) -> int:
        device = try_device(facts.device, [here], 0, run_config)
        own_facts = facts.model_copy(update={"device": device, "connection": error})
        return _report_unconnected(own_facts, launch, folder, environ, as_json)

    if contradiction:
        facts = facts.model_copy(update={"launcher": "unclear"})
        return report_alone(contradiction)
    try:
        transport = _connect(launch, run_config, facts, here, as_json)
        all_ranks = gather_facts(facts, run_config, transport, launch, folder, environ)
        text = str(_check_and_show(all_ranks, config, environ, as_json)) if all_ranks else ""
        code = int(transport.broadcast_text(text))
    except (PflmpiError, ImportError, RuntimeError, OSError) as error:
        _log.debug("not connected", exc_info=error)
        return report_alone(first_line(error))
    if launch.size > 1:
        transport.exit(code)
    transport.close()
    return code


def _detect_launch(environ: Mapping[str, str]) -> tuple[Launch, str]:
    """Returns how this process was started, and "" or how the launcher's variables contradict each other."""
    try:
        return detect(environ), ""
    except ConfigError as error:
        return ALONE, str(error)


def _connect(launch: Launch, config: "Config | None", facts: RankFacts, here: Peer, as_json: bool) -> Transport:
    """Opens the transport that a run would use."""
    if launch.size == 1:
        transport = open_transport("inprocess", ALONE, _TIMEOUT)
        introduce(transport, here)
        return transport
    timeout = Problem(
        f"not all ranks have come within {_TIMEOUT:.0f} s, or MPI hangs",
        advise_connection(launch.kind == "mpi"),
        (launch.rank,),
    )

    def end(_: str) -> NoReturn:
        if as_json and launch.rank == 0:
            show_facts([facts], [timeout], as_json)
        else:
            print(f"problem: {timeout.line([facts])}", file=sys.stderr if as_json else sys.stdout)
        flush_output()
        time.sleep(_REPORT_SECONDS)
        os._exit(_PROBLEMS_FOUND)

    transport = open_transport(config.runtime.transport if config else "auto", launch, _TIMEOUT, late=end)
    introduce(transport, here)
    return transport


def _check_and_show(all_ranks: list[RankFacts], config: Path | None, environ: Mapping[str, str], as_json: bool) -> int:
    """Checks and shows the facts of all ranks; returns the exit code."""
    if config is not None and all(facts.settings.error for facts in all_ranks):
        print(f"pflmpi: {all_ranks[0].settings.error}", file=sys.stderr)
        code = UserError.exit_code
    else:
        problems = find_problems(all_ranks)
        show_facts(all_ranks, problems, as_json)
        code = _PROBLEMS_FOUND if problems else 0
    flush_output()
    write_exit_code(environ, code)
    return code


def _report_unconnected(
    facts: RankFacts, launch: Launch, folder: Path, environ: Mapping[str, str], as_json: bool
) -> int:
    """Shows the facts of this rank, with the table on rank 0 only; ends the process if there are other ranks."""
    mpi = find_mpi(launch, facts.settings.transport, environ)
    facts = facts.model_copy(update={"mpi": mpi, "folder": inspect_folder(folder, "")})
    problems = find_problems([facts])
    if launch.rank == 0:
        show_facts([facts], problems, as_json)
        write_exit_code(environ, _PROBLEMS_FOUND)
    else:
        show_problems([facts], problems, sys.stderr if as_json else sys.stdout)
    flush_output()
    if launch.size > 1:
        time.sleep(_REPORT_SECONDS)
        os._exit(_PROBLEMS_FOUND)  # a transport that is half connected may hang when it is closed
    return _PROBLEMS_FOUND


def show_facts(all_ranks: Sequence[RankFacts], problems: Sequence[Problem], as_json: bool = False) -> None:
    """Prints the tables and the problems, or one JSON object."""
    if as_json:
        objects = [{"problem": problem.what, "remedy": problem.remedy, "ranks": problem.ranks} for problem in problems]
        print_json({"problems": objects, "ranks": [_rank_as_json(facts) for facts in all_ranks]})
        return
    # Plain text: mpirun gives its ranks a terminal without a size, whatever its own output is.
    terminal = console(force_terminal=False, highlight=False)
    terminal.print(_ranks_table(all_ranks))
    terminal.print(_common_table(all_ranks))
    show_problems(all_ranks, problems)


def _rank_as_json(facts: RankFacts) -> dict[str, Any]:
    return {
        "rank": facts.rank,
        "host": facts.host,
        "launcher": facts.launcher,
        "cores": facts.machine.cores,
        "threads": facts.settings.threads,
        "memory_bytes": facts.machine.memory,
        "memory_free_bytes": facts.machine.memory_free,
        "shared_memory_free_bytes": facts.machine.shared_free,
        "device": facts.device.name or None,
        "gpus": facts.device.gpus,
        "gpu_uuid": facts.device.uuid or None,
        "gpu_memory_bytes": facts.device.memory if facts.device.uuid else None,
        "gpu_memory_free_bytes": facts.device.memory_free if facts.device.uuid else None,
        "gpu_platform": facts.device.platform or None,
        "messages": facts.messages or None,
        "gloo": facts.device.gloo,
        "nccl": facts.device.nccl or None,
        "mpi": facts.mpi.library or None,
        "mpi_used": facts.mpi.used,
        "mpi_sends_gpu_buffers": facts.mpi.device_buffers,
        "folder": facts.folder.path,
        "folder_free_bytes": facts.folder.free,
        "data": facts.data.name or None,
        "data_root": facts.data.root or None,
        "slurm_job": facts.slurm.get("job") or None,
        "versions": {name: version or None for name, version in facts.versions.items()},
    }


def show_problems(all_ranks: Sequence[RankFacts], problems: Sequence[Problem], file: TextIO | None = None) -> None:
    """Prints each problem in one line, however long, or that there is none."""
    for problem in problems:
        print(f"problem: {problem.line(all_ranks)}", file=file)
    if not problems:
        print("no problems found", file=file)


def _ranks_table(all_ranks: Sequence[RankFacts]) -> Table:
    table = Table("rank", "host", "device", "free memory", "threads", "cores")
    groups = group_by(all_ranks, _row_key if len(all_ranks) > _MAX_ROWS else lambda facts: (str(facts.rank),))
    for group in groups.values():
        memory = min((facts.machine for facts in group), key=lambda machine: machine.memory_free)
        cores = {facts.machine.cores for facts in group}
        table.add_row(
            format_ranges(rank_numbers(group)),
            join_truncated(list(dict.fromkeys(facts.host for facts in group)), most=2),
            _format_device(min(group, key=lambda facts: facts.device.memory_free)),
            _format_free(memory.memory_free, memory.memory),
            _format_threads(group[0]),
            format_ranges(min(cores)) if len(cores) == 1 else f"{len(min(cores))} each",
        )
    return table


def _row_key(facts: RankFacts) -> tuple[str, ...]:
    """What ranks of the same row have in common."""
    return facts.device.name, str(facts.machine.memory >> 30), _format_threads(facts), str(len(facts.machine.cores))


def _format_device(facts: RankFacts) -> str:
    if not facts.device.uuid:
        return facts.device.name or "none"
    return f"{facts.device.name}, {_format_free(facts.device.memory_free, facts.device.memory)}"


def _format_free(free: int, total: int) -> str:
    return f"{free / scaled_bytes(total)[0]:.3g} of {format_bytes(total)}"


def _format_threads(facts: RankFacts) -> str:
    return f"{facts.settings.threads}, OMP {'not set' if facts.machine.omp is None else facts.machine.omp}"


def _common_table(all_ranks: Sequence[RankFacts]) -> Table:
    table = Table("", "", "ranks", show_header=False)
    for name, text in _COMMON_ROWS.items():
        for value, group in group_by(all_ranks, text).items():
            table.add_row(name, value, "all" if len(group) == len(all_ranks) else format_ranges(rank_numbers(group)))
    free = {
        "run folder": [facts.folder.free for facts in all_ranks if not facts.folder.error],
        "/dev/shm": [facts.machine.shared_free for facts in all_ranks if facts.machine.shared_free is not None],
    }
    least = ", ".join(f"{name} {format_bytes(min(sizes))}" for name, sizes in free.items() if sizes)
    table.add_row("least free space", least, "all")
    return table


def _format_launcher(facts: RankFacts) -> str:
    names = {"mpi": "mpirun or srun with MPI", "slurm": "srun without MPI", "alone": "nothing"}
    return f"{names.get(facts.launcher, facts.launcher)}, {pluralize(facts.size, 'rank')}" + (
        ", not connected" if facts.connection else ""
    )


def _format_mpi(facts: RankFacts) -> str:
    if facts.mpi.error:
        return f"none ({facts.mpi.error})"
    if not facts.mpi.library:
        return "not used"
    buffers = {None: "unknown", True: "yes", False: "no"}[facts.mpi.device_buffers]
    return f"{facts.mpi.library}; sends GPU buffers: {buffers}"


def _format_folder(facts: RankFacts) -> str:
    if facts.folder.error:
        return f"{facts.folder.path}: {facts.folder.error}"
    shared = {True: "; the same for all ranks", False: "; not rank 0's", None: ""}
    return f"{facts.folder.path}: written{shared[facts.folder.seen if facts.size > 1 else None]}"


def _format_data(facts: RankFacts) -> str:
    if facts.data.error:
        return "missing, to be downloaded" if facts.data.download else "missing"
    if facts.data.name:
        return (
            f"{facts.data.name}: {facts.data.files} files in {facts.data.root}" if facts.data.files else facts.data.name
        )
    return facts.data.root or "no data folder is set"


_COMMON_ROWS: dict[str, Callable[[RankFacts], str]] = {
    "started by": _format_launcher,
    "MPI": _format_mpi,
    "torch.distributed": lambda facts: (
        f"gloo: {'yes' if facts.device.gloo else 'no'}; {facts.device.platform or 'NCCL'}: {facts.device.nccl or 'no'}"
    ),
    "messages": lambda facts: facts.messages or "not used",
    "Slurm": lambda facts: ", ".join(f"{name} {text}" for name, text in facts.slurm.items() if text) or "no job",
    "run folder": _format_folder,
    "data": _format_data,
    "versions": lambda facts: ", ".join(f"{name} {version or 'missing'}" for name, version in facts.versions.items()),
}
