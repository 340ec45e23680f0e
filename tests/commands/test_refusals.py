"""What commands refuse: one error with what to do, exit code 2, nothing on the output, nothing written."""

import numpy as np
import pytest
import yaml

import quick_run
import table_file

REFUSED = [
    # how a command is written
    ([], "usage: pflmpi"),
    (["rnu"], "usage: pflmpi"),
    (["run"], "usage: pflmpi"),
    (["inspect", "x", "--round", "last"], "usage: pflmpi"),
    (["list", "--out", "x"], "usage: pflmpi"),
    (["run", "a", "--out", ""], "usage: pflmpi"),
    (["list", "fedgm"], "unknown name 'fedgm'; did you mean 'fedgmh', 'fedavgm', 'fedgh'"),
    (["list", "--markdown", "--json"], "--markdown and --json are two shapes of the output; give one of them"),
    (["run", "c.yaml", "--ranks", "0"], "--ranks 0: must be at least 1"),
    (["run", "c.yaml", "--ranks", "-1"], "--ranks -1: must be at least 1"),
    (["data", "c.yaml", "--label", "y"], "--label is for data, and c.yaml is a configuration"),
    (["data", "c.csv", "-s", "seed=1"], "-s is for a configuration, and c.csv is data"),
    (["data", "c.csv", "--save", "f"], "--save is for a configuration, and c.csv is data"),
    (["data", "all.npz", "--picture", "my.jpeg"], "my.jpeg"),
    (["data", "all.npz", "--picture", "nothing/my.png"], "nothing/my.png"),
    # a run
    (["inspect", "nothing"], "nothing is no folder"),
    (["inspect", "run", "--round", "4"], "no checkpoint of round 4; it has 0, 1, 2, 3"),
    (["inspect", "run", "--diff", "3", "9"], "no checkpoint of round 9; it has 0-3"),
    (["inspect", "run", "--round", "2", "--verify"], "--round 2 cannot go with --verify"),
    (["inspect", "run", "--round", "2", "--diff", "1", "2"], "--round 2 cannot go with --diff"),
    (["compare", "run"], "only one run"),
    (["compare", "run", "run"], "only one run"),
    (["compare", "run", "nothing"], "no folder"),
    (["report", "table.yaml"], "table.yaml is no folder"),
    (["report", "empty"], "empty is not a run: it has no config.yaml"),
    (["report", "run", "--to", "8"], "--to is for the report of scaling experiments"),
    (["report", "run", "--target", "90"], "must be a share above 0"),
    (["report", "run", "--target", "nan"], "must be a share above 0"),
    (["report", "run", "--out", "file/out"], "cannot write the report in file/out"),
    (["probe", "empty"], "is not a run"),
    (["probe", "run", "--samples", "3"], "4 samples"),
    (["probe", "run", "--clients", "1"], "2 clients"),
    (["probe", "run", "--round", "9"], "no checkpoint of round 9"),
    (
        ["probe", "run", "-s", "training.lr=9"],
        "was made with another configuration: training.lr = 0.1 in the run",
    ),
    (["probe", "run", "-s", "data.limit=9"], "data.limit"),
    (["export", "run", "--client", "7", "-o", "m.npz"], "has clients 0 to 6; client 7 was requested"),
    (["export", "run", "--client", "-1", "-o", "m.npz"], "has clients 0 to 6; client -1 was requested"),
    (["export", "run", "--client", "0", "--round", "12", "-o", "m.npz"], "no checkpoint of round 12; it has 0-3"),
    (
        ["export", "run", "--client", "0", "--leaf", "modell", "-o", "m.npz"],
        "keeps nothing at --leaf modell; known: cr",
    ),
    (["export", "run", "--server", "--leaf", "body", "-o", "m.npz"], "keeps nothing at --leaf body; known: heads"),
    (["export", "run", "--client", "0", "-o", "model.onnx"], "unknown suffix '.onnx'; known: .npz, .pt, .safetensors"),
    (["export", "run", "--client", "0", "-o", "model"], "unknown suffix 'none'"),
    (["export", "run", "--client", "0", "-o", "/no/such/m.npz"], "cannot write /no/such/m.npz: No such file"),
    (["export", "run", "--all", "-o", "one.npz"], "--all writes HDF5"),
    (["export", "run", "--all", "-o", "run/round_00003.h5", "--force"], "files of a run have such names"),
    (["export", "run", "--table", "run/metrics.csv", "--force"], "files of a run have such names"),
    (["export", "run", "--all", "-o", "one.h5", "--leaf", "model"], "--leaf model cannot go with --all"),
    (["export", "run", "--server", "-o", "one.npz", "--compress"], "--compress goes with --all"),
    (["export", "run", "--all", "-o", "/no/such/one.h5"], "cannot write /no/such/one.h5: No such file"),
    (["evaluate", "run", "--unseen"], "has kept none out of training; give new ones with --data"),
    (["evaluate", "run", "--round", "9"], "no checkpoint of round 9"),
    (["evaluate", "run", "--data", "nothing.npz"], "does not exist"),
    (["evaluate", "run", "--data", "large.npz"], "has samples of uint8 [1, 9, 9], the run uint8 [1, 8, 8]"),
    (
        ["evaluate", "run", "--data", "other.npz"],
        "differ in classes: only one has cat; those of the run are 0, 1, 2, 3",
    ),
    (["evaluate", "run", "--updates", "2"], "--updates 2 is for clients kept out of training; add --unseen, or"),
    (["evaluate", "run", "--unseen", "--updates", "0"], "--updates 0: must be at least 1"),
    (["evaluate", "run", "-o", "no/such/file.csv"], "choose another -o"),
    (["evaluate", "run", "-o", "c.yaml"], "is there already; choose another -o, or overwrite it with --force"),
    (["evaluate", "run", "-o", "run/config.yaml", "--force"], "files of a run have such names"),
    (["evaluate", "run", "-o", "clients.parquet"], "-o clients.parquet: unknown suffix '.parquet'; known: .csv"),
    (["evaluate", "run", "-o", "run/shards/round_00003_rank_000.h5", "--force"], "files of a run have such names"),
    # what is planned, swept, measured
    (["plan", "c.yaml", "--ranks", "0"], "--ranks 0: must be at least 1"),
    (["plan", "c.yaml", "--ranks", "1000000"], "--ranks 1000000: a forecast is for at most 10000"),
    (["plan", "c.yaml", "--nodes", "0"], "--nodes 0: must be at least 1"),
    (["plan", "c.yaml", "--gpus", "-1"], "--gpus -1: must be at least 0"),
    (["plan", "c.yaml", "--memory", "0"], "--memory 0: must be greater than 0"),
    (["plan", "c.yaml", "--gpu-memory", "40"], "--gpu-memory 40 without GPUs to plan for; give --gpus N"),
    (["plan", "c.yaml", "--gpu-memory", "nan"], "--gpu-memory nan: must be greater than 0"),
    (["plan", "c.yaml", "--rate", "-5"], "--rate -5: must be greater than 0"),
    (["plan", "c.yaml", "--delay", "-1"], "--delay -1: must be at least 0"),
    (["plan", "c.yaml", "--delay", "inf"], "--delay inf: must be at least 0"),
    (["plan", "c.yaml", "--ranks", "2", "--nodes", "3"], "--ranks 2 on --nodes 3: give every node a rank"),
    (["plan", "c.yaml", "-s", "runtime.device=cuda"], "runtime.device = 'cuda', and no GPUs; say how many a node has"),
    (["plan", "c.yaml", "--gpus", "2", "-s", "runtime.gpus=3"], "runtime.gpus = 3, and --gpus 2"),
    (["plan", "c.yaml", "--ranks", "2", "-s", "runtime.transport=inprocess"], "'inprocess', which has 1; use auto"),
    (["plan", "c.yaml", "-s", "training.precision=tf32"], "training.precision = 'tf32' needs a CUDA device"),
    (["plan", "c.yaml", "-s", "training.epoch=1"], "unknown key"),
    (["sweep", "tables/small.yaml", "--budget", "0"], "--budget 0: must be hours, more than 0"),
    (["sweep", "tables/small.yaml", "--budget", "-1"], "--budget -1: must be hours, more than 0"),
    (["sweep", "tables/small.yaml", "--budget", "nan"], "--budget nan: must be hours, more than 0"),
    (["sweep", "tables/small.yaml", "--budget", "inf"], "--budget inf: must be hours, more than 0"),
    (
        ["sweep", "tables/small.yaml", "--budget", "2", "--cell", "0"],
        "--budget 2 with --cell, a task of a job array; leave",
    ),
    (["scale", "c.yaml", "--ranks", "2,1"], "--ranks '2,1': must be at least 1, and each more than the one before"),
    (["scale", "c.yaml", "--ranks", "0,1"], "--ranks '0,1': must be at least 1"),
    (["scale", "c.yaml", "--ranks", "1,two"], "--ranks '1,two': must be whole numbers with commas"),
    (["scale", "c.yaml", "--ranks", "1,9"], "--ranks 9, but there are 7 clients (partition.clients); give at most 8"),
    (["scale", "c.yaml", "--ranks", "2,3", "--mode", "weak"], "7 clients on 2 ranks are 21/2 on 3, no whole number"),
    (["scale", "c.yaml", "--ranks", "1", "--mode", "strnog"], "choose from 'strong', 'weak', 'packing'"),
    (["scale", "c.yaml", "--ranks", "1", "--rounds", "1"], "--rounds 1: must be at least 2, because the first round"),
    (["scale", "c.yaml", "--ranks", "1", "--repeats", "0"], "--repeats 0: must be at least 1"),
    (
        ["scale", "c.yaml", "--ranks", "1", "--out", "other"],
        "other holds no scaling experiment, but thesis.txt; choose",
    ),
    (["scale", "c.yaml", "--ranks", "1,2", "-s", "runtime.transport=inprocess"], "'inprocess', which has 1"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A configuration, a finished run of it with all its checkpoints, data, a table, and what is none of these."""
    folder = tmp_path_factory.mktemp("refusals")
    (folder / "c.yaml").write_text(yaml.safe_dump(quick_run.settings()))
    quick_run.run(quick_run.settings(checkpoint={"keep": 0}), folder / "run")
    for name in ("tables", "other", "empty"):
        (folder / name).mkdir()
    table_file.write(folder / "tables")
    for name in ("table.yaml", "file", "other/thesis.txt"):
        (folder / name).touch()
    np.savez(folder / "all.npz", x=np.zeros((9, 2)) + np.arange(2), y=np.arange(9) % 3)
    np.savez(folder / "large.npz", x=np.zeros((6, 9, 9), np.uint8), y=np.arange(6) % 3)
    np.savez(folder / "other.npz", x=np.zeros((3, 8, 8), np.uint8), y=["1", "2", "cat"])
    return folder


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("words", "message"), REFUSED, ids=lambda value: " ".join(value) if type(value) is list else ""
)
def test_wrong_use_is_one_error_and_writes_nothing(words, message, folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    before = files(folder)
    assert quick_run.command(words) == 2
    shown = capfd.readouterr()
    assert message in " ".join(shown.err.split()), shown
    assert shown.out == "" or "file/out" in shown.err, "a report alone finds at its end that it cannot be written"
    assert "Traceback" not in shown.err and "internal error" not in shown.err
    assert shown.err.count("\n") == 1 or shown.err.startswith("usage: pflmpi")
    assert files(folder) == before


def test_a_run_that_was_given_a_gpu_which_torch_does_not_find_is_not_computed_on_the_cpu(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert quick_run.command(["run", "c.yaml", "--out", "gpu", "-s", "runtime.device=auto"]) == 2
    shown = capfd.readouterr().err
    assert "a GPU was requested (CUDA_VISIBLE_DEVICES = '0' on rank 0 (host " in shown and "Traceback" not in shown
    assert not (folder / "gpu").exists()


def test_a_current_folder_that_was_deleted_is_said(tmp_path, monkeypatch, capfd):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert quick_run.command(["list"]) == 2
    assert capfd.readouterr() == ("", "pflmpi: the current folder was deleted; change to another with cd\n")
