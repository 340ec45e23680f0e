"""What a dataset holds, its digest, the limit that makes it smaller, and the embedded one."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pflmpi.data import load
from pflmpi.data.config import DataConfig
from pflmpi.data.dataset import assemble
from pflmpi.data.loading import limit_samples
from pflmpi.data.sources import digits
from pflmpi.errors import DataError
from pflmpi.rng import stream
from project import ROOT
from raw_files import alike, toy


def test_arrays_of_different_lengths_are_refused():
    images = np.zeros((3, 1, 2, 2), dtype=np.uint8)
    with pytest.raises(DataError, match="3 images but 2 labels"):
        assemble("toy", images, np.zeros(2), np.zeros(3, dtype=bool), 2)
    with pytest.raises(DataError, match=r"labels 0\.\.2, allowed are 0\.\.1"):
        assemble("toy", images, np.arange(3), np.zeros(3, dtype=bool), 2)
    for wrong, description in ((np.zeros((3, 5)), r"float64 \[3, 5\]"), (images[:, 0], r"uint8 \[3, 2, 2\]")):
        with pytest.raises(DataError, match=rf"has samples {description}; expected uint8 \[n, C, H, W\] or float32"):
            assemble("toy", wrong, np.arange(3) % 2, np.zeros(3, dtype=bool), 2)


def test_samples_that_are_no_numbers_or_masked_are_refused():
    images, rest = np.ones((20_000, 2), np.float32), (np.arange(20_000) % 2, np.zeros(20_000, bool), 2)
    masked = np.ma.masked_less(rest[0], 1)
    with pytest.raises(DataError, match=r"dataset 'toy' has a masked array with masked values; fill them in"):
        assemble("toy", images, masked, *rest[1:])
    assemble("toy", np.ma.masked_greater(images, 1), *rest)  # nothing is masked
    images[15_000, 1] = np.nan
    with pytest.raises(DataError, match="dataset 'toy': sample 15000 has a value that is not a finite number; fill it"):
        assemble("toy", images, *rest)


def test_samples_may_be_a_view_and_marks_be_whole_numbers():
    images = np.arange(24, dtype=np.uint8).reshape(4, 1, 2, 3)[:, :, ::-1]
    labels, test, validation = np.arange(4) % 2, np.array([0, 0, 0, 1]), np.array([1, 0, 0, 0])
    mirrored = assemble("toy", images, labels, test, 2, official_validation=validation)
    assert torch.from_numpy(mirrored.images)[0, 0, 0].tolist() == [3, 4, 5]
    assert mirrored.official_validation is not None and mirrored.official_validation.tolist() == [True] + [False] * 3
    flags = assemble("toy", images.copy(), labels, test == 1, 2, official_validation=validation == 1)
    assert mirrored.digest == flags.digest


def test_writers_and_marks_out_of_range_are_refused():
    content = np.zeros((2, 1, 1, 1), np.uint8), np.arange(2), np.zeros(2, bool), 2
    with pytest.raises(DataError, match=r"writers -1\.\.2, allowed are whole numbers from 0"):
        assemble("toy", *content, np.array([-1, 2]))
    with pytest.raises(DataError, match=r"official_validation 0\.\.2, allowed are 0\.\.1"):
        assemble("toy", *content, official_validation=np.array([0, 2]))


def test_the_digest_changes_with_every_part_of_the_content():
    images = np.zeros((4, 1, 2, 2), dtype=np.uint8)
    labels, test, writers = np.array([0, 1, 0, 1]), np.array([False, False, True, True]), np.arange(4)
    changed = images.copy()
    changed[3, 0, 1, 1] = 1
    digests = [
        assemble("a", *content).digest
        for content in (
            (images, labels, test, 2, writers),
            (changed, labels, test, 2, writers),
            (images.reshape(4, 1, 1, 4), labels, test, 2, writers),
            (images, labels[::-1], test, 2, writers),
            (images, labels, ~test, 2, writers),
            (images, labels, test, 3, writers),
            (images, labels, test, 2, writers[::-1]),
            (images, labels, test, 2),
        )
    ]
    assert len(set(digests)) == len(digests)
    assert assemble("another name", images, labels, test, 2, writers).digest == digests[0]


def test_a_limit_keeps_the_proportions_of_classes_and_of_the_official_split():
    small = limit_samples(toy([60, 30, 1], [20, 10, 0]), 13, np.random.default_rng(0))
    counts = [np.bincount(small.labels[small.official_test == test], minlength=3).tolist() for test in (False, True)]
    # One of each class first, the other 10 as 79 : 39 : 0 = 6.69 : 3.31 : 0, so 8, 4 and 1; of these 3 to 1.
    assert counts == [[6, 3, 1], [2, 1, 0]]
    assert small.writers is not None
    assert np.array_equal(small.images.ravel(), small.writers) and (np.diff(small.writers) > 0).all()


def test_a_limit_is_seeded_and_changes_the_digest():
    dataset = load(DataConfig(name="digits"), seed=0)
    small = [load(DataConfig(name="digits", limit=50), seed=seed) for seed in (3, 3, 4)]
    assert alike(small[0], small[1])
    assert len({dataset.digest, small[0].digest, small[2].digest}) == 3
    assert len(small[0].labels) == 50 and len(np.unique(small[0].labels)) == 10
    assert alike(small[0], limit_samples(dataset, 50, stream(3, 0, -1, "limit")))


def test_a_limit_above_the_size_changes_nothing_and_one_below_the_classes_still_works():
    data = toy([5, 4, 3], [0, 0, 0])
    assert limit_samples(data, 12, np.random.default_rng(0)) is data
    assert limit_samples(data, 2, np.random.default_rng(0)).labels.tolist() == [0, 1]


def test_digits_are_those_of_scikit_learn_wherever_it_keeps_them(monkeypatch):
    read = digits.Digits().read(Path())
    monkeypatch.setattr(digits, "find_spec", lambda name: SimpleNamespace(origin="/nowhere/__init__.py"))
    assert digits.Digits().read(Path()).digest == read.digest


def test_digits_are_read_without_scikit_learn():
    read = "from pflmpi.data.sources.digits import Digits; Digits().read(None)"
    code = f"import sys; {read}; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_digits_are_scaled_to_the_whole_byte_range():
    from sklearn.datasets import load_digits

    data = load(DataConfig(name="digits"), seed=0)
    assert data.images.shape == (1797, 1, 8, 8)
    assert data.images[0, 0, 0].tolist() == [0, 0, 80, 207, 143, 16, 0, 0]  # 0 0 5 13 9 1 0 0 of 16
    grey = load_digits().images
    assert (data.images[:, 0][grey == 16] == 255).all() and (data.images[:, 0][grey == 0] == 0).all()
    assert np.array_equal(np.rint(data.images[:, 0] / 255 * 16), grey), "the old value can be told from the new one"
    assert np.array_equal(np.flatnonzero(data.official_test), np.arange(1500, 1797))


def test_importing_the_data_room_imports_no_torch():
    heavy = "{'torch', 'torchvision', 'sklearn'}"
    code = f"import sys, pflmpi.data, pflmpi.data.federation; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_every_pixel_may_be_standardised_by_itself():
    plain, pixel = (
        load(DataConfig.model_validate({"name": "digits", "normalize": how}), 0) for how in ("fixed", "pixel")
    )
    raw = plain.images.astype(np.float64)
    expected = (raw - raw.mean(0)) / (raw.std(0) + 0.001)
    assert pixel.images.dtype == np.float32 and (pixel.mean, pixel.std) == ((0.0,), (1.0,))
    np.testing.assert_allclose(pixel.images, expected, atol=1e-4)  # of single precision, by deviations from 0.001
    assert not pixel.images[:, 0, 0, 0].any(), "a pixel that is always black stays 0"
    assert pixel.digest == plain.digest
