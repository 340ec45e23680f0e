"""Ranks join a run at the end of a round: the same bits, and a joiner that fails does the run no harm."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import processes
import quick_run
from pflmpi.experiment.joiner import Joiner
from pflmpi.machine import cores
from pflmpi.store.lock import join_requests
from pflmpi.store.metrics import metrics_file
from pflmpi.transports import rendezvous
from pflmpi.transports.detect import ALONE
from pflmpi.transports.peers import Peer
from project import documented

ROUNDS = 12
SECTIONS: dict[str, Any] = {
    "training": {"rounds": ROUNDS, "participation": 0.5, "epochs": 20, "momentum": 0.5},
    "runtime": {"timeout": 60},
}


class Going:
    """A run under way, that stands still while a test prepares what happens at the end of its next round."""

    def __init__(self, folder: Path, way: str, ranks: int, **sections: Any) -> None:
        self.raw = quick_run.settings(SECTIONS, **sections)
        self.run, self._folder = folder / "run", folder
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(self.raw))
        start = [*processes.start_way(way, ranks), "run", str(config), "--out", str(self.run), "--quiet"]
        self.process = processes.launch([*start, *(["--ranks", str(ranks)] if way == "alone" else [])])

    @contextmanager
    def still_after(self, round: int) -> Iterator[None]:
        """Let it stand still, from a round on, for more than the second between two looks for others."""

        def reached() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            lines = metrics_file.path(self.run).read_text().splitlines() if metrics_file.path(self.run).exists() else []
            return len(lines) > round

        processes.wait_for(reached, f"round {round}", every=0.002)
        ranks = processes.ranks_of(self.process.pid) or [self.process.pid]
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        began = time.monotonic()
        yield
        time.sleep(max(1.1 - (time.monotonic() - began), 0.0))
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)

    def join(self, way: str = "alone", ranks: int = 1) -> "subprocess.Popen[str]":
        """Start processes that join it, and wait until all have asked."""
        before = len(self.requests())
        words = ["--ranks", str(ranks)] if way == "alone" and ranks > 1 else []
        process = processes.launch([*processes.start_way(way, ranks), "join", str(self.run), *words])
        processes.wait_for(lambda: process.poll() is not None or len(self.requests()) == before + ranks, "a request")
        assert process.poll() is None, process.communicate()
        return process

    def requests(self) -> list[Path]:
        return list((self.run / "join").glob("*.json"))

    def check(self, ranks: int) -> None:
        """It has ended with so many ranks, a row of metrics per round, and the bits of a run in this process."""
        out, err = self.process.communicate(timeout=processes.PATIENCE)
        assert self.process.returncode == 0, out + err
        assert yaml.safe_load((self.run / "config.yaml").read_text())["recorded"]["ranks"] == ranks
        assert [line["round"] for line in metrics_file.read(self.run)] == [str(one + 1) for one in range(ROUNDS)]
        assert quick_run.digest(self.run) == quick_run.run(self.raw, self._folder / "whole")
        assert not (self.run / "join").exists()
        assert not (self.run / "lock.json").exists()


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Exit code and output of a process that ends by itself."""
    out, err = process.communicate(timeout=processes.PATIENCE)
    return process.returncode, out + err


@pytest.mark.slow
def test_two_processes_share_the_clients_of_one(tmp_path: Path) -> None:
    words = documented("docs/clusters.md", "pflmpi join runs/train --ranks")
    assert words == ["pflmpi", "join", "runs/train", "--ranks", "2"]
    going = Going(tmp_path, "alone", 1)
    with going.still_after(2):
        joined = going.join(ranks=2)
    going.check(ranks=3)
    code, text = ended(joined)
    assert (code, "which has 3 ranks now" in text) == (0, True), text


@pytest.mark.slow
@pytest.mark.parametrize(("way", "algorithm"), [("mpi", "ditto"), ("torchrun", "fedgmh"), ("mpi", "fedgmh")])
def test_a_third_rank_joins_two_late(way: str, algorithm: str, tmp_path: Path) -> None:
    going = Going(tmp_path, way, 2, algorithm={"name": algorithm})
    with going.still_after(ROUNDS - 5):
        joined = going.join()
    going.check(ranks=3)
    assert ended(joined)[0] == 0


@pytest.mark.slow
def test_three_at_once_and_others_later(tmp_path: Path) -> None:
    going = Going(tmp_path, "mpi", 2, algorithm={"name": "apfl"})
    with going.still_after(1):
        first = going.join("mpi", 3)
    processes.wait_for(lambda: not going.requests(), "the first to be let in")
    with going.still_after(ROUNDS - 6):
        second, third = going.join("alone", 2), going.join()
    going.check(ranks=8)
    assert [ended(one)[0] for one in (first, second, third)] == [0, 0, 0]


@pytest.mark.slow
def test_who_is_gone_or_does_not_fit_is_left_out(tmp_path: Path) -> None:
    going = Going(tmp_path, "alone", 2, runtime={"timeout": 30})
    with going.still_after(2):
        killed, misfit, still, good = going.join(), going.join(), going.join(), going.join()
        killed.kill()
        killed.communicate()
        of = {request.process.process: request for [request] in join_requests.waiting(going.run)}
        wrong = of[misfit.pid]
        object.__setattr__(wrong, "setup", {**wrong.setup, "the data": "another hash"})
        join_requests.write(going.run, wrong)
        os.kill(still.pid, signal.SIGSTOP)
    code, text = ended(misfit)
    assert (code, "the data is not that of the run" in text) == (2, True), text
    going.check(ranks=3)
    assert ended(good)[0] == 0
    os.kill(still.pid, signal.SIGCONT)
    code, text = ended(still)
    assert code in (0, 3), text
    assert "internal" not in text, text


@pytest.mark.slow
@pytest.mark.parametrize(("way", "ranks"), [("alone", 1), ("torchrun", 2), ("mpi", 2)])
def test_one_that_is_let_in_and_then_hangs_is_left_out(way: str, ranks: int, tmp_path: Path) -> None:
    going = Going(tmp_path, way, ranks, runtime={"timeout": 15})
    with going.still_after(2):
        joiner = Joiner.of(going.run)
        request = joiner.request(ALONE, Peer.here(cores(), ()))
        join_requests.write(going.run, request)
    address = joiner.wait(request)
    rank, size, _ = rendezvous.connect(address, rendezvous.PATIENCE).attend(request.token, rendezvous.PATIENCE)
    assert (rank, size) == (ranks, ranks + 1)
    going.check(ranks=ranks)


@pytest.mark.slow
def test_a_signal_to_a_rank_that_has_joined_stops_all_with_a_checkpoint(tmp_path: Path) -> None:
    going = Going(tmp_path, "alone", 1)
    with going.still_after(2):
        joined = going.join()
    processes.wait_for(lambda: not going.requests(), "it to be let in")
    processes.wait_for(lambda: len(metrics_file.read(going.run)) > 4, "a round")
    joined.send_signal(signal.SIGUSR1)
    assert ended(joined)[0] == 75
    assert ended(going.process)[0] == 75
    assert quick_run.resume(going.run) == quick_run.run(going.raw, tmp_path / "whole")


def test_a_run_that_nobody_writes_cannot_be_joined(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    raw = quick_run.settings(training={"rounds": 1})
    quick_run.run(raw, tmp_path / "run")
    assert quick_run.command(["join", str(tmp_path / "run")]) == 0
    assert "has reached round 1 of 1" in capfd.readouterr().err
    assert quick_run.command(["resume", str(tmp_path / "run"), "-s", "training.rounds=2", "--ranks", "1"]) == 0
    (tmp_path / "run" / "round_00002.h5").unlink()
    capfd.readouterr()
    assert quick_run.command(["join", str(tmp_path / "run")]) == 2
    assert "`pflmpi resume" in capfd.readouterr().err
    assert quick_run.command(["join", str(tmp_path / "none")]) == 2
    assert "no folder" in capfd.readouterr().err
