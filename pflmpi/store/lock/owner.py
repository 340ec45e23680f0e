"""The process that writes a run: what its lock says of it, and whether it has ended."""

import dataclasses
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pflmpi import regular_file
from pflmpi.machine import has_ended, start_of


@dataclass(frozen=True)
class Owner:
    """The process that writes a run.

    Attributes:
        token: random, of this lock alone.
        host: its name.
        process: number of the process.
        system: boot and process namespace, within which the number means something; "" where unknown.
        started: of the process, in clock ticks after the boot.
        since: seconds since the epoch.
        jobs: what starts it again, with how often it has: {"Slurm job 77": 1}.
        folder: inode of the run; a copied one has another.
    """

    token: str
    host: str
    process: int
    system: str
    started: int
    since: int
    jobs: Mapping[str, int]
    folder: int

    @classmethod
    def here(cls, run: Path, jobs: Mapping[str, int], token: str | None = None) -> "Owner":
        """This process, as the owner of a run, with a new token by default."""
        pid, inode = os.getpid(), run.stat().st_ino
        token = token or secrets.token_hex(8)
        return cls(token, socket.gethostname(), pid, _system(), start_of(pid), int(time.time()), jobs, inode)

    def gone(self, run: Path, jobs: Mapping[str, int] | None = None) -> str:
        """Why the process is known not to write this run any more; "" if it does, or if nothing is known.

        Args:
            jobs: of this process.
        """
        if self.folder != run.stat().st_ino:
            return "its lock was copied with the folder"
        for job, restarts in (jobs or {}).items():
            if self.jobs.get(job, restarts) < restarts:
                return f"{job} was restarted since"
        ended = self.near() and has_ended(self.process, self.started)
        return "that process has ended" if ended else ""

    def near(self) -> bool:
        """Whether this system is the owner's, so that `gone` knows."""
        return self.system != "" and self.system == _system()

    def __str__(self) -> str:
        jobs = "".join(f", {job}" for job in self.jobs)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.process} on {self.host}{jobs} since {since}"


def write(path: Path, owner: Owner) -> None:
    """Write the lock of an owner."""
    path.write_text(json.dumps(dataclasses.asdict(owner)) + "\n")


def read(path: Path) -> Owner | None:
    """The owner that a lock names; None if the lock is damaged.

    Raises:
        OSError: it cannot be read.
    """
    try:
        found = Owner(**json.loads(regular_file.read(path)))
        assert 0 < found.process < 1 << 31 and 0 <= found.since < 1 << 40
        assert all(isinstance(restarts, int) for restarts in found.jobs.values())
    except (ValueError, TypeError, AttributeError, AssertionError):
        return None
    return found


def _system() -> str:
    """Boot and process namespace of this process; "" where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
