"""`pflmpi evaluate`: the measures of a checkpoint are those of the run, and of any other samples."""

import csv

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, log_loss

import quick_run
from every_algorithm import TESTED, every_algorithm
from pflmpi import open_run, tree
from pflmpi.config import load as configuration
from pflmpi.errors import ConfigError
from pflmpi.experiment.build import prepare
from pflmpi.runtime.client_state import tree_from_arrays
from pflmpi.store import run_folder

CASES = {sections["algorithm"]["name"]: sections for sections in every_algorithm().values()}  # one of each
UNSEEN = {"partition": {"clients": 9}, "evaluation": {"unseen": 0.2}}


def evaluated(run, *words):
    out = run.parent / f"{run.name}.csv"
    assert quick_run.command(["evaluate", str(run), *words, "-o", str(out), "--force"]) == 0
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


def correct(lines):
    return [int(line["correct"]) for line in lines]


def experiment(raw):
    return prepare(configuration.parse(raw), torch.device("cpu"))


@pytest.mark.parametrize("case", TESTED)
def test_it_finds_the_accuracies_that_the_run_recorded(case, tmp_path):
    lanes = {"runtime": {"executor": "lanes", "lanes": 2}} if len(case) % 2 else {"runtime": {"executor": "loop"}}
    quick_run.run(quick_run.settings(CASES[case], **UNSEEN, **lanes), tmp_path / "run")
    metrics = run_folder.read_metrics(tmp_path / "run", 2)
    assert correct(evaluated(tmp_path / "run", "--round", "2")) == metrics["correct"].tolist()
    assert correct(evaluated(tmp_path / "run", "--round", "2", "--unseen")) == metrics["unseen_correct"].tolist()


def test_what_absent_clients_last_received_counts_where_the_run_says_so(tmp_path):
    quick_run.run(quick_run.settings(CASES["fesem"], evaluation={"absent": "last_received"}), tmp_path / "run")
    recorded = run_folder.read_metrics(tmp_path / "run", 3)["correct"]
    assert correct(evaluated(tmp_path / "run")) == recorded.tolist()


def test_its_output_begins_with_what_was_tested_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    quick_run.run(quick_run.settings(), tmp_path / "run")
    capsys.readouterr()
    assert quick_run.command(["evaluate", str(tmp_path / "run"), "--round", "2", "--split", "train"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{tmp_path / 'run'}, round 2, train samples"


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("split", ["test", "train"])
def test_its_measures_are_those_of_scikit_learn(executor, split, tmp_path):
    raw = quick_run.settings(algorithm={"name": "fedavg"}, runtime={"executor": executor, "lanes": 3})
    quick_run.run(raw, tmp_path / "run")
    made = experiment(raw)
    task, dataset = made.tasks[0], made.federation.dataset
    model = tree.part(tree_from_arrays(run_folder.read_server(tmp_path / "run", 3)), "model")
    lines = evaluated(tmp_path / "run", "--split", split)
    assert len(lines) == made.federation.num_clients
    for line, samples in zip(lines, getattr(made.federation, split), strict=True):
        scores = task.predict(model, task.prepare(torch.from_numpy(dataset.images[samples]))).double()
        labels, predicted = dataset.labels[samples], scores.argmax(1).numpy()
        assert int(line["correct"]) == (labels == predicted).sum() and int(line["samples"]) == len(samples)
        expected = f1_score(labels, predicted, average="macro"), log_loss(labels, scores.softmax(1), labels=range(10))
        assert (float(line["f1_macro"]), float(line["loss"])) == pytest.approx(expected, abs=2e-6)
        for label in np.unique(labels):
            share = (predicted[labels == label] == label).mean()
            assert float(line[f"accuracy_class_{label}"]) == pytest.approx(share, abs=1e-6)


def test_other_data_tests_every_client_on_all_of_it_or_on_its_own(tmp_path):
    raw = quick_run.settings(algorithm={"name": "pfedafe"})  # which adapts on the run's own training samples
    quick_run.run(raw, tmp_path / "run")
    made = experiment(raw)
    dataset, tests = made.federation.dataset, made.federation.test
    order = np.concatenate(tests)
    values = {"x": dataset.images[order], "y": dataset.labels[order]}
    np.savez(tmp_path / "all.npz", **values)
    np.savez(tmp_path / "own.npz", **values, client=np.repeat(np.arange(7), [len(indices) for indices in tests]))
    own = evaluated(tmp_path / "run", "--data", str(tmp_path / "own.npz"))
    assert correct(own) == run_folder.read_metrics(tmp_path / "run", 3)["correct"].tolist()
    assert {line["samples"] for line in evaluated(tmp_path / "run", "--data", str(tmp_path / "all.npz"))} == {
        str(len(order))
    }


def test_other_data_may_lack_classes_and_have_them_and_its_columns_in_another_order(tmp_path, capfd):
    rng = np.random.default_rng(0)
    kinds = np.array(["cat", "dog", "emu"])[np.arange(60) % 3]
    a, b = (rng.normal(np.arange(60) % 3, 0.1) * scale for scale in (1, -2))
    lines = [f"{x},{y},{kind}" for x, y, kind in zip(a, b, kinds, strict=True)]
    (tmp_path / "all.csv").write_text("\n".join(["a,b,label", *lines]))
    raw = quick_run.settings(
        partition={"name": "iid", "clients": 4},
        algorithm={"name": "fedavg"},
        training={"rounds": 6, "epochs": 8, "lr": 0.2},
    )
    raw["data"] = {"path": str(tmp_path / "all.csv")}
    quick_run.run(raw, tmp_path / "run")
    rows = [(x, y, kind) for x, y, kind in zip(a, b, kinds, strict=True) if kind != "cat"]
    (tmp_path / "some.csv").write_text("\n".join(["label,b,a", *(f"{kind},{y},{x}" for x, y, kind in rows)]))
    full, partial = (evaluated(tmp_path / "run", "--data", str(tmp_path / f"{name}.csv")) for name in ("all", "some"))
    for line, partial_line in zip(full, partial, strict=True):
        assert float(line["accuracy"]) > 0.9 and line["samples"] == "60" and partial_line["samples"] == "40"
        assert partial_line["accuracy_class_cat"] == ""
        for label in ("dog", "emu"):
            assert partial_line[f"accuracy_class_{label}"] == line[f"accuracy_class_{label}"]
    (tmp_path / "third.csv").write_text("a,c,label\n1,2,cat\n")
    assert quick_run.command(["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "third.csv")]) == 2
    assert "third and the run differ in columns: only one has c" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("labels", "names", "others", "unknown"),
    [([1, 2, 3], {}, [0, 1, 2], 0), ([0, 1, 2], {"class_names": ["1", "2", "3"]}, [1, 2, 3], 3)],
)
def test_classes_without_names_are_those_of_the_same_label(labels, names, others, unknown, tmp_path, capfd):
    classes = np.arange(60) % 3
    x, y = np.eye(3)[classes], np.array(labels)[classes]
    np.savez(tmp_path / "my.npz", x=x, y=y, **names)
    raw = quick_run.settings(model="logistic", algorithm="fedavg", training={"lr": 1}, partition={"clients": 2})
    raw["data"] = {"path": str(tmp_path / "my.npz")}
    quick_run.run(raw, tmp_path / "run")
    np.savez(tmp_path / "some.npz", x=x[classes > 0], y=y[classes > 0])
    assert {line["correct"] for line in evaluated(tmp_path / "run", "--data", str(tmp_path / "some.npz"))} == {"40"}
    np.savez(tmp_path / "other.npz", x=x, y=np.array(others)[classes])
    assert quick_run.command(["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "other.npz")]) == 2
    assert f"other and the run differ in classes: only one has {unknown}" in capfd.readouterr().err


def test_clients_of_other_data_are_those_of_the_same_name(tmp_path, capfd):
    rng = np.random.default_rng(0)
    x, y, names = rng.normal(size=(60, 3)), np.arange(60) % 2, np.array(["ann", "bob", "eve"])
    np.savez(tmp_path / "my.npz", x=x, y=y, client=np.repeat(names, [15, 20, 25]))
    raw = quick_run.settings(partition={"name": "writers", "clients": None}, model="logistic", algorithm="local")
    raw["data"] = {"path": str(tmp_path / "my.npz")}
    quick_run.run(raw, tmp_path / "run")
    for file, clients in (("same", ["eve", "ann", "bob"]), ("other", ["ann", "bob", "cat"])):
        np.savez(tmp_path / f"{file}.npz", x=x, y=y, client=np.repeat(clients, [10, 20, 30]))
    lines = evaluated(tmp_path / "run", "--data", str(tmp_path / "same.npz"))
    assert [line["samples"] for line in lines] == ["20", "30", "10"]
    assert quick_run.command(["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "other.npz")]) == 2
    assert "other and the run differ in clients: only one has cat" in capfd.readouterr().err
    np.savez(tmp_path / "one.npz", x=x[:9], y=y[:9], client=np.repeat("bob", 9))
    lines = evaluated(tmp_path / "run", "--data", str(tmp_path / "one.npz"))
    assert [line["samples"] for line in lines] == ["0", "9", "0"]
    raw["partition"] = {"name": "iid", "clients": 3}
    quick_run.run(raw, tmp_path / "mixed")
    assert quick_run.command(["evaluate", str(tmp_path / "mixed"), "--data", str(tmp_path / "same.npz")]) == 2
    assert "the clients of the run are not those of its own data" in capfd.readouterr().err


def test_clients_are_called_by_the_names_in_their_data(tmp_path, capfd):
    names = np.array(["+ann", "-bob", "=eve", "@zoe"])  # a spreadsheet would take them for formulas
    x, y = np.random.default_rng(0).normal(size=(80, 3)), np.arange(80) % 2
    np.savez(tmp_path / "my.npz", x=x, y=y, client=np.repeat(names, 20))
    np.savez(tmp_path / "new.npz", x=x, y=y, client=np.repeat(["yan", "xi"], 40))
    raw = quick_run.settings(partition={"name": "writers", "clients": None}, model="logistic", algorithm="local")
    raw["data"], raw["evaluation"] = {"path": str(tmp_path / "my.npz")}, {"unseen": 0.25}
    quick_run.run(raw, tmp_path / "run")
    (left_out,) = open_run(tmp_path / "run").recorded["unseen"]
    kept = [name for name in names if name != names[left_out]]
    assert open_run(tmp_path / "run").clients_table([2])["client_name"].tolist() == kept

    def evaluated_names(*words):
        return [line["client_name"] for line in evaluated(tmp_path / "run", *words)]

    capfd.readouterr()
    assert evaluated_names() == kept
    shown = capfd.readouterr().out
    assert all(name in shown for name in kept) and names[left_out] not in shown
    assert evaluated_names("--unseen") == [names[left_out]]
    assert evaluated_names("--unseen", "--data", str(tmp_path / "new.npz")) == ["xi", "yan"]
    trained = np.repeat(names != names[left_out], 20)
    np.savez(tmp_path / "trained.npz", x=x[trained], y=y[trained], client=np.repeat(kept, 20))
    assert evaluated_names("--data", str(tmp_path / "trained.npz")) == kept
    np.savez(tmp_path / "left.npz", x=x[~trained], y=y[~trained], client=np.repeat(names[left_out], 20))
    assert quick_run.command(["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "left.npz")]) == 2
    assert "--data left has no samples of the trained clients" in capfd.readouterr().err
    raw["partition"] = {"name": "iid", "clients": 4}
    quick_run.run(raw, tmp_path / "mixed")
    assert "client_name" not in evaluated(tmp_path / "mixed")[0], "no client of the run is one of the data"
    assert "client_name" not in open_run(tmp_path / "mixed").clients_table()


def test_clients_without_names_are_those_of_the_same_number(tmp_path, capfd):
    quick_run.run(quick_run.settings(training={"rounds": 1}), tmp_path / "run")
    x, y = np.zeros((70, 8, 8), np.uint8), np.arange(70) % 10
    for file, clients in (("numbers", np.arange(7)), ("names", [*"abcdefg"])):
        np.savez(tmp_path / f"{file}.npz", x=x, y=y, client=np.repeat(clients, [7, 8, 9, 10, 11, 12, 13]))
    lines = evaluated(tmp_path / "run", "--data", str(tmp_path / "numbers.npz"))
    assert [line["samples"] for line in lines] == ["7", "8", "9", "10", "11", "12", "13"]
    assert quick_run.command(["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "names.npz")]) == 2
    assert "names and the run differ in clients: only one has a, b, c" in capfd.readouterr().err


def test_pixels_normalised_by_all_samples_are_no_others(tmp_path, capfd):
    raw = quick_run.settings(data={"normalize": "pixel"}, algorithm={"name": "fedavg"}, training={"rounds": 1})
    with pytest.raises(ConfigError, match=r"evaluation.unseen = 0.3 with data.normalize = pixel"):
        quick_run.run(quick_run.settings(raw, evaluation={"unseen": 0.3}), tmp_path / "unseen")
    quick_run.run(raw, tmp_path / "run")
    np.savez(tmp_path / "one.npz", x=np.ones((1, 8, 8), np.uint8), y=[0])
    assert quick_run.command(["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "one.npz")]) == 2
    assert "--data one: with data.normalize: pixel" in capfd.readouterr().err


def test_new_clients_of_other_data_join_an_old_checkpoint(tmp_path):
    quick_run.run(quick_run.settings(algorithm={"name": "local"}), tmp_path / "run")
    x, y = np.random.default_rng(0).integers(0, 256, (60, 8, 8), np.uint8), np.arange(60) % 10
    np.savez(tmp_path / "new.npz", x=x, y=y, client=np.repeat([0, 1, 2], 20))
    words = ["--unseen", "--data", str(tmp_path / "new.npz"), "--split", "train"]
    once, often = (evaluated(tmp_path / "run", *words, "--updates", updates) for updates in ("1", "200"))
    assert len(once) == 3 and sum(correct(often)) > sum(correct(once)), "they learn what they are given"


def test_training_at_rate_zero_is_refused(tmp_path, capfd):
    raw = quick_run.settings(algorithm={"name": "local"}, training={"schedule": "cosine"})
    quick_run.run(raw, tmp_path / "run")
    np.savez(tmp_path / "new.npz", x=np.zeros((9, 8, 8), np.uint8), y=np.arange(9))
    for words in (["--after-training"], ["--unseen", "--data", str(tmp_path / "new.npz")]):
        assert evaluated(tmp_path / "run", "--round", "2", *words)
        assert quick_run.command(["evaluate", str(tmp_path / "run"), *words]) == 2
        assert f"{words[0]}: after round 3" in (error := capfd.readouterr().err) and "earlier --round" in error


@pytest.mark.parametrize("command", ["evaluate", "probe"])
def test_kernels_are_fixed_before_anything_is_computed(command, tmp_path, monkeypatch):
    quick_run.run(quick_run.settings(), tmp_path / "run")
    devices_fixed: list[torch.device] = []

    def opened(*args, **options):
        assert devices_fixed, "cuBLAS keeps what it was told at its first call"
        raise SystemExit(7)

    monkeypatch.setattr("pflmpi.experiment.restore.fix_kernels", lambda device, *config: devices_fixed.append(device))
    monkeypatch.setattr("pflmpi.experiment.restore.load_federation", opened)
    assert quick_run.command([command, str(tmp_path / "run")]) == 7
