"""Other data to test a run on, as a user names it."""

import numpy as np
import pytest
import torch
from PIL import Image

import quick_run
from pflmpi.config import load as configuration
from pflmpi.data import load
from pflmpi.data.config import DataConfig
from pflmpi.errors import ConfigError, DataError
from pflmpi.experiment.build import prepare
from pflmpi.experiment.evaluation import _match, read_other_data, replace_test_samples
from raw_files import write_leaf_texts


def test_a_folder_below_the_home_folder_is_recognised_as_pictures(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "pictures" / name / "1.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    of_run = DataConfig(name="mine", path="mine.npz", layout="nhwc")  # which pictures cannot have
    assert read_other_data("~/pictures", of_run).images.shape == (2, 3, 8, 8)


@pytest.mark.parametrize("unseen", [False, True])
def test_characters_of_other_texts_have_the_numbers_of_the_run(unseen, tmp_path):
    write_leaf_texts(tmp_path / "run", train={"ann": "cab_" * 4, "bob": "bac_" * 4})
    raw = quick_run.settings(model="logistic", algorithm="fedavg", partition={"name": "writers", "clients": None})
    made = prepare(configuration.parse({**raw, "data": {"path": str(tmp_path / "run")}}), torch.device("cpu"))

    def replaced(text):
        write_leaf_texts(tmp_path / text, train={"ann": text, "bob": text})
        other_data = read_other_data(str(tmp_path / text), made.config.data)
        return replace_test_samples(made, "test", other_data, unseen).federation.dataset

    assert replaced("ca_ca_c").images[-3:].tolist() == [[4, 2, 1, 4], [2, 1, 4, 2], [1, 4, 2, 1]]  # of "_abc"
    with pytest.raises(ConfigError, match="differ in characters: only one has 'd'; those of the run are '_', 'a'"):
        replaced("cad_cad")


@pytest.mark.parametrize(
    ("task", "y", "other_y"),
    [("multilabel", [[0, 1, 1], [1, 0, 0]], [[1, 0, 1], [0, 1, 0]]), ("tokens", [[0, 1, 2, -100]], [[1, 2, 0, -100]])],
)
def test_labels_of_other_data_are_those_of_the_same_name(task, y, other_y, tmp_path):
    def write(name, y, class_names):
        y = np.resize(y, (20, len(y[0])))
        np.savez(tmp_path / f"{name}.npz", x=np.ones((20, 3)), y=y, class_names=class_names)
        return DataConfig(name="mine", path=str(tmp_path / f"{name}.npz"), task=task)

    of_run = load(write("run", y, ["a", "b", "c"]), 0)
    other = load(write("other", other_y, ["c", "a", "b"]), 0)
    assert np.array_equal(_match(of_run, other).labels, of_run.labels)
    with pytest.raises(
        ConfigError, match="third and the run differ in classes: only one has z; those of the run are a"
    ):
        _match(of_run, load(write("third", y, ["a", "b", "z"]), 0))


def test_the_columns_of_a_run_need_not_be_in_other_data(tmp_path, caplog):
    (tmp_path / "pooled.csv").write_text("age,ill,sugar\n1,no,2\n3,yes,4\n")
    np.savez(tmp_path / "pooled.npz", x=np.array([[1.0, 2], [3, 4]]), y=np.array(["no", "yes"]))
    of_run = DataConfig(name="mine", path="mine.csv", label="ill", client="hospital")
    for file, notes in (("pooled.npz", 0), ("pooled.csv", 1)):
        other_data = read_other_data(str(tmp_path / file), of_run)
        assert other_data.images.tolist() == [[1, 2], [3, 4]] and other_data.class_names == ("no", "yes")
        assert other_data.writers is None and len(caplog.messages) == notes
    assert "has no column 'hospital' (data.client)" in caplog.text
    (tmp_path / "other.csv").write_text("age,sick,sugar\n1,no,2\n")
    with pytest.raises(DataError, match=r"there is no column data\.label = 'ill'"):
        read_other_data(str(tmp_path / "other.csv"), of_run)
