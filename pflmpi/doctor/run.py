"""One visit of the doctor: on every rank, with a table by rank 0, or by each rank if it cannot reach the others."""

import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from pflmpi.doctor.checks import judge
from pflmpi.doctor.collect import by_itself, together, unconnected
from pflmpi.doctor.facts import Facts
from pflmpi.doctor.limit import limited
from pflmpi.doctor.problem import Problem, line
from pflmpi.doctor.starting import cure_of_no_connection
from pflmpi.doctor.table import say, show
from pflmpi.doctor.wanted import Wanted, wanted
from pflmpi.errors import ConfigError, PflmpiError, UserError
from pflmpi.text import first_line
from pflmpi.transports import open_transport
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import ALONE, Launch, detect
from pflmpi.transports.process_exit import exit_process, flush_output
from pflmpi.transports.text import from_root

_FOUND = 1  # the exit code of a problem
_LIMIT = 60.0  # seconds for the other ranks to come, and to answer
_HEAD_START = 3.0  # seconds that other ranks have to report too: a launcher stops them once one has ended
_log = logging.getLogger(__name__)


def visit(config: Path | None, run: Path | None, environ: Mapping[str, str]) -> int:
    """Look at this rank, and with the others at all; return the exit code, or end the process with it.

    Args:
        config: a configuration that is to be run.
        run: the folder of a run, also of one to come; None for where runs are by default.
        environ: the environment of this process.

    Raises:
        ConfigError: this is alone, and the configuration cannot be used.
    """
    launch, unclear = _launch(environ)
    asked = wanted(config, run)
    if launch.kind == "alone" and config is not None and asked.asked.error:
        raise ConfigError(asked.asked.error)
    folder = (run or Path("runs")).absolute()
    facts = by_itself(launch, asked, environ)
    if unclear:
        facts = facts.model_copy(update={"launcher": "unclear"})
        return _report(unconnected(facts, launch, folder, environ, unclear), launch, environ)
    try:
        transport = _connect(launch, asked, facts)
        everyone = together(facts, transport, launch, folder, environ)
        code = _shared(transport, _verdict(everyone, config, environ) if everyone else 0)
    except (PflmpiError, ImportError, RuntimeError, OSError) as error:
        _log.debug("not connected", exc_info=error)
        return _report(unconnected(facts, launch, folder, environ, first_line(error)), launch, environ)
    if launch.size > 1:
        exit_process(transport, code)
    transport.close()
    return code


def _launch(environ: Mapping[str, str]) -> tuple[Launch, str]:
    """Return how this was started, and why that is unclear if it is."""
    try:
        return detect(environ), ""
    except ConfigError as error:
        return ALONE, str(error)


def _connect(launch: Launch, asked: Wanted, facts: Facts) -> Transport:
    """Return the transport that a run would use."""
    if launch.size == 1:
        return open_transport("inprocess", ALONE, _LIMIT)
    mpi = launch.kind == "mpi"
    late = Problem(
        f"not all ranks have come within {_LIMIT:.0f} s, or the library that connects them hangs",
        cure_of_no_connection(mpi),
        (launch.rank,),
    )
    # Somewhat later than the transport's own limit, which says more.
    with limited(_LIMIT + 5, f"problem: {line(late, [facts])}"):
        transport = open_transport(asked.runtime.transport, launch, _LIMIT)
    # So that a time-out names the hosts of those that it waits for.
    transport.introduce("cuda" if facts.device.uuid else "cpu", len(facts.machine.cores))
    return transport


def _verdict(everyone: list[Facts], config: Path | None, environ: Mapping[str, str]) -> int:
    """Show what was found, and return the exit code."""
    if config is not None and all(one.asked.error for one in everyone):
        print(f"pflmpi: {everyone[0].asked.error}", file=sys.stderr)
        return _told(UserError.exit_code, environ)
    problems = judge(everyone)
    show(everyone, problems)
    flush_output()
    return _told(_FOUND if problems else 0, environ)


def _told(code: int, environ: Mapping[str, str]) -> int:
    """Leave rank 0's exit code in the file that a launcher whose own says nothing wants it in, and return it."""
    path = environ.get("PFLMPI_EXIT_FILE")
    if path:
        Path(path).write_text(f"{code}\n")
    return code


def _shared(transport: Transport, code: int) -> int:
    return int(from_root(transport, str(code)))


def _report(facts: Facts, launch: Launch, environ: Mapping[str, str]) -> int:
    """Show what this rank knows, with the table on rank 0 only; end the process if there are others."""
    problems = judge([facts])
    if launch.rank == 0:
        show([facts], problems)
        _told(_FOUND, environ)
    else:
        say([facts], problems)
    flush_output()
    if launch.size > 1:
        time.sleep(_HEAD_START)
        os._exit(_FOUND)  # what is half connected may not let go in order
    return _FOUND
