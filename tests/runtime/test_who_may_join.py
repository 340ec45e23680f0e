"""Who may join a run: asked at the end of a round, refused with the reason, forgotten when it is gone."""

import os
import platform
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import quick_run
from pflmpi import atomic
from pflmpi.config import load as configuration
from pflmpi.experiment import joining
from pflmpi.experiment.agreement import parts
from pflmpi.experiment.build import Experiment, prepare
from pflmpi.experiment.joining import PROCESSOR, Waiting
from pflmpi.learning.task import HOST
from pflmpi.machine import Gpu
from pflmpi.runtime.stopping import Stop
from pflmpi.store.lock import join_requests, taking
from pflmpi.store.lock.join_requests import Request
from pflmpi.store.lock.owner import Owner
from pflmpi.testing.thread_ranks import run_ranks
from pflmpi.transports.base import Transport
from pflmpi.transports.inprocess import InProcessTransport
from pflmpi.transports.peers import Peer

HERE = Peer("a", 7)


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return prepare(configuration.parse(quick_run.settings()), HOST)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that this process writes."""
    taking.take(tmp_path / "run", {}, take_over=False)
    return tmp_path / "run"


def ask(run: Path, experiment: Experiment, peer: str = HERE.to_json(), **changes: object) -> Request:
    """Place a request of this process."""
    owner = Owner.here(run, {})
    setup = {**parts(experiment.config, experiment.division.everyone, experiment.code), PROCESSOR: platform.machine()}
    request = replace(Request(owner, owner.token, 0, 1, setup, peer), **changes)  # type: ignore[arg-type]
    join_requests.write(run, request)
    return request


def look(run: Path, experiment: Experiment) -> bool:
    transport = InProcessTransport()
    transport.peers = [HERE]
    return Waiting(run, experiment, transport)()


def answer(run: Path, request: Request) -> str:
    found = join_requests.read(run, request.token)
    assert found is not None
    return found.refused


def test_who_fits_is_waited_for_and_looked_for_once_a_second(run: Path, experiment: Experiment) -> None:
    transport = InProcessTransport()
    waiting = Waiting(run, experiment, transport)
    assert not waiting()
    ask(run, experiment)
    assert not waiting(), "within a second"
    assert look(run, experiment)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"setup": {}}, "the version is not that of the run"),
        ({"setup": {PROCESSOR: "s390x"}}, "is not that of the run"),
        ({"peer": Peer("b", 8, gpus=(Gpu("G-1", "H100", 1 << 34),)).to_json()}, "on H100, and the run is on"),
        ({"peer": "[1"}, "a request is damaged"),
    ],
)
def test_who_does_not_fit_is_told_why(
    changes: dict[str, object], words: str, run: Path, experiment: Experiment
) -> None:
    auto = experiment.config.runtime.model_copy(update={"device": "auto"})
    any_device = replace(experiment, config=replace(experiment.config, runtime=auto))
    request = ask(run, any_device, **changes)
    assert not look(run, any_device)
    assert words in answer(run, request)


def test_a_launch_joins_as_a_whole(run: Path, experiment: Experiment) -> None:
    ask(run, experiment, launch="job 7", number=0, of=2)
    assert not look(run, experiment)
    ask(run, experiment, launch="job 7", number=1, of=2)
    assert look(run, experiment)


def test_who_is_gone_is_forgotten(run: Path, experiment: Experiment) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        owner = replace(Owner.here(run, {}), process=sleeping.pid, started=1)
        sleeping.kill()
    dead = ask(run, experiment, process=owner)
    silent = ask(run, experiment)
    long_ago = time.time() - join_requests.REQUEST_SILENCE - 10
    os.utime(run / "join" / f"{silent.token}.json", (long_ago, long_ago))
    (run / "join" / "odd.json").write_text("{}")
    assert not look(run, experiment)
    assert not (run / "join").exists()
    with pytest.raises(FileNotFoundError):
        join_requests.touch(run, dead.token)


def test_who_asks_as_the_last_one_leaves_has_asked(
    run: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = atomic.write, [1, 1]

    def leaving(path: Path, content: bytes) -> None:
        if left.pop() if left else 0:
            raise FileNotFoundError(2, "No such file or directory")
        write(path, content)

    monkeypatch.setattr(join_requests.atomic, "write", leaving)
    ask(run, experiment)
    assert look(run, experiment)


def test_a_folder_that_cannot_be_read_does_the_run_no_harm(
    run: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(run: Path) -> list[list[Request]]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(joining.join_requests, "waiting", broken)
    assert not look(run, experiment)


def test_all_ranks_pause_for_those_that_wait_on_rank_0_and_stop_before_that() -> None:
    def pauses(transport: Transport) -> list[str | None]:
        stop, found = Stop(), []
        for others_wait, rank_2_stops in ((False, 0.0), (True, 0.0), (True, 1.0)):
            said = np.array([[1.0, 0.0], [3.0, 0.0], [2.0, rank_2_stops]]) if transport.rank == 0 else None
            found.append(stop.agree(transport, 2.5, said, lambda: others_wait and transport.rank == 0))  # noqa: B023
        assert stop.longest == 3.0
        return found

    assert run_ranks(3, pauses) == [[None, "join", "stop"]] * 3


def test_all_ranks_are_told_what_rank_0_has_for_them_and_its_own_reason_counts_though_it_comes_late() -> None:
    def told(transport: Transport) -> tuple[list[float], str | None]:
        stop, told = Stop(), np.array([0.5, 2.0]) if transport.rank == 0 else np.zeros(2)
        stop.reason = "asked" if transport.rank == 0 else ""
        pause = stop.agree(transport, 1.0, np.zeros((2, 2)) if transport.rank == 0 else None, lambda: False, told)
        return told.tolist(), pause

    assert run_ranks(2, told) == [([0.5, 2.0], "stop")] * 2
