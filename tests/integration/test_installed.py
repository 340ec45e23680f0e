"""pflmpi from a wheel, in a folder that knows nothing of the repository: what issue 13 asks for, line by line.

`same[NAME]` is test_one_process_three_ranks_and_a_resumed_run_agree[NAME], `python` is test_python_works_alone_under_a_
launcher_and_resumed, `commands` is test_the_commands_work.

Own code
    algorithm, model, data, partition by ./file.py:name   same[own]
    by package.module:Class, and by entry points          same[pictures], same[table], same[bytes], same[squares]
    the examples FedALA, FedPAC; FedBABU                  same[table], same[divided]; python
Models
    torchvision, weights from a .pt; a .safetensors       same[pictures]; same[table]
    group norm for batch norm; batch norm; unlike models  same[divided]; same[pictures]; same[bytes]
Data
    .npz with clients; .h5; pictures; PFLlib's folder     same[table]; same[bytes]; same[pictures]; same[divided]
    normalisation; transforms, by name and own            same[table]; same[pictures]
    text, `pflmpi data`                                   same[text], commands
Training
    adamw, kept moments, cosine, warm-up, clipping, label smoothing     same[pictures]
    momentum, step; adam, decay by participations; early stop           same[table]; same[bytes]; same[table]
Measures
    before and after training, unseen clients             same[pictures]
    all of it afterwards, from an old checkpoint          commands (evaluate)
Trackers: TensorBoard; wandb and mlflow if installed      same[pictures]
Python: run, Config, open_runs, samples, model            python
Commands: compare, list, sweep, plan, doctor, report, export, inspect, evaluate, data, status, submit   commands
"""

import os
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import pflmpi
import processes
from installed import OutsideWorld, environment_with, install, sdist_of, wheel_of
from outside_world import CONFIGURATIONS
from pflmpi.analysis.run import open_run
from pflmpi.store import run_folder
from project import ROOT

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import pflmpi

config = pflmpi.Config(
    data={"path": "table.npz", "normalize": "standard"},
    partition={"name": "writers"},
    model={"name": "mynet", "head": "fc"},
    algorithm={"name": "examples/clipped.py:Clipped"},
    training={"rounds": int(sys.argv[2]), "lr": 0.05},
    evaluation={"unseen": 0.2},
)
ranks = int(sys.argv[3]) if len(sys.argv) > 3 else None
tell = lambda row: print(row["round"])
run = pflmpi.run(config, out=sys.argv[1], ranks=ranks, resume=True, quiet=True, on_round=tell)
print(run.round().digest())
"""
READING = """
import torch
import pflmpi

frame = pflmpi.open_runs("runs/python-*").frame()
assert sorted(set(frame["run"])) == ["runs/python-alone", "runs/python-mpi"] and len(frame) == 6, frame
run = pflmpi.open_run("runs/python-alone")
x, y = run.samples(1).test
right = int((run.model(1)(torch.from_numpy(x)).argmax(1).numpy() == y).sum())
assert right == run.round().metrics["correct"][1]
"""


def test_the_wheel_holds_what_the_commands_use_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        members = {name for name in archive.namelist() if ".dist-info/" not in name}
    walked = (Path(place) / name for place, _, names in os.walk(ROOT / "pflmpi", followlinks=True) for name in names)
    expected = {str(path.relative_to(ROOT)) for path in walked if "__pycache__" not in path.parts}
    assert members == expected
    assert {"pflmpi/included/configs/quickstart.yaml", "pflmpi/included/launch/srun", "pflmpi/py.typed"} <= members


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_one_process_three_ranks_and_a_resumed_run_agree(name, world):
    place = world.call(["python", "-c", "import pflmpi; print(pflmpi.__file__)"])
    assert place.startswith(world.environment["VIRTUAL_ENV"])
    alone, run, rounds = world.alone(name), world.resumed(name), CONFIGURATIONS[name][1]
    assert run_folder.rounds(alone)[-1] == run_folder.rounds(run)[-1] == rounds
    assert run_folder.digest(run, rounds) == run_folder.digest(alone, rounds)
    recorded = yaml.safe_load((run / "config.yaml").read_text())["recorded"]
    assert (recorded["transport"], recorded["ranks"]) == ("torch", 2)
    assert recorded["versions"]["pflmpi"] == pflmpi.__version__


def test_what_these_runs_were_asked_to_measure_is_there(world):
    for run in (world.alone("pictures"), world.resumed("pictures")):
        columns = open_run(run).columns
        for column in ("trained_accuracy_mean", "trained_test_loss", "unseen_accuracy_mean", "train_loss", "f1_macro"):
            assert (columns[column] >= 0).all() and len(columns[column]) == 2, column
        events = EventAccumulator(str(run / "tensorboard")).Reload()
        assert [event.step for event in events.Scalars("accuracy_mean")] == [1, 2]
    code = open_run(world.alone("pictures")).config["recorded"]["code"]
    assert sorted(code) == ["algorithm", "model", "model.weights", "partition", "transform/1"], code
    assert open_run(world.alone("table")).stopped_early.startswith("test_loss has not improved")


def test_python_works_alone_under_a_launcher_and_resumed(world):
    (world.folder / "script.py").write_text(SCRIPT)
    (world.folder / "reading.py").write_text(READING)
    alone = world.call(["python", "script.py", "runs/python-alone", "3", "1"])
    world.call(["mpirun", "-n", "3", "python", "script.py", "runs/python-mpi", "1"])
    resumed = world.call(["python", "script.py", "runs/python-mpi", "3", "2"])
    assert alone.split()[:-1] == ["1", "2", "3"] and resumed.split() == ["2", "3", alone.split()[-1]]
    world.call(["python", "reading.py"])


COMMANDS = [
    ("data table.npz", "clients 5"),
    ("data bytes.h5", "shape 1 x 6 x 6"),
    ("data divided", "clients 4"),
    ("data pictures --picture pictures.png", "picture pictures.png"),
    ("data bytes.yaml", "clients"),
    ("list fedmine", "shared body, personal head"),
    ("list examples/clipped.py:Clipped", "largest_change"),
    ("list my_package.squares:Squares", "samples"),
    ("list change.py:darker", "darker"),
    ("plan table.yaml --ranks 2", "ranks"),
    ("doctor --config bytes.yaml", ""),
    ("submit pictures.yaml --out runs/new --ntasks=2 --dry-run", "-m pflmpi run"),
    ("evaluate runs/table --round 1 -o clients.csv", "the run recorded the same accuracy for every client"),
    ("evaluate runs/table --round 1 --data table.npz --unseen", "unseen clients, table.npz"),
    ("evaluate runs/pictures --round 1 --unseen --updates 2", "unseen clients"),
    ("evaluate runs/pictures --after-training", "after local training"),
    ("compare runs/table runs/squares", "algorithm"),
    ("report runs/table --out page", "page/report.html"),
    ("export runs/table --client 1 -o client.npz", "client.npz"),
    ("export runs/pictures --all -o one.h5", "one.h5"),
    ("inspect runs/pictures --verify", "good"),
    ("inspect one.h5", "digest"),
    ("status runs/table", "stopped early"),
    ("sweep small.yaml --ranks 2 --out sweep", ""),
    ("table small.yaml --out sweep", "Mine"),
]


def test_the_commands_work(world):
    for name in ("pictures", "table", "squares"):
        world.alone(name)
    for line, expected in COMMANDS:
        printed = " ".join(world.call(["pflmpi", *line.split()]).split())
        assert expected in printed, f"pflmpi {line}\n{printed}"
    headed = world.call(["bash", "-c", "set -o pipefail; pflmpi list training | head -n 1; echo ${PIPESTATUS[0]}"])
    assert headed.split()[-1] == "0"


def test_a_source_distribution_makes_the_same_wheel(wheel, tmp_path):
    again = wheel_of(sdist_of(wheel.parent / "source", tmp_path), tmp_path)
    with zipfile.ZipFile(wheel) as built, zipfile.ZipFile(again) as rebuilt:
        files = [
            {entry.filename: (entry.CRC, entry.external_attr >> 16 & 0o777) for entry in archive.infolist()}
            for archive in (built, rebuilt)
        ]
    for contents in files:
        contents.pop(next(name for name in contents if name.endswith("/RECORD")))
    assert files[0] == files[1]


def test_a_checkout_to_be_edited_is_found_from_the_folder_that_holds_it(wheel, tmp_path):
    source = shutil.copytree(wheel.parent / "source", tmp_path / "pflmpi", symlinks=True)
    environment = environment_with(wheel, tmp_path / "environment")
    install(source, tmp_path / "environment", "--editable")
    show = "import pflmpi, sys; sys.stdout.write(pflmpi.__file__)"
    done = processes.call(["python", "-c", show], env=environment, cwd=tmp_path)
    assert done.stdout == str(source / "pflmpi" / "__init__.py"), done.stderr


def test_the_documentation_comes_with_it(world):
    assert "new-algorithm  An algorithm of your own" in world.call(["pflmpi", "docs"])
    assert world.call(["pflmpi", "docs", "gpus"]).strip() == (ROOT / "docs" / "gpus.md").read_text().strip()


def test_the_examples_work_where_they_are_written(environment, tmp_path):
    OutsideWorld(tmp_path, environment).call(["pflmpi", "examples", "work"])
    work = OutsideWorld(tmp_path / "work", environment)
    one_round = ["-s", "training.rounds=1", "--quiet"]
    work.call(["launch/mpirun", "-n", "2", "pflmpi", "run", "configs/quickstart.yaml", "--out", "runs/mpi", *one_round])
    assert "largest_change" in work.call(["pflmpi", "list", "examples/clipped.py:Clipped"])
    assert "FedGMH" in work.call(["pflmpi", "sweep", "configs/papers/digits.yaml", "--dry-run"])
    script = work.call(["pflmpi", "submit", "configs/quickstart.yaml", "--ntasks=2", "--dry-run"])
    python = f"{environment['VIRTUAL_ENV']}/bin/python"
    assert re.search(rf"^bash \S*/launch/srun .*{python}\S* -P -m pflmpi run", script, re.MULTILINE)
