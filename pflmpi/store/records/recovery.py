"""Records that a killed run has left: whoever reads the run next turns them into HDF5."""

import logging
from pathlib import Path

from pflmpi import atomic
from pflmpi.errors import PflmpiError
from pflmpi.store.lock import run_lock
from pflmpi.store.lock.taking import take
from pflmpi.store.records.conversion import convert, pending
from pflmpi.store.records.segments import any_there, clear
from pflmpi.text import for_shell, spans

_log = logging.getLogger(__name__)


def recover_records(run: Path) -> None:
    """Turn what is recorded of a run into HDF5, unless a process writes the run; say so where that is impossible."""
    if not any_there(run) or run_lock.owner(run) is not None:
        return
    problem = remedy = ""
    try:
        lock = take(run, {}, take_over=False, level=logging.DEBUG)
        try:
            convert(run, lock.check)
            if not pending(run):
                clear(run)
        finally:
            lock.release()
    except (PflmpiError, OSError) as error:
        cause = error.__cause__ or error
        problem = cause.strerror or str(cause) if isinstance(cause, OSError) else str(error)
        remedy = f"{atomic.remedy(cause)}, and " if isinstance(cause, OSError) else ""
    if there := pending(run):
        why = f" ({problem})" if problem else ""
        _log.warning(
            "%s: checkpoints %s are recorded and not yet HDF5%s; %s`pflmpi resume %s` changes that",
            *(run, spans(there), why, remedy, for_shell(run)),
        )
