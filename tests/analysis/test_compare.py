"""`pflmpi compare`: runs side by side, with the figures that their metrics have."""

import re
import subprocess
import sys

import numpy as np
import pytest

import quick_run
from pflmpi.analysis.run import open_run
from pflmpi.cli import main


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


def test_it_needs_no_torch(runs):
    code = "import sys; from pflmpi.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, "compare", *map(str, runs)], check=True, stdout=subprocess.DEVNULL)


def test_more_runs_than_fit_are_in_several_tables(runs, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    assert main(["compare", *map(str, runs)]) == 0
    text = capfd.readouterr().out
    assert text.count("training.lr") == text.count("test loss") == 3


def test_runs_on_other_data_are_shown_and_said_to_be(runs, tmp_path, capfd):
    quick_run.run(quick_run.settings(data={"name": "digits", "limit": 300}), tmp_path / "less")
    assert main(["compare", str(runs[0]), str(tmp_path / "less")]) == 0
    text = capfd.readouterr().out
    assert "has other samples or clients" in text and "data.limit is 300 and not 400" in text
