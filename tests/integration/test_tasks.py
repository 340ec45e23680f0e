"""Tasks whose labels are no classes: from data to figures, with plain PyTorch as the oracle."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import quick_run
from pflmpi.algorithms import ALGORITHMS
from pflmpi.analysis.run import open_run
from pflmpi.config import load as configuration
from pflmpi.data.own_files import read_own
from pflmpi.data.task_kinds import TASK_KINDS
from pflmpi.errors import ConfigError, DataError
from pflmpi.experiment import build
from pflmpi.experiment.build import load_federation, prepare
from pflmpi.forecast.bytes import pool_bytes
from pflmpi.store import metrics_file, run_folder
from project import ROOT

LOSSES = {
    "regression": F.mse_loss,
    "multilabel": F.binary_cross_entropy_with_logits,
    "tokens": lambda scores, y: F.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=-100),
}
TASKS = list(LOSSES)
NETWORK = """
from torch import nn

class Tagger(nn.Module):
    def __init__(self, num_classes: int, width: int = 6):
        super().__init__()
        self.tokens = nn.Embedding(5, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.head(self.tokens(x.long()).tanh())
"""


@pytest.fixture
def raw(tmp_path):
    """A configuration of a task, with data of five clients."""
    rng = np.random.default_rng(0)
    (tmp_path / "network.py").write_text(NETWORK)
    table = rng.normal(size=(90, 4)).astype(np.float32)
    arrays = {
        "regression": (table, table @ rng.normal(size=(4, 2)) + 1),
        "multilabel": (table, table[:, :3] > 0.3),
        "tokens": (rng.integers(0, 5, (90, 6)), rng.integers(0, 3, (90, 6))),
    }
    arrays["tokens"][1][arrays["tokens"][0] == 4] = -100  # padding, of another length in each sample
    for task, (x, y) in arrays.items():
        np.savez(tmp_path / f"{task}.npz", x=x, y=y, client=np.sort(rng.integers(0, 5, 90)))

    def of(task: str, **sections: Any) -> dict[str, Any]:
        tagger = {"name": f"{tmp_path / 'network.py'}:Tagger", "head": "head"}
        return quick_run.settings(
            {
                "data": {"name": task, "path": str(tmp_path / f"{task}.npz"), "task": task, "limit": None},
                "partition": {"name": "writers", "clients": None},
                "model": tagger if task == "tokens" else {"name": "mlp", "hidden": 8},
                "algorithm": {"name": "fedavg"},
                "training": {"rounds": 2, "participation": 1.0, "batch_size": 1000, "lr": 0.1},
            },
            **sections,
        )

    return of


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("task", TASKS)
def test_fedavg_is_that_of_plain_pytorch(task, executor, raw, tmp_path):
    """One step on all samples of each client a round, weighed by samples; the test loss is the mean over clients."""
    settings = raw(task, runtime={"executor": executor, "lanes": 5})
    quick_run.run(settings, tmp_path / "run")
    experiment = prepare(configuration.parse(settings), torch.device("cpu"))
    of, data = experiment.tasks[0], experiment.federation
    samples = lambda part: (  # noqa: E731
        of.prepare(torch.tensor(data.dataset.images[part])),
        torch.tensor(data.dataset.labels[part]),
    )
    model = {path: leaf.requires_grad_() for path, leaf in flat(of.init()).items()}
    for _ in range(2):
        steps = {path: torch.zeros_like(leaf) for path, leaf in model.items()}
        for part in data.train:
            x, y = samples(part)
            slopes = torch.autograd.grad(LOSSES[task](of.predict(nested(model), x), y), [*model.values()])
            for path, slope in zip(model, slopes, strict=True):
                steps[path] += slope * len(part) / data.num_train.sum()
        model = {path: (leaf - 0.1 * steps[path]).detach().requires_grad_() for path, leaf in model.items()}
    server = run_folder.read_server(tmp_path / "run", 2)
    for path, leaf in model.items():
        np.testing.assert_allclose(server[f"model/{path}"], leaf.detach(), atol=2e-6, err_msg=path)
    with torch.no_grad():
        losses = [LOSSES[task](of.predict(nested(model), x), y).item() for x, y in map(samples, data.test)]
    line = metrics_file.read(tmp_path / "run")[1]
    assert float(line["test_loss"]) == pytest.approx(np.mean(losses), abs=1e-5)


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_micro_batches_of_numbers_have_the_mean_of_the_batch(executor, raw, tmp_path):
    """Clients of unlike sizes, so that lanes have padding; only the order of the sums differs."""
    ends = []
    for size in (None, 7):
        training, run = {"rounds": 2, "micro_batch": size}, tmp_path / str(size)
        quick_run.run(raw("regression", training=training, runtime={"executor": executor, "lanes": 5}), run)
        ends.append(run_folder.read_server(run, 2))
    for path, values in ends[0].items():
        np.testing.assert_allclose(ends[1][path], values, atol=2e-6, err_msg=path)
    assert any((ends[1][path] != values).any() for path, values in ends[0].items()), "micro batches were taken"


def flat(model):
    from pflmpi import tree

    return dict(tree.leaves(model))


def nested(leaves):
    from pflmpi import tree

    return tree.unflatten(leaves)


@pytest.mark.parametrize("task", TASKS)
def test_the_same_bits_on_any_ranks_and_after_a_resume(task, raw, tmp_path):
    settings = raw(task, algorithm={"name": "fedper"}, training={"rounds": 3, "batch_size": 4, "participation": 0.6})
    settings = quick_run.settings(settings, runtime={"executor": "lanes", "lanes": 2}, evaluation={"unseen": 0.2})
    settings["data"]["validation"] = 0.2
    digest = quick_run.run(settings, tmp_path / "one")
    assert [quick_run.run(settings, tmp_path / f"{ranks}", ranks) for ranks in (2, 3)] == [digest] * 2
    quick_run.run(quick_run.settings(settings, training={"rounds": 1}), tmp_path / "begun")
    assert quick_run.resume(tmp_path / "begun", ("training.rounds=3",), ranks=2) == digest
    lines = [metrics_file.read(tmp_path / name)[2] for name in ("one", "3", "begun")]
    for name in TASK_KINDS[task].default_measures:
        assert all(lines[0][f"{prefix}{name}_mean"] for prefix in ("", "unseen_", "validation_"))
        assert len({line[f"{name}_mean"] for line in lines}) == 1
    run = open_run(tmp_path / "one")
    assert run.config["evaluation"]["measures"] == list(TASK_KINDS[task].default_measures)
    assert ("accuracy" in run.round().metrics) == (task != "regression") and "hits" not in run.round().metrics


def test_measures_of_tokens_leave_out_padding(raw, tmp_path):
    settings = raw("tokens", training={"rounds": 1}, evaluation={"measures": ["accuracy", "perplexity"]})
    quick_run.run(settings, tmp_path / "run")
    experiment = prepare(configuration.parse(settings), torch.device("cpu"))
    task, data = experiment.tasks[0], experiment.federation
    model = nested(
        {
            path.removeprefix("model/"): torch.tensor(leaf)
            for path, leaf in run_folder.read_server(tmp_path / "run", 1).items()
        }
    )
    metrics = run_folder.read_metrics(tmp_path / "run", 1)
    for client, part in enumerate(data.test):
        y = torch.tensor(data.dataset.labels[part])
        scores = task.predict(model, task.prepare(torch.tensor(data.dataset.images[part])))
        right = (scores.argmax(-1) == y)[y != -100].double().mean()
        assert metrics["accuracy"][client] == pytest.approx(right.item())
        assert np.log(metrics["client_perplexity"][client]) == pytest.approx(metrics["client_test_loss"][client])


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_features_of_positions_may_be_cached(executor, raw, tmp_path):
    settings = raw("tokens", runtime={"executor": executor, "lanes": 2})
    states = []
    for cached in (False, True):
        settings["model"] |= {"trainable": ["head.*"], "cache_features": cached}
        quick_run.run(settings, tmp_path / str(cached))
        states.append(run_folder.read_server(tmp_path / str(cached), 2))
    for path, array in states[0].items():
        np.testing.assert_allclose(states[1][path], array, rtol=0, atol=1e-6, err_msg=path)
    setup = build.setup(prepare(configuration.parse(settings), torch.device("cpu")), 1, 1, 0)
    assert pool_bytes(setup, 0) == 4 * setup.executor.pool.images.numel() + 8 * 6 * 90


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_a_client_without_a_labelled_position_has_no_loss(executor, raw, tmp_path):
    arrays = {**np.load(tmp_path / "tokens.npz")}
    arrays["y"][arrays["client"] == 2] = -100
    np.savez(tmp_path / "tokens.npz", **arrays)
    quick_run.run(raw("tokens", training={"rounds": 1}, runtime={"executor": executor}), tmp_path / "run")
    losses = run_folder.read_metrics(tmp_path / "run", 1)["client_test_loss"]
    assert np.flatnonzero(np.isnan(losses)).tolist() == [2]
    (line,) = metrics_file.read(tmp_path / "run")
    assert float(line["test_loss"]) == pytest.approx(np.nanmean(losses), abs=1e-6)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_trains_numbers_or_refuses_them(name, raw, tmp_path):
    few = {"received_models": 2} if name == "fedfomo" else {}
    settings = raw("regression", algorithm={"name": name, **few}, training={"rounds": 2, "batch_size": 8})
    if ALGORITHMS[name].any_task:
        quick_run.run(settings, tmp_path)
        losses = [float(line["test_loss"]) for line in metrics_file.read(tmp_path)]
        assert losses[1] < losses[0] or name in ("fedadagrad", "fedadam", "fedyogi", "l2gd")
        return
    with pytest.raises(ConfigError, match=r"data.task = 'regression': .* computes with classes.*choose apfl, "):
        quick_run.run(settings, tmp_path)


@pytest.mark.parametrize(
    "task, sections, says",
    [
        (
            "regression",
            {"partition": {"name": "dirichlet", "clients": 3, "beta": 1.0}},
            "choose iid, lognormal, writers",
        ),
        (
            "regression",
            {"training": {"rounds": 3, "stop": {"metric": "accuracy_mean", "patience": 1}}},
            "labels of this data.task are no classes",
        ),
        ("regression", {"training": {"label_smoothing": 0.1}}, "spreads labels over classes"),
        ("tokens", {"training": {"micro_batch": 2}}, "micro_batch = 2 with data.task tokens, whose samples count"),
        ("regression", {"evaluation": {"measures": ["auroc"]}}, "auroc has no meaning .* choose rmse, mae, r2"),
        ("multilabel", {"evaluation": {"measures": ["perplexity"]}}, "choose accuracy, f1_macro, auroc"),
        ("tokens", {"model": {"name": "mlp"}}, r"has scores \[B, K\], and labels of this data.task need \[B, 6, K\]"),
        ("tokens", {"data": {"task": "multilabel"}}, "allowed: 0 and 1"),
        ("tokens", {"data": {"task": "classification"}}, r"y has the shape \[90, 6\]"),
        ("regression", {"data": {"task": "tokens"}}, "expected whole numbers"),
        ("regression", {"data": {"task": "regresion"}}, "did you mean 'regression'"),
        (
            "regression",
            {"data": {"name": "digits", "task": "regression"}, "partition": {"name": "iid", "clients": 3}},
            "set data.task to that",
        ),
    ],
)
def test_what_has_no_meaning_is_refused_at_the_start(task, sections, says, raw, tmp_path):
    with pytest.raises((ConfigError, DataError), match=says):
        quick_run.run(raw(task, **sections), tmp_path / "run")


@pytest.mark.parametrize("measure", ["token_accuracy", "f1_like", "unseenness", "trainedness"])
def test_an_early_stop_may_watch_any_measure_of_ones_own(measure, raw, tmp_path):
    (tmp_path / "own.py").write_text(f"def {measure}(scores, labels):\n    return 0.5\n")
    training = {"stop": {"metric": f"{measure}_mean", "patience": 2}}
    settings = raw("regression", training=training, evaluation={"measures": [f"{tmp_path / 'own.py'}:{measure}"]})
    prepare(configuration.parse(settings), torch.device("cpu"))


@pytest.mark.parametrize("partition", [{"name": "iid"}, {"name": "lognormal", "classes_per_client": 1, "sigma": 1.0}])
def test_partitions_that_need_no_classes_divide_numbers(partition, raw, tmp_path):
    settings = raw("regression", partition={**partition, "clients": 4}, training={"rounds": 1}, data={"limit": 80})
    quick_run.run(settings, tmp_path)
    partition = open_run(tmp_path).round().partition
    assert partition["train_samples"].sum() + partition["test_samples"].sum() == 80


OWN = """
from pflmpi.data.task_kinds import TaskKind

class Absolute(TaskKind):
    summary = "numbers, mean absolute error"

    def loss(self, scores, y):
        return (scores - y).abs().mean(-1)
"""


def test_a_task_of_ones_own_has_its_loss(raw, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    task = f"{tmp_path / 'own.py'}:Absolute"
    settings = raw("regression", data={"task": task}, training={"rounds": 1}, evaluation={"measures": ["mae"]})
    quick_run.run(settings, tmp_path / "run")
    line = metrics_file.read(tmp_path / "run")[0]
    assert float(line["test_loss"]) == pytest.approx(float(line["mae_mean"]), abs=1e-5)
    (tmp_path / "own.py").write_text(OWN.replace(".abs()", ".square()"))
    with pytest.raises(Exception, match="the code of task has changed"):
        quick_run.resume(tmp_path / "run", ("training.rounds=2",))


COSTLY = """
import torch
from pflmpi.data.task_kinds import Classification

class Costly(Classification):
    summary = "expected cost"

    def loss(self, scores, y):
        return (scores.softmax(-1) * (1 - torch.eye(scores.shape[-1]))[y]).sum(-1)
"""


def test_a_loss_may_have_tensors_of_its_own(tmp_path):
    (tmp_path / "own.py").write_text(COSTLY)
    data = {"name": "digits", "limit": 400, "task": f"{tmp_path / 'own.py'}:Costly"}
    raw = quick_run.settings(data=data, algorithm={"name": "fedavg"}, training={"rounds": 2})
    assert quick_run.run(raw, tmp_path / "run", 3) == quick_run.run(raw, tmp_path / "alone")
    assert 0 < open_run(tmp_path / "run").columns["test_loss"][-1] < 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (".mean(-1)", ".mean()", r"Absolute.loss returns \[\] for 5 samples; expected \[5\], the loss of each sample"),
        (".mean(-1)", ".mean(-1).tolist()", "Absolute.loss returns a list for 5 samples"),
        ("(scores - y)", "(scores - y).detach()", "Absolute.loss has no gradient by the scores"),
        ("(scores - y)", "(scores @ y)", r"own.py:8, in Absolute.loss: RuntimeError"),
    ],
)
def test_a_wrong_loss_is_refused_before_the_start(old, new, said, raw, tmp_path):
    (tmp_path / "own.py").write_text(OWN.replace(old, new))
    with pytest.raises(ConfigError, match=said):
        quick_run.run(raw("regression", data={"task": f"{tmp_path / 'own.py'}:Absolute"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_samples_may_count_less_than_one(raw, tmp_path):
    light = (
        OWN.replace("(scores - y)", "0.01 * (scores - y)")
        + """
    def weights(self, y):
        return 0.01 + 0 * y[:, 0]
"""
    )
    for name, code in (("whole", OWN), ("light", light)):
        (tmp_path / f"{name}.py").write_text(code)
        sections = {"data": {"task": f"{tmp_path / name}.py:Absolute"}, "evaluation": {"measures": ["mae"]}}
        quick_run.run(raw("regression", **sections), tmp_path / name)
    for full, light in zip(*(metrics_file.read(tmp_path / name) for name in ("whole", "light")), strict=True):
        for column in ("train_loss", "test_loss", "mae_mean"):
            assert float(light[column]) == pytest.approx(float(full[column]), abs=2e-6), column


FOCAL = """
from pflmpi.data.task_kinds import Classification

class Focal(Classification):
    summary = "focal loss, gamma = 2"

    def loss(self, scores, y):
        likely = scores.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return -likely * (1 - likely.exp()) ** 2
"""


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_another_loss_of_classes(executor, tmp_path):
    (tmp_path / "own.py").write_text(FOCAL)
    data = {"name": "digits", "limit": 400, "task": f"{tmp_path / 'own.py'}:Focal"}
    raw = quick_run.settings(data=data, algorithm={"name": "fedavg"}, runtime={"executor": executor, "lanes": 2})
    quick_run.run(quick_run.settings(raw, training={"rounds": 1, "batch_size": 1000}), tmp_path / "run")
    experiment = prepare(configuration.parse(raw), torch.device("cpu"))
    task, data = experiment.tasks[0], experiment.federation
    metrics = run_folder.read_metrics(tmp_path / "run", 1)
    for client, loss in zip(metrics["participants"], metrics["client_train_loss"], strict=True):
        part = data.train[client]
        y = torch.tensor(data.dataset.labels[part])
        scores = task.predict(task.init(), task.prepare(torch.tensor(data.dataset.images[part])))
        likely = scores.softmax(-1)[torch.arange(len(y)), y]
        assert loss == pytest.approx((-likely.log() * (1 - likely) ** 2).mean().item(), abs=1e-5)
    assert metrics["test_loss"] < metrics["accuracy"].size * np.log(10) and "hits" in metrics
    with pytest.raises(ConfigError, match="FedGMH computes with classes, and is not said"):
        quick_run.run(quick_run.settings(raw, algorithm={"name": "fedgmh"}), tmp_path / "other")


def test_columns_of_a_table_are_numbers_to_predict(tmp_path, capfd):
    (tmp_path / "table.csv").write_text("a,price,size\n1,2.5,7\n2,3.5,8\n3,4.5,9\n")
    dataset = read_own(tmp_path / "table.csv", "price", task_kind=TASK_KINDS["regression"]())
    assert (dataset.labels.tolist(), dataset.columns) == ([[2.5], [3.5], [4.5]], ("a", "size"))
    two_columns = read_own(tmp_path / "table.csv", ["price", "size"], task_kind=TASK_KINDS["regression"]())
    assert (two_columns.labels.tolist(), two_columns.num_classes) == ([[2.5, 7], [3.5, 8], [4.5, 9]], 2)
    words = ["data", str(tmp_path / "table.csv"), "--task", "regression", "--label"]
    for labels in (["price,size"], ["price", "--label", "size"]):  # no label becomes a column to predict from
        assert quick_run.command([*words, *labels]) == 0
        assert "labels   float32 [3, 2], 2.5 to 9; 2 outputs" in capfd.readouterr().out
    assert quick_run.command([*words, "nonsense"]) == 2
    assert "data.label = 'nonsense'; known: a, price, size" in capfd.readouterr().err


def test_a_run_of_numbers_is_shown(raw, tmp_path, capsys):
    run, other, page = (str(tmp_path / name) for name in ("run", "other", "page"))
    quick_run.run(raw("regression"), Path(run))
    quick_run.run(raw("regression", training={"lr": 0.01}), Path(other))
    assert quick_run.command(["evaluate", run]) == 0
    assert "rmse_mean" in capsys.readouterr().out
    for words in (
        ["inspect", run],
        ["compare", run, other],
        ["report", run, "--out", page],
        ["report", run, other, "--out", page],
    ):
        assert quick_run.command(words) == 0
        if "report" in words:
            text = Path(page, "report.html").read_text()
            assert "rmse over rounds" in text and "highest 10 % (rmse)" in text and "Accuracy over rounds" not in text


@pytest.mark.parametrize("task", TASKS)
def test_the_examples_learn(task, tmp_path):
    written = runpy.run_path(str(ROOT / "examples" / "tasks.py"))[task]()
    np.savez(tmp_path / f"{task}.npz", **written)
    raw = configuration.read(ROOT / "examples" / f"{task}.yaml")
    raw["data"]["path"] = str(tmp_path / Path(raw["data"]["path"]).name)
    raw["training"]["rounds"] = 2
    raw["model"]["name"] = raw["model"]["name"].replace("./", f"{ROOT / 'examples'}/")
    quick_run.run(raw, tmp_path / "run")
    first, last = (float(line["test_loss"]) for line in metrics_file.read(tmp_path / "run"))
    assert last < first


@pytest.mark.parametrize("task", TASKS)
def test_validation_samples_have_the_measures_of_the_task(task, raw, tmp_path):
    settings = raw(task, data={"validation": 0.2})
    assert quick_run.run(settings, tmp_path / "one") == quick_run.run(settings, tmp_path / "three", 3)
    line, metrics = metrics_file.read(tmp_path / "one")[-1], run_folder.read_metrics(tmp_path / "one", 2)
    held_out = load_federation(configuration.parse(settings)).num_validation
    assert held_out.sum() == pytest.approx(0.2 * 90 * 0.75, abs=3)
    of_test = [name for name in line if name.endswith("_mean") and not name.startswith(("valid", "unseen", "trained"))]
    for name in of_test:
        assert bool(line[f"validation_{name}"]) == bool(line[name]), name
    losses = metrics["validation_client_loss"]
    assert len(losses) == 5 and float(line["validation_loss"]) == pytest.approx(losses.mean(), abs=1e-6)
