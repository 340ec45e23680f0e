"""The samples of each client and class that a run writes down for later."""

import csv
import io

import numpy as np
import pytest

import quick_run
from pflmpi.config import load as configuration
from pflmpi.errors import CheckpointError
from pflmpi.experiment.build import load_federation
from pflmpi.store import partition_file
from pflmpi.store.partition_file import SampleCounts


def test_counts_come_back_as_they_were_written(tmp_path):
    train, test = np.array([[3, 0, 0], [0, 2, 0]]), np.array([[1, 0, 4], [0, 0, 0]])
    partition_file.write(tmp_path, SampleCounts(train, test))
    lines = partition_file.path(tmp_path).read_text().splitlines()
    assert lines == ["client,class,train,test", "0,0,3,1", "0,2,0,4", "1,1,2,0", "1,2,0,0"]
    counts = partition_file.read(tmp_path)
    assert counts.train.tolist() == train.tolist() and counts.test.tolist() == test.tolist()


@pytest.mark.parametrize("seed", range(8))
def test_its_lines_are_those_of_the_csv_writer(seed, monkeypatch):
    draw = np.random.default_rng(seed)
    train, test = draw.integers(0, [1, 3, 12, 5000][seed % 4], (2, draw.integers(1, 130), draw.integers(1, 12)))
    monkeypatch.setattr(partition_file, "_AT_ONCE", [5, 100_000][seed % 2])
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("client", "class", "train", "test"))
    for (client, label), count in np.ndenumerate(train):
        if count + test[client, label] or (client, label) == (len(train) - 1, train.shape[1] - 1):
            writer.writerow((client, label, count, test[client, label]))
    assert partition_file._content(SampleCounts(train, test)) == text.getvalue().encode()


def test_a_run_has_the_counts_of_its_federation_also_after_resuming(tmp_path):
    quick_run.run(quick_run.settings(training={"rounds": 1}), tmp_path / "run")
    federation = load_federation(configuration.parse(quick_run.settings()))
    for _ in range(2):
        counts = partition_file.read(tmp_path / "run")
        assert counts.train.tolist() == federation.class_counts.tolist()
        assert counts.test.sum(1).tolist() == federation.num_test.tolist()
        partition_file.path(tmp_path / "run").unlink()  # as in a run of an older pflmpi
        quick_run.resume(tmp_path / "run", ("training.rounds=2",))


@pytest.mark.parametrize(
    "text",
    [
        *["", "client,class,train,test\n", "client,class\n0,0\n", "client,class,train,test\n0,x"],
        *(f"client,class,train,test\n{last},1,1\n" for last in ("1000000000,9", "99999999999999,9", "-5,3")),
    ],
)
def test_a_damaged_file_is_named(text, tmp_path):
    partition_file.path(tmp_path).write_text(text)
    with pytest.raises(CheckpointError, match=r"partition\.csv is damaged"):
        partition_file.read(tmp_path)
