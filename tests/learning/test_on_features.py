"""Features of a fixed body in place of samples: each sample goes through it once, and nothing else is different."""

from unittest import mock

import h5py
import numpy as np
import pytest

import quick_run
from pflmpi.learning import client
from pflmpi.learning.task import Task

ROUNDS = 2
ALGORITHMS = {  # and how often each training sample went through the body besides
    "fedrep": ({"name": "fedrep", "head_epochs": 3}, 2),
    "fedfcd": ({"name": "fedfcd"}, 1),
    "fedpac": ({"name": "fedpac", "head_epochs": 2}, 3),
}
MODELS = {"mlp": {"name": "mlp"}, "cnn": {"name": "cnn", "kernel": 3, "padding": 1}}
NORMED = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(12, num_classes)

    def forward(self, x):
        return self.head(self.body(x))
"""


def raw(algorithm, model, executor, **sections):
    """Two rounds of four clients that hold 12 to 160 samples."""
    return quick_run.settings(
        {"partition": {"name": "dirichlet", "clients": 4, "beta": 0.3}, "model": model},
        algorithm=algorithm,
        training={"rounds": ROUNDS, "participation": 1.0, "epochs": 2, "batch_size": 7},
        runtime={"executor": executor, "lanes": 4 if executor == "lanes" else None},
        **sections,
    )


def results(settings, folder):
    """The arrays of the last round, and how many samples went through a body in evaluation mode."""
    rows, plain = 0, Task.features

    def counted(self, model, x, training=False):
        nonlocal rows
        rows += 0 if training or self.cached_features else len(x)
        return plain(self, model, x, training)

    with mock.patch.object(Task, "features", counted):
        quick_run.run(settings, folder)
    arrays = {}
    with h5py.File(folder / f"round_{ROUNDS:05}.h5") as file:
        file.visititems(lambda name, item: arrays.update({name: item[()]} if isinstance(item, h5py.Dataset) else {}))
    return {name: values for name, values in arrays.items() if values.dtype.kind == "f"}, rows


def check(settings, folder):
    """The samples that do not go through the body any more; all else is as with a body in each step."""
    arrays, rows = results(settings, folder / "features")
    with mock.patch.object(client, "_compute_features", return_value=None):
        expected, all_rows = results(settings, folder / "steps")
    assert arrays.keys() == expected.keys() and len(arrays) > 3
    for name, values in arrays.items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
    return all_rows - rows


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_sample_goes_through_the_body_once(algorithm, model, tmp_path):
    sections, fewer = ALGORITHMS[algorithm]
    settings = raw(sections, MODELS[model], "loop")
    saved = check(settings, tmp_path)
    lines = np.genfromtxt(tmp_path / "features" / "partition.csv", delimiter=",", names=True)
    assert saved == fewer * lines["train"].sum() * ROUNDS


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_so_it_does_in_lanes_of_unlike_lengths(algorithm, tmp_path):
    assert check(raw(ALGORITHMS[algorithm][0], MODELS["mlp"], "lanes"), tmp_path) > 0


@pytest.mark.parametrize(("norm", "executor"), [("as_written", "loop"), ("group", "lanes")])
def test_norms_and_dropout_are_as_in_evaluation(norm, executor, tmp_path):
    (tmp_path / "net.py").write_text(NORMED)
    model = {"name": f"{tmp_path / 'net.py'}:Net", "head": "head", "norm": norm}
    check(raw({"name": "fedrep", "head_epochs": 2}, model, executor), tmp_path)


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_transformed_samples_go_through_the_body_in_every_step(executor, tmp_path):
    settings = raw(
        {"name": "fedrep", "head_epochs": 2}, MODELS["mlp"], executor, data={"transform": ["horizontal_flip"]}
    )
    assert check(settings, tmp_path) < 0, "the split goes once through it, for nothing"


def test_too_many_features_are_not_kept(tmp_path):
    settings = raw({"name": "fedrep", "head_epochs": 3}, MODELS["mlp"], "loop")
    with mock.patch.object(client, "_MAX_FEATURE_BYTES", 0):
        assert check(settings, tmp_path) < 0


def test_with_further_personal_layers_the_head_trains_a_part_of_the_body(tmp_path):
    sections = {"name": "fedrep", "head_epochs": 2, "personal_layers": 2}
    assert check(raw(sections, MODELS["cnn"], "loop"), tmp_path) == 0
