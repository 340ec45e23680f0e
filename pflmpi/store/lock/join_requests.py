"""RUN/join/: the processes that wait to join a run, and what the run answers.

A file for each, which the process touches while it waits. The answer replaces it: a file that is opened again is read
anew also from a network file system, which may hide a new one for a while.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pflmpi import atomic, regular_file
from pflmpi.store.lock import run_lock
from pflmpi.store.lock.owner import Owner

REQUEST_SILENCE = 20.0  # seconds after which a process that does not touch its file is taken for gone


@dataclass(frozen=True)
class Request:
    """A process that waits to join a run.

    Attributes:
        process: which.
        launch: the same for processes that were started together.
        number: among those.
        of: how many they are.
        setup: what it has made of the configuration, to be compared.
        peer: what it sees of its host, for the other ranks.
        address: where the ranks meet, once the run has called it; "" before.
        refused: why it cannot join; "" if it can.
    """

    process: Owner
    launch: str
    number: int
    of: int
    setup: Mapping[str, str]
    peer: str
    address: str = ""
    refused: str = ""

    @property
    def token(self) -> str:
        """Name of the request."""
        return self.process.token


def write(run: Path, request: Request) -> None:
    """Put a request, or the answer in its place."""
    while True:
        try:
            return atomic.write(_path(run, request.token), json.dumps(asdict(request)).encode())
        except FileNotFoundError:  # the last one that waited has just removed the folder
            if not run.is_dir():
                raise


def read(run: Path, token: str) -> Request | None:
    """A request; None if it is damaged.

    Raises:
        FileNotFoundError: it is gone.
    """
    try:
        values = json.loads(regular_file.read(_path(run, token)))
        found = Request(**{**values, "process": Owner(**values["process"])})
        assert 0 <= found.number < found.of and found.token == token
        assert isinstance(found.setup, dict) and isinstance(found.launch, str)
    except (ValueError, TypeError, KeyError, AssertionError):
        return None
    return found


def touch(run: Path, token: str) -> float:
    """Say that the process still waits; seconds since the run last gave such a sign, by the file system's clock.

    Raises:
        FileNotFoundError: the request, or the run's lock, is gone.
    """
    os.utime(_path(run, token))
    return run_lock.touched(_path(run, token)) - run_lock.touched(run_lock.path(run))


def withdraw(run: Path, token: str) -> None:
    """Remove a request, and the folder with the last one."""
    with contextlib.suppress(OSError):
        _path(run, token).unlink()
    with contextlib.suppress(OSError):
        _folder(run).rmdir()


def waiting(run: Path) -> list[list[Request]]:
    """The requests without an answer of each launch of which all are there; those of processes that are gone go.

    Raises:
        OSError: the folder cannot be read.
    """
    launches: dict[str, list[Request]] = {}
    for token in sorted(path.stem for path in _folder(run).glob("*.json")):
        with contextlib.suppress(FileNotFoundError):  # withdrawn at this moment
            request = read(run, token)
            silence = run_lock.touched(run_lock.path(run)) - run_lock.touched(_path(run, token))
            if request is None or silence > REQUEST_SILENCE or request.process.gone(run):
                withdraw(run, token)
            elif not (request.address or request.refused):
                launches.setdefault(request.launch, []).append(request)
    whole = [sorted(requests, key=lambda one: one.number) for _, requests in sorted(launches.items())]
    return [requests for requests in whole if len(requests) == requests[0].of]


def num_waiting(run: Path, launch: str) -> int:
    """How many processes of a launch have a request."""
    found = (read(run, path.stem) for path in _folder(run).glob("*.json"))
    return sum(request is not None and request.launch == launch for request in found)


def _folder(run: Path) -> Path:
    return run / "join"


def _path(run: Path, token: str) -> Path:
    return _folder(run) / f"{token}.json"
