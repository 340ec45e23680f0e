"""A process that joins a run: it asks, waits for the end of a round, and is then a rank like the others."""

import logging
import platform
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pflmpi import outside
from pflmpi.config.load import Config
from pflmpi.data.federation import Federation
from pflmpi.errors import CheckpointError, ConfigError, PflmpiError, RunError
from pflmpi.experiment.agreement import parts
from pflmpi.experiment.build import load_federation
from pflmpi.experiment.code import code_hashes
from pflmpi.experiment.joining import PROCESSOR
from pflmpi.experiment.stored_config import stored_config
from pflmpi.learning.early_stop import EarlyStop
from pflmpi.runtime.config import LEAST_TIMEOUT
from pflmpi.store import config_file, names
from pflmpi.store.lock import join_requests, run_lock, taking
from pflmpi.store.lock.join_requests import Request
from pflmpi.store.lock.owner import Owner
from pflmpi.store.metrics import metrics_file
from pflmpi.store.records.recovery import recover_records
from pflmpi.text import for_shell
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import Launch
from pflmpi.transports.peers import Peer

_LOOK = 0.2  # seconds between two looks for the answer
_log = logging.getLogger(__name__)


class Ended(PflmpiError):
    """The run has ended, so there is nothing to join."""

    exit_code = 0


@dataclass(frozen=True)
class Joiner:
    """A process that wants to join a run.

    Attributes:
        run: the folder.
        config: of the run.
    """

    run: Path
    config: Config

    @classmethod
    def of(cls, run: Path) -> "Joiner":
        """For the run in a folder.

        Raises:
            CheckpointError: nobody writes it.
            ConfigError: ranks cannot join it.
            Ended: it has ended.
        """
        if not run.is_dir():
            raise CheckpointError(f"{run} is no folder; name the folder that `pflmpi run` printed")
        end = time.monotonic() + taking.SILENCE
        while run_lock.owner(run) and not config_file.path(run).exists() and time.monotonic() < end:
            time.sleep(_LOOK)  # it is just being started
        config = stored_config(run, ())
        if run_lock.owner(run) is None:
            _check_going(run, config)
            raise CheckpointError(
                f"no process writes {run}, so none can be joined; `pflmpi resume {for_shell(run)}` continues it"
            )
        if config.runtime.faults == "continue":
            raise ConfigError(
                f"{run} has runtime.faults = 'continue', which works over MPI alone, and ranks join over "
                "torch.distributed; stop the run, and resume it on more ranks or with -s runtime.faults=stop"
            )
        return cls(run, config)

    @cached_property
    def federation(self) -> Federation:
        """The clients' data."""
        with outside.as_config_error():
            return load_federation(self.config)

    def join(self, launch: Launch, peer: Peer) -> Transport:
        """Wait until the run lets this process in; the transport to all ranks.

        Raises:
            CheckpointError: what it has made of the configuration is not what the run has.
            Ended: the run has ended meanwhile.
            RunError: it was stopped meanwhile.
            TransportError: it cannot connect to the run.
        """
        from pflmpi.transports import rendezvous

        request = self.request(launch, peer)
        try:
            join_requests.write(self.run, request)
        except OSError as error:
            raise ConfigError(
                f"cannot write in {self.run}: {error.strerror}; ranks of a run write in its folder"
            ) from error
        try:
            if launch.rank == 0:
                _log.warning("waiting for the end of a round of %s", self.run)
            address = self.wait(request)
            place = rendezvous.connect(address, rendezvous.PATIENCE)
            rank, size, before = place.attend(request.token, 2 * rendezvous.PATIENCE)
            transport = place.form(rank, size, before, self.config.runtime.timeout or LEAST_TIMEOUT)
        finally:
            join_requests.withdraw(self.run, request.token)
        if launch.rank == 0:
            _log.warning("joined %s, which has %d ranks now", self.run, size)
        return transport

    def request(self, launch: Launch, peer: Peer) -> Request:
        """What this process asks with."""
        process = Owner.here(self.run, launch.jobs)
        with outside.as_config_error():
            setup = parts(self.config, self.federation, code_hashes(self.config)) | {PROCESSOR: platform.machine()}
        if launch.id:
            return Request(process, launch.id, launch.rank, launch.size, setup, peer.to_json())
        return Request(process, process.token, 0, 1, setup, peer.to_json())

    def wait(self, request: Request) -> str:
        """The address to come to; raises as `join`."""
        began, touched = time.monotonic(), 0.0
        limit = self.config.runtime.timeout or LEAST_TIMEOUT
        while True:
            now = time.monotonic()
            try:
                if now - touched >= 1.0:
                    touched = now
                    silence = join_requests.touch(self.run, request.token)
                    if run_lock.owner(self.run) is None:
                        raise self._ended()
                    if silence > taking.SILENCE:
                        raise RunError(f"nothing was heard for {silence:.0f} s of the process that writes {self.run}")
                    there = join_requests.num_waiting(self.run, request.launch)
                    if there < request.of and now - began > limit:
                        raise RunError(
                            f"{there} of the {request.of} processes started together came within {limit:.0f} s to join "
                            f"{self.run}; what the others show says why"
                        )
                answer = join_requests.read(self.run, request.token)
            except FileNotFoundError:
                raise self._ended() from None
            if answer is not None and answer.refused:
                raise CheckpointError(f"{self.run} cannot be joined: {answer.refused}")
            if answer is not None and answer.address:
                return answer.address
            time.sleep(_LOOK)

    def _ended(self) -> RunError:
        if run_lock.owner(self.run) is not None:
            return RunError(f"{self.run} went on without this process, which was taken for gone; join again")
        _check_going(self.run, self.config)
        return RunError(
            f"{self.run} was stopped before a rank could join; `pflmpi resume {for_shell(self.run)}` continues it"
        )


def _check_going(run: Path, config: Config) -> None:
    """Raise `Ended` for a run that has reached its last round, or stopped early."""
    recover_records(run)
    newest, last = max(names.rounds(run), default=0), config.training.rounds
    early = EarlyStop(config.training.stop, metrics_file.read(run))
    if early.met and newest < last:
        raise Ended(f"nothing is left to do: {run} has stopped early: {early.why}")
    if newest >= last:
        raise Ended(f"nothing is left to do: {run} has reached round {newest} of {last}")
