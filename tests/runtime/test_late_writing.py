"""What is written later than it was handed over is what it was then."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quick_run
from pflmpi import tree
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.store import run_folder
from pflmpi.store.writer import Writer


def test_a_checkpoint_is_of_its_round_though_an_algorithm_changes_its_state_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = quick_run.settings(algorithm={"name": "fedavg"}, training={"rounds": 3}, checkpoint={"every": 1, "keep": 0})
    quick_run.run(raw, tmp_path / "pure")
    pure, late = FedAvg.server_update, list[Callable[[], None]]()
    submit, close = Writer.submit, Writer.close

    def impure(self: FedAvg, task: Any, server: Any, up: Any, round: Any) -> Any:
        tree.map(lambda old, new: old.copy_(new), server, pure(self, task, server, up, round))
        return server

    def submit_later(self: Writer, job: Callable[[], None]) -> None:
        late.append(job)
        if len(late) > 1:
            submit(self, late.pop(0))

    def close_later(self: Writer, wait: bool = True) -> None:
        while late:
            submit(self, late.pop(0))
        close(self, wait)

    monkeypatch.setattr(FedAvg, "server_update", impure)
    monkeypatch.setattr(Writer, "submit", submit_later)
    monkeypatch.setattr(Writer, "close", close_later)
    quick_run.run(raw, tmp_path / "impure")
    for round in range(4):
        assert run_folder.digest(tmp_path / "impure", round) == run_folder.digest(tmp_path / "pure", round), round
