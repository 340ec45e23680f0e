"""Files of each version, tests/golden/files-VERSION.tar.gz, which all later ones read: a configuration, its partition,
two rounds of its run, a client's model, the digest, and the run after a third round as one file.

`python tests/integration/test_released_files.py` writes those of this version: before it is released, after it never.
"""

import os
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import h5py
import numpy as np
import pytest

import pflmpi
import quick_run
from pflmpi.cli import main
from project import GOLDEN

ARCHIVES = sorted(GOLDEN.glob("files-*.tar.gz"))
CONFIG = """
seed: 0
data: digits
partition: {name: exdir, clients: 3, classes_per_client: 4, alpha: 0.5}
model: {name: mlp, hidden: 4}
algorithm: fedper
training: {rounds: 2, participation: 0.67, batch_size: 100}
checkpoint: {keep: 0}
"""


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name)
def files(request, tmp_path, monkeypatch):
    subprocess.run(["tar", "-xzf", request.param, "-C", tmp_path], check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capsys, command):
    assert main(shlex.split(command)) == 0, capsys.readouterr()
    return capsys.readouterr().out


def test_the_version_before_its_release_has_files():
    assert f"files-{pflmpi.__version__}.tar.gz" in [path.name for path in ARCHIVES]


def test_runs_and_exports_are_read(files, capsys):
    assert "good" in printed(capsys, "inspect run --verify")
    assert printed(capsys, "inspect run --digest").split()[-1] == Path("digest.txt").read_text().strip()
    run = pflmpi.open_run("run")
    assert run.rounds == [0, 1, 2] and len(run.metrics) == 2 and not run.notes
    assert run.columns["accuracy_mean"][-1] == pytest.approx(np.nanmean(run.round().metrics["accuracy"]), abs=1e-6)
    printed(capsys, "export run --client 1 -o again.npz")
    with np.load("client1.npz") as before, np.load("again.npz") as after:
        assert before.files == after.files and all(np.array_equal(before[name], after[name]) for name in before)
    assert "digest: " in printed(capsys, "inspect one.h5")


def test_configurations_and_partitions_are_read(files, capsys):
    recorded = pflmpi.open_run("run").recorded
    assert recorded["partition"] in printed(capsys, "data run.yaml")
    assert recorded["partition"] in printed(capsys, "data run.yaml -s 'partition={path: partition.npz}'")
    assert recorded["partition"] in printed(capsys, "data run/config.yaml")


def test_a_run_continues(files, capsys):
    quick_run.resume(Path("run"), ("training.rounds=3",))
    printed(capsys, "export run --all -o again.h5")
    arrays = 0
    with h5py.File("one.h5") as before, h5py.File("again.h5") as after:
        for group in ("server", "clients"):
            paths: list[str] = []
            before[group].visit(paths.append)
            for path in (f"{group}/{path}" for path in paths if isinstance(before[group][path], h5py.Dataset)):
                arrays += 1
                # On another processor, and with another PyTorch, the bits may differ.
                np.testing.assert_allclose(after[path][()], before[path][()], rtol=1e-4, atol=1e-5, err_msg=path)
    assert arrays > 3


def owned_by_nobody(entry):
    return entry.replace(mtime=0, uid=0, gid=0, uname="", gname="", deep=False)


def write_files(archive):
    """Writes the files of this version."""
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("run.yaml").write_text(CONFIG.lstrip())
        commands = ["data run.yaml --save partition.npz", "run run.yaml --out run --ranks 1 --quiet"]
        commands += ["export run --client 1 -o client1.npz", "fork run --out longer -s training.rounds=3"]
        for command in [*commands, "resume longer --ranks 1 --quiet", "export longer --all -o one.h5"]:
            subprocess.run([sys.executable, "-m", "pflmpi", *command.split()], check=True)
        Path("digest.txt").write_text(f"{pflmpi.open_run('run').round().digest()}\n")
        with tarfile.open(archive, "w:gz") as written:
            for name in ("run.yaml", "partition.npz", "run", "client1.npz", "one.h5", "digest.txt"):
                written.add(name, filter=owned_by_nobody)


if __name__ == "__main__":
    write_files(GOLDEN / f"files-{pflmpi.__version__}.tar.gz")
    sys.stdout.write(f"{GOLDEN}\n")
