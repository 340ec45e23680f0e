"""The text example: tokens from prose, a small attention model, on one process, on several ranks, and resumed."""

import runpy

import numpy as np
import pytest
import yaml

import quick_run
from pflmpi.analysis.run import open_run
from pflmpi.config import load as configuration
from pflmpi.data.own_files import read_own
from project import ROOT

EXAMPLE = ROOT / "examples" / "text.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.npz"
    code = runpy.run_path(str(EXAMPLE))
    several = code["texts"]()
    assert len(several) >= 8 and all(len(text) > 500 for text in several)
    code["write"](path, several, every=40)
    return path


def settings(data, executor, rounds):
    raw = configuration.located(configuration.read(EXAMPLE.with_suffix(".yaml")), EXAMPLE.parent)
    training = {**raw["training"], "rounds": rounds, "batch_size": 10}
    return {**raw, "data": {"path": str(data)}, "training": training, "runtime": {"executor": executor}}


def test_samples_are_windows_of_the_texts(data):
    code = runpy.run_path(str(EXAMPLE))
    dataset = read_own(data)
    first = code["tokens"](code["texts"]()[0])
    assert dataset.images.shape[1:] == (code["LENGTH"],) and dataset.num_classes <= 28
    assert np.array_equal(dataset.images[1], first[40 : 40 + code["LENGTH"]])
    assert np.array_equal(code["tokens"]("A  b\n\u00e9Z"), [1, 0, 2, 0, 27, 26])


def test_any_number_of_ranks_and_a_resumed_run_give_the_same_bits(data, tmp_path):
    executor = "lanes"
    one = quick_run.run(settings(data, executor, 3), tmp_path / "one")
    assert quick_run.run(settings(data, executor, 3), tmp_path / "three", ranks=3) == one
    quick_run.run(settings(data, executor, 1), tmp_path / "short")
    assert quick_run.resume(tmp_path / "short", ("training.rounds=3",), ranks=2) == one
    losses = open_run(tmp_path / "one").columns["train_loss"]
    assert losses[-1] < losses[0] < np.log(28) + 1


def test_the_configuration_is_valid_where_the_data_is(data, tmp_path):
    for file in (EXAMPLE, EXAMPLE.with_suffix(".yaml")):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "text.npz").write_bytes(data.read_bytes())
    config = configuration.load(tmp_path / "text.yaml")
    assert config.data.path == str(tmp_path / "text.npz")
    assert yaml.safe_load((tmp_path / "text.yaml").read_text())["partition"] == {"name": "writers"}
