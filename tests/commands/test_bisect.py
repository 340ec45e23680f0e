"""`pflmpi bisect`: where two runs part, and what they were run with."""

import re
import shutil

import numpy as np
import pytest

import quick_run
from pflmpi.analysis.bisection import Bisection, bisect
from pflmpi.analysis.run import open_run
from pflmpi.cli import main
from pflmpi.store import metrics_file, run_folder

ROUNDS = 6


def made(folder, every, **training):
    raw = quick_run.settings(training={"rounds": ROUNDS, **training}, checkpoint={"every": every, "keep": 0})
    quick_run.run(raw, folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Checkpoints of every round and of every third; and of two whose rate falls after round 4."""
    folder = tmp_path_factory.mktemp("runs")
    falls = {"schedule": "step", "lr_decay": 0.5, "decay_rounds": 4}
    return {
        "every": made(folder / "every", 1),
        "third": made(folder / "third", 3),
        "falls": made(folder / "falls", 1, **falls),
        "falls third": made(folder / "falls-third", 3, **falls),
    }


def told(capfd, first, second, *words):
    code = main(["bisect", str(first), str(second), *words])
    return code, capfd.readouterr().out


def test_the_same_bits_on_other_ranks_are_the_same(runs, tmp_path, capfd):
    rerun = shutil.copytree(runs["every"], tmp_path / "other")
    assert told(capfd, runs["every"], rerun)[1].splitlines() == [
        f"the same: round {ROUNDS}, the newest with a checkpoint in both",
        "configuration, data, code, device and versions are the same",
    ]
    metrics_file.path(rerun).unlink()
    quick_run.resume(rerun)
    code, text = told(capfd, runs["every"], rerun)
    assert code == 0 and "figures differ" not in text, "they are lost"
    code, text = told(capfd, runs["every"], runs["third"])
    assert code == 0 and text.splitlines()[1:] == ["checkpoint.every: 1 and 3"]


def test_the_first_round_client_and_array_are_told_with_the_settings(runs, capfd):
    code, text = told(capfd, runs["every"], runs["falls"])
    assert code == 1
    assert "the first checkpoint that differs: round 5; round 4 is the same in both\n" in text
    (ids, before), *_ = run_folder.read_clients(runs["every"], 5, np.arange(7)).values()
    (_, after), *_ = run_folder.read_clients(runs["falls"], 5, np.arange(7)).values()
    changed = {path: (before[path] != after[path]).reshape(7, -1).any(1) for path in sorted(before)}
    clients = np.flatnonzero(np.any(list(changed.values()), axis=0))
    first = ids[clients[0]]
    paths = [path for path, rows in changed.items() if rows[first]]
    assert f"the first of {len(clients)} clients that differ: client {first}, {', '.join(paths[:4])}" in text
    assert "of the server: " in text
    assert re.search(r"^metrics.csv: figures differ first in round 5$", text, re.MULTILINE)
    settings = [line for line in text.splitlines() if re.match("training|recorded|model|data", line)]
    assert [line.partition(":")[0] for line in settings] == [
        "training.decay_rounds",
        "training.lr_decay",
        "training.schedule",
    ]


@pytest.mark.parametrize("every", range(ROUNDS + 1))
def test_the_search_finds_any_round(every, runs):
    first, second = (open_run(runs[name]) for name in ("every", "falls"))
    bisection = bisect(_Some(first, [*range(every, ROUNDS + 1)]), second)
    assert bisection == Bisection(4 if every <= 4 else None, max(every, 5), 5)


class _Some:
    """A run with some of its checkpoints."""

    def __init__(self, run, rounds):
        self._run, self.rounds = run, rounds

    def __getattr__(self, name):
        return getattr(self._run, name)


def test_rounds_without_a_checkpoint_are_named_or_run_again(runs, capfd):
    code, text = told(capfd, runs["falls third"], runs["third"])
    assert code == 1 and "the first checkpoint that differs: round 6; round 3 is the same in both" in text
    assert "could not be looked at: round 4-5, without a checkpoint in both; `pflmpi bisect " in text
    before = {path: path.stat().st_mtime_ns for name in runs for path in runs[name].rglob("*")}
    code, text = told(capfd, runs["falls third"], runs["third"], "--replay")
    assert code == 1 and "the first checkpoint that differs: round 5; round 4 is the same in both" in text
    assert "could not" not in text and "not as recorded" not in text
    assert before == {path: path.stat().st_mtime_ns for name in runs for path in runs[name].rglob("*")}


def test_a_run_that_comes_out_otherwise_when_it_is_run_again_is_named(runs, capfd, monkeypatch):
    monkeypatch.setattr("pflmpi.python.run.run", lambda *args, **options: open_run(runs["every"]))
    _, text = told(capfd, runs["falls third"], runs["third"], "--replay")
    assert f"{runs['falls third']}: run again from round 3, round 6 is not as recorded" in text
    assert f"{runs['third']}: run again" not in text


def test_runs_without_a_common_checkpoint_and_what_is_no_run_are_refused(runs, tmp_path, capfd):
    renumbered = shutil.copytree(runs["third"], tmp_path / "other")
    for round in (0, 3, 6):
        (renumbered / f"round_0000{round}.h5").rename(renumbered / f"round_0001{round}.h5")
    assert main(["bisect", str(runs["every"]), str(tmp_path)]) == 2
    assert main(["bisect", str(runs["every"]), str(renumbered)]) == 2
    assert capfd.readouterr().err.count("\n") == 2
