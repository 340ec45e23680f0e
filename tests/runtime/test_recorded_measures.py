"""What a run records of its clients: losses, F1, the lowest tenth; the same on any number of ranks."""

from typing import Any

import numpy as np
import pytest
import torch

import quick_run
from pflmpi.config import load as configuration
from pflmpi.experiment.build import prepare
from pflmpi.store import metrics_file, run_folder
from pflmpi.testing.conformance import EXECUTORS


@pytest.mark.parametrize("executor", EXECUTORS)
def test_losses_and_measures_are_recorded_and_the_same_on_three_ranks(executor, tmp_path):
    raw = quick_run.settings(
        algorithm={"name": "fedper"}, training={"rounds": 2}, runtime={"executor": executor, "lanes": 2}
    )
    for ranks in (1, 3):
        quick_run.run(raw, tmp_path / str(ranks), ranks)
    one, three = (run_folder.read_metrics(tmp_path / str(ranks), 2) for ranks in (1, 3))
    for name in one:
        if not name.startswith("seconds"):
            np.testing.assert_array_equal(one[name], three[name], err_msg=name)
    assert len(one["client_train_loss"]) == len(one["participants"]) and (one["client_train_loss"] > 0).all()
    assert (one["hits"].sum(1) == one["correct"]).all() and (one["predicted"].sum(1) == one["total"]).all()
    line = metrics_file.read(tmp_path / "1")[1]
    for name, value in (
        ("train_loss", one["client_train_loss"].mean()),
        ("test_loss", one["client_test_loss"].mean()),
        ("f1_macro", one["client_f1"].mean()),
        ("accuracy_bottom", one["accuracy"].min()),  # of seven clients
    ):
        assert float(line[name]) == pytest.approx(value, abs=1e-6), name


def test_the_training_loss_is_that_of_the_steps_before_they_are_taken(tmp_path):
    """With one step over all samples it is the loss of the initial model on them."""
    raw: dict[str, Any] = quick_run.settings(
        algorithm={"name": "fedavg"}, training={"rounds": 1, "batch_size": 1000, "participation": 1.0}
    )
    quick_run.run(raw, tmp_path / "run")
    experiment = prepare(configuration.parse(raw), torch.device("cpu"))
    task, data = experiment.tasks[0], experiment.federation
    found = run_folder.read_metrics(tmp_path / "run", 1)["client_train_loss"]
    for client, mine in enumerate(data.train):
        images, labels = (torch.from_numpy(np.array(all[mine])) for all in (data.dataset.images, data.dataset.labels))
        scores = task.predict(task.init(), task.prepare(images))
        expected = torch.nn.functional.cross_entropy(scores, labels).item()
        assert found[client] == pytest.approx(expected, abs=1e-5)
