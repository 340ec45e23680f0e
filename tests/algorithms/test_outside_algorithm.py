"""An algorithm that is not in the package, one file: it keeps every promise without another line changed."""

import numpy as np

import quick_run
from comparisons import state_of
from pflmpi.cli import main
from pflmpi.store import run_folder
from project import ROOT

N = quick_run.QUICK["partition"]["clients"]


FEDBABU = f"{ROOT}/examples/fedbabu.py:FedBABU"


def settings(**sections):
    return quick_run.settings(algorithm={"name": FEDBABU, "fine_tuning_epochs": 2}, **sections)


def test_the_head_never_changes_and_only_the_body_travels(tmp_path):
    quick_run.run(settings(checkpoint={"keep": 0}), tmp_path / "run")
    first, last = (state_of(tmp_path / "run", round) for round in (0, 3))
    assert np.array_equal(first["clients/head/weight"], last["clients/head/weight"])
    assert (first["clients/head/weight"] == first["clients/head/weight"][0]).all(), "one head for all"
    assert not np.array_equal(first["server/body/body/fc1/weight"], last["server/body/body/fc1/weight"])
    body = sum(array.nbytes for path, array in last.items() if path.startswith("server/"))
    moved, participants = run_folder.read_bytes(tmp_path / "run", 3), run_folder.read_metrics(tmp_path / "run", 3)
    assert moved["up"].tolist() == np.where(np.isin(np.arange(N), participants["participants"]), body, 0).tolist()


def test_it_is_tested_with_a_fine_tuned_model(tmp_path):
    accuracies = []
    for epochs in (1, 8):
        raw = quick_run.settings(algorithm={"name": FEDBABU, "fine_tuning_epochs": epochs})
        accuracies.append(quick_run.run(raw, tmp_path / str(epochs)) and _accuracy(tmp_path / str(epochs)))
    assert accuracies[0] < accuracies[1]


def test_export_says_why_there_is_no_one_model(tmp_path, capfd):
    quick_run.run(settings(), tmp_path / "run")
    code = main(["export", str(tmp_path / "run"), "--client", "2", "-o", str(tmp_path / "client.npz")])
    assert code == 2 and "a model that it fine-tunes on its own data" in capfd.readouterr().err


def test_probe_and_report_know_it(tmp_path):
    run = tmp_path / "run"
    quick_run.run(settings(checkpoint={"keep": 0}), run)
    assert main(["probe", str(run), "--samples", "40"]) == 0
    assert main(["report", str(run), "--out", str(tmp_path / "page")]) == 0
    figures = {path.stem for path in (tmp_path / "page").rglob("*.csv")}
    assert {"accuracy_over_rounds", "clients_at_the_end", "layer_cka"} <= figures


def _accuracy(folder):
    return float(run_folder.read_metrics(folder, 3)["accuracy_mean"])
