"""Several runs: `pflmpi compare`, and one table of all of them in Python."""

import re
import shutil

import numpy as np
import pytest

import quick_run
from pflmpi.analysis.bisection import differing_settings
from pflmpi.analysis.comparable import differing_options, group_by_seed, list_compared_options, why_incomparable
from pflmpi.analysis.run import open_run
from pflmpi.analysis.runs import open_runs
from pflmpi.analysis.selection import name_runs
from pflmpi.cli import main
from pflmpi.cluster.run_status import read_run_status
from pflmpi.errors import CheckpointError
from pflmpi.store.runs import find_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    names = [folder / "mixed", folder / "averaged", folder / "faster"]
    quick_run.run(quick_run.settings(), names[0])
    quick_run.run(quick_run.settings(algorithm={"name": "fedavg"}), names[1])
    quick_run.run(quick_run.settings(algorithm={"name": "fedavg"}, training={"lr": 0.3, "rounds": 2}), names[2])
    return names


def table(words, capfd):
    """The cells of a comparison by the name of their row."""
    assert main(["compare", *map(str, words)]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
    return {name: row for name, *row in cells}


def test_options_that_differ_and_figures_are_shown(runs, capfd):
    shown = table(runs[:2], capfd)
    assert shown["algorithm.name"] == ["fedgmh", "fedavg"]
    assert "training.lr" not in shown and "recorded.data" not in shown
    for place, path in enumerate(runs[:2]):
        columns = open_run(path).columns
        assert shown["last (%)"][place] == f"{100 * columns['accuracy_mean'][-1]:.2f}"
        assert shown["std over clients (%)"][place] == f"{100 * columns['accuracy_std'][-1]:.2f}"
        assert shown["lowest 10 % (%)"][place] == f"{100 * columns['accuracy_bottom'][-1]:.2f}"
        assert shown["in round"][place] == str(columns["accuracy_mean"].argmax() + 1)
        assert shown["test loss"][place] == f"{columns['test_loss'][-1]:.4f}"
        assert shown["training loss"][place] == f"{columns['train_loss'][-1]:.4f}"
        assert shown["time (s)"][place] == f"{np.sum(columns['seconds']):.2f}"
    assert float(shown["up (KiB)"][0]) > 0 and shown["rounds"] == shown["of"] == ["3", "3"]
    assert "unseen (%)" not in shown


def test_options_that_came_after_a_run_are_their_defaults_in_it(tmp_path):
    later = {
        "data": ("task", "validation"),
        "partition": ("draw",),
        "model": ("cache_features",),
        "training": ("selection", "dropout", "step_seconds", "step_spread", "deadline", "micro_batch"),
        "evaluation": ("measures",),
    }
    runs = []
    for seed in (0, 1):
        quick_run.run(quick_run.settings(seed=seed, training={"rounds": 1}), tmp_path / f"seed{seed}")
        runs.append(open_run(tmp_path / f"seed{seed}"))
    for section, keys in later.items():
        for key in keys:
            runs[0].config[section].pop(key, None)
    assert why_incomparable(*runs) is None
    assert differing_options(runs) == {"seed": ["0", "1"]}
    assert [len(group.runs) for group in group_by_seed(name_runs(runs))] == [2]
    assert {key for key, *_ in differing_settings(*runs)} <= {
        "seed",
        "recorded.data",
        "recorded.partition",
        "recorded.partition_csv",
    }


def test_a_folder_is_compared_as_its_runs_and_seeds_are_one_column(runs, tmp_path, capfd, monkeypatch):
    for seed in (3, 4):
        quick_run.run(quick_run.settings(seed=seed, training={"rounds": 1}), tmp_path / "sweep" / f"seed{seed}")
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["compare", str(tmp_path / "sweep"), str(runs[1])]) == 0
    lines = [re.split(r"\s{2,}", line.strip()) for line in capfd.readouterr().out.splitlines() if line.strip()]
    assert lines[0][0].endswith("2 seeds") and len(lines[0]) == 2
    shown = {name: row for name, *row in lines}
    last = [100 * open_run(tmp_path / "sweep" / f"seed{seed}").columns["accuracy_mean"][-1] for seed in (3, 4)]
    assert shown["last (%)"][0] == f"{np.mean(last):.2f} ± {np.std(last, ddof=1):.2f}"
    assert shown["seed"] == ["3, 4", "3"]


def test_seeds_that_unlike_code_has_made_are_columns_of_their_own(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, step in ((3, 1), (4, 1), (5, 2)):
        text = "from pflmpi.algorithms.fedavg import FedAvg\n\nclass Mine(FedAvg):\n    step = {}\n"
        (tmp_path / "mine.py").write_text(text.format(step))
        raw = quick_run.settings(seed=seed, algorithm={"name": "mine.py:Mine"}, training={"rounds": 1})
        quick_run.run(raw, tmp_path / "sweep" / f"seed{seed}")
    shown = table([tmp_path / "sweep"], capfd)
    assert shown["seed"] == ["3, 4", "5"]
    assert len({*shown["code.algorithm"]}) == 2 and all(len(text) == 12 for text in shown["code.algorithm"])
    assert open_runs(f"{tmp_path}/sweep/*").summary()["seeds"].tolist() == [2, 1]


def test_a_fork_is_no_seed_of_what_it_was_not_from_the_start_on(runs):
    def run(seed, **fork):
        run = open_run(runs[1])
        run.config["seed"] = seed
        if fork:
            run.recorded["fork"] = {"run": f"{seed}", "digest": f"{seed}", **fork}
        return run

    def count(*those):
        return [len(group.runs) for group in group_by_seed(name_runs(those))]

    fork = {"round": 2, "changes": {"training.lr": [0.05, 0.1]}}
    assert count(run(0, **fork), run(1)) == count(run(0, **fork), run(1, **{**fork, "round": 1})) == [1, 1]
    assert count(run(0, **fork), run(1, **fork)) == [2], "forks of two seeds are seeds too"
    assert count(run(0, **fork), run(1, **fork, fork=fork)) == [1, 1], "the parent was a fork"
    unchanged = {"round": 2, "changes": {"training.rounds": [2, 3], "runtime.executor": ["loop", "lanes"]}}
    assert count(run(0, **unchanged), run(1)) == [2]
    cosine = [run(0, **unchanged), run(1)]
    for seed_run in cosine:
        seed_run.config["training"]["schedule"] = "cosine"
    assert count(*cosine) == [1, 1], "rates fall over all rounds"
    text = "training.lr was 0.05 until round 2"
    assert differing_options([run(0, **fork), run(0)]) == {"recorded.fork": [text, "-"]}
    assert list_compared_options([run(0, **fork), run(0)]) == {"recorded.fork": [text, ""]}


def test_more_runs_than_fit_are_in_several_tables(runs, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    assert main(["compare", *map(str, runs)]) == 0
    text = capfd.readouterr().out
    assert text.count("training.lr") == text.count("test loss") == 3


@pytest.mark.parametrize("name", ["old-seed0-1795846392506447663", ".Trash-1000/files/seed0"])
def test_runs_that_were_set_aside_or_thrown_away_are_not_counted(name, runs, tmp_path):
    shutil.copytree(runs[0], tmp_path / "seed0")
    shutil.copytree(runs[0], tmp_path / name)
    assert find_runs(tmp_path) == [tmp_path / "seed0"]
    assert find_runs(tmp_path / name) == [tmp_path / name], "named by itself"


def test_a_configuration_or_a_folder_of_shards_that_is_the_users_own_makes_no_run(runs, tmp_path, capfd):
    for number, run in enumerate(runs[:2]):
        shutil.copytree(run, tmp_path / f"run{number}")
    (tmp_path / "config.yaml").write_text("training: {rounds: 3}\n")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "of-mine.h5").touch()
    assert main(["compare", str(tmp_path)]) == 0 and read_run_status(tmp_path) is None
    shutil.copy(tmp_path / "config.yaml", tmp_path / "run1")
    assert main(["compare", str(tmp_path)]) == 2
    text = capfd.readouterr().err
    assert f"{tmp_path / 'run1' / 'config.yaml'} is not as it was written" in text and "or move it away" in text


def test_a_link_to_a_run_stands_for_it_and_one_to_another_folder_is_named(runs, tmp_path, caplog):
    (tmp_path / "among").mkdir()
    (tmp_path / "among" / "mixed").symlink_to(runs[0])
    assert find_runs(tmp_path / "among") == [tmp_path / "among" / "mixed"] and not caplog.records
    (tmp_path / "among" / "all").symlink_to(runs[0].parent)
    assert find_runs(tmp_path / "among") == [tmp_path / "among" / "mixed"]
    (record,) = caplog.records
    assert f"are not followed: {tmp_path}/among/all; name these too" in record.getMessage()
    assert find_runs(tmp_path / "among" / "all") == sorted(tmp_path / "among" / "all" / run.name for run in runs)


def test_runs_on_other_data_are_shown_and_said_to_be(runs, tmp_path, capfd):
    quick_run.run(quick_run.settings(data={"name": "digits", "limit": 300}), tmp_path / "less")
    assert main(["compare", str(runs[0]), str(tmp_path / "less")]) == 0
    text = capfd.readouterr().out
    assert "has other samples or clients" in text and "data.limit is 300 and not 400" in text


def test_seeds_whose_files_lie_elsewhere_are_seeds_of_one_run_and_those_of_other_files_are_not(runs):
    def run(seed, digests):
        run = open_run(runs[0])
        run.config["seed"] = seed
        of_data = {"path": f"{seed}/mine.npz", "resident": ["host", "gpu"][seed], "limit": None}
        run.config["data"] = {**run.config["data"], **of_data}
        run.config["partition"] = {"path": f"{seed}/partition.npz"}
        run.recorded.update(zip(("data", "partition"), digests, strict=True))
        return run

    first, moved = run(0, ("d0", "p0")), run(1, ("d0", "p0"))
    assert why_incomparable(first, moved) is None
    assert differing_options([first, moved]) == {"seed": ["0", "1"]}
    assert [len(group.runs) for group in group_by_seed(name_runs([first, moved]))] == [2]
    for digests, what in ((("d1", "p1"), "data"), (("d0", "p1"), "partition")):
        other = run(1, digests)
        assert f"(recorded.{what})" in why_incomparable(first, other)
        assert f"recorded.{what}" in differing_options([first, other])
        assert [len(group.runs) for group in group_by_seed(name_runs([first, other]))] == [1, 1]
    limited = [run(seed, (f"d{seed}", f"p{seed}")) for seed in (0, 1)]
    for limited_run in limited:
        limited_run.config["data"]["limit"] = 400
    assert why_incomparable(*limited) is None, "the seed chooses the samples"
    assert [len(group.runs) for group in group_by_seed(name_runs(limited))] == [2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for every, name in enumerate(("fedavg", "fedgmh"), 1):
        settings = {"algorithm": {"name": name}, "training": {"rounds": 2}, "checkpoint": {"every": every}}
        quick_run.run(quick_run.settings(**settings), folder / name)
    (folder / "notes").mkdir()
    return folder


def test_a_line_for_each_run_and_round_with_what_the_runs_differ_in(folder):
    runs = open_runs(f"{folder}/*")
    frame = runs.frame()
    assert frame["run"].tolist() == [str(folder / "fedavg")] * 2 + [str(folder / "fedgmh")] * 2
    assert list(frame.columns[:4]) == ["run", "algorithm.name", "data.name", "seed"]
    assert "algorithm.critical_share" in frame and "training.rounds" not in frame, "only keys that differ"
    assert "checkpoint.every" not in frame, "results do not depend on it"
    runs[1].config["data"]["root"] = "/elsewhere"
    assert "data.root" not in runs.frame(), "nor on where the data is"
    assert frame["round"].tolist() == [1, 2, 1, 2]
    assert frame["accuracy_mean"].tolist() == [float(v) for run in runs for v in run.columns["accuracy_mean"]]


def test_a_folder_whose_name_is_a_pattern_is_taken_itself(folder, tmp_path):
    for name in ("sq1", "sq[1]"):
        shutil.copytree(folder / "fedavg", tmp_path / name)
    for pattern in (tmp_path / "sq[1]", f"{tmp_path}/sq[[]1]"):
        assert [run.path for run in open_runs(pattern)] == [tmp_path / "sq[1]"]
    assert len(open_runs(f"{tmp_path}/sq*")) == 2


def test_a_line_that_is_being_written_is_left_out(folder, tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("config.yaml", "metrics.csv"):
        (tmp_path / "run" / name).write_bytes((folder / "fedavg" / name).read_bytes())
    with open(tmp_path / "run" / "metrics.csv", "a") as file:
        file.write("3,2,0.")
    runs = open_runs([tmp_path / "run"])
    assert runs.frame()["round"].tolist() == [1, 2] and runs[1:].frame().empty


def test_nothing_found_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="matches no run; give a pattern"):
        open_runs(tmp_path / "*")
