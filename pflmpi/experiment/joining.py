"""Ranks that join a run, as the ranks see it that run it: asked at the end of a round, let in by rank 0."""

import json
import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pflmpi.errors import ConfigError, TransportError
from pflmpi.experiment.agreement import parts
from pflmpi.experiment.build import Experiment
from pflmpi.runtime.config import LEAST_TIMEOUT
from pflmpi.runtime.devices import place
from pflmpi.runtime.faults import on_root
from pflmpi.store.lock import join_requests
from pflmpi.store.lock.join_requests import Request
from pflmpi.transports.base import Transport
from pflmpi.transports.peers import Peer, names
from pflmpi.transports.text import gather_texts

if TYPE_CHECKING:
    from pflmpi.transports.rendezvous import Rendezvous

PROCESSOR = "the kind of processor"
_EVERY = 1.0  # seconds from one look for others to the next
_log = logging.getLogger(__name__)


class Waiting:
    """Whether others wait to join a run and can; looks at most once a second, and refuses those that do not fit."""

    def __init__(self, run: Path, experiment: Experiment, transport: Transport) -> None:
        self._run, self._experiment, self._transport = run, experiment, transport
        self._next = 0.0

    def __call__(self) -> bool:
        """Look."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _EVERY
        try:
            return bool(_fitting(self._run, self._experiment, self._transport.peers))
        except OSError as error:
            _log.warning("%s: whether ranks wait to join cannot be seen: %s", self._run, error.strerror)
            return False


def enlarge(run: Path, experiment: Experiment, transport: Transport) -> Transport:
    """The transport to all ranks, those that waited to join among them; the same as before if none came.

    Every rank that runs it calls this, at a checkpoint. What the others do wrong does no harm: they are waited for, for
    a while, and the run goes on without them.
    """
    from pflmpi.transports import rendezvous  # here alone, because it needs torch's groups

    before = transport.size
    timeout = experiment.config.runtime.timeout or LEAST_TIMEOUT
    patience = min(rendezvous.PATIENCE, timeout / 2)
    places: list[rendezvous.Rendezvous] = []

    def invite() -> str:
        try:
            launches = _fitting(run, experiment, transport.peers)
            called = [request for launch in launches for request in launch]
            place = rendezvous.create([peer.host for peer in (*transport.peers, *map(_peer, called))])
            places.append(place)
            for request in called:
                join_requests.write(run, replace(request, address=place.address))
            there = place.arrived([request.token for request in called], patience)
            ready = [request for launch in launches if _all_in(launch, there) for request in launch]
            for request in called:
                join_requests.withdraw(run, request.token)
                if request not in ready:
                    _log.warning("%s did not come to join; the run goes on without it", request.process)
            return json.dumps([place.address, [request.token for request in ready]]) if ready else ""
        except (OSError, RuntimeError) as error:
            _log.warning("ranks that wait to join cannot be let in: %s; the run goes on without them", error)
            return ""

    text = on_root(transport, invite)
    if not text:
        return transport
    address, tokens = json.loads(text)
    place = _reached(transport, lambda: places[0] if places else rendezvous.connect(address, patience))
    if place is None:
        return transport
    if transport.rank == 0:
        place.admit(tokens, before)
    group = place.form(transport.rank, before + len(tokens), before, timeout, transport)
    if transport.rank == 0:
        joined = group.size - before
        _log.warning("%s", f"{joined} joined; {group.size} ranks go on" if joined else "none joined; the run goes on")
    return group


def _reached(transport: Transport, connect: "Callable[[], Rendezvous]") -> "Rendezvous | None":
    """Where the ranks meet, if all of them reach it."""
    place, problem = None, ""
    try:
        place = connect()
    except TransportError as error:
        problem = str(error)
    if not transport.maximum(np.array([float(place is None)]))[0]:
        return place
    texts = gather_texts(transport, problem)
    if texts is not None:
        _log.warning("%s; the run goes on without those that wait to join", next(filter(None, texts)))
    return None


def _fitting(run: Path, experiment: Experiment, peers: Sequence[Peer]) -> list[list[Request]]:
    """The launches that can join; the others get their refusal."""
    mine, fitting = dict[str, str](), list[list[Request]]()
    there = list(peers)
    for launch in join_requests.waiting(run):
        mine = mine or _mine(experiment)
        problem = next((text for one in launch if (text := _other_setup(one, mine))), "")
        together = there
        try:
            together = [*there, *map(_peer, launch)]
            problem = problem or _other_device(together, experiment)
        except ConfigError as error:
            problem = problem or str(error)
        except (ValueError, TypeError):
            problem = problem or "a request is damaged; join again"
        if problem:
            for request in launch:
                join_requests.write(run, replace(request, refused=problem))
        else:
            fitting.append(launch)
            there = together
    return fitting


def _mine(experiment: Experiment) -> dict[str, str]:
    """What others must have made of the configuration too."""
    common = parts(experiment.config, experiment.division.everyone, experiment.code)
    return {**common, **({PROCESSOR: here} if (here := platform.machine()) in experiment.computed_on else {})}


def _other_device(peers: Sequence[Peer], experiment: Experiment) -> str:
    """Why these ranks would compute on another device than the run; raises `ConfigError` where they cannot compute."""
    runtime = experiment.config.runtime
    models = place(peers, runtime, experiment.config.training).models or (platform.machine(),)
    if set(models) <= set(experiment.computed_on) or runtime.mixed_gpus == "allow":
        return ""
    return (
        f"with those that join, clients would be computed on {', '.join(models)}, and the run is on "
        f"{', '.join(experiment.computed_on)}; join from such a node, or hide the GPUs (CUDA_VISIBLE_DEVICES=)"
    )


def _other_setup(request: Request, mine: dict[str, str]) -> str:
    for part, value in mine.items():
        if request.setup.get(part) != value:
            return (
                f"{names([request.number], [])} of those that join: {part} is not that of the run; use the same "
                "environment, folder and data as the run"
            )
    return ""


def _peer(request: Request) -> Peer:
    return Peer.from_json(request.peer)


def _all_in(launch: Sequence[Request], there: set[str]) -> bool:
    return all(request.token in there for request in launch)
