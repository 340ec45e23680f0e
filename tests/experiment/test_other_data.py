"""Other data to test a run on, as a user names it."""

import numpy as np
from PIL import Image

from pflmpi.data.config import DataConfig
from pflmpi.experiment.evaluation import read_other_data


def test_a_folder_below_the_home_folder_is_recognised_as_pictures(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "pictures" / name / "1.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    of_run = DataConfig(name="mine", path="mine.npz", layout="nhwc")  # which pictures cannot have
    assert read_other_data("~/pictures", of_run).images.shape == (2, 3, 8, 8)
