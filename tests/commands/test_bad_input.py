"""Wrong input gives one clear error, exit code 2, no traceback, on rank 0, and leaves nothing behind."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import processes
import quick_run
from pflmpi.algorithms.fedgmh import FedGMH
from pflmpi.config import load as configuration
from pflmpi.errors import CheckpointError, PflmpiError, UserError
from pflmpi.experiment.build import load_federation
from pflmpi.experiment.stored_config import stored_config
from pflmpi.store import metrics_file, verify

REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"trainig": {}}, ["unknown key 'trainig'", "did you mean 'training'"]),
    ({"training": {"lrr": 1}}, ["unknown key in training: 'lrr'", "did you mean 'lr'"]),
    ({"training": {"lr": "fast"}}, ["training.lr = 'fast'", "must be a valid number"]),
    ({"training": {"participation": 0}}, ["training.participation = 0", "greater than 0"]),
    ({"training": {"participation": 1.5}}, ["training.participation = 1.5", "less than or equal to 1"]),
    ({"training": {"rounds": -1}}, ["training.rounds = -1"]),
    ({"training": {"batch_size": 0}}, ["training.batch_size = 0"]),
    (
        {"training": {"drop_last": True, "batch_size": 500}},
        ["batch_size = 500", "the largest, client", "drop_last: false"],
    ),
    ({"training": {"epochs": 1000000, "batch_size": 1}}, ["steps in one round", "training.epochs"]),
    ({"training": {"precision": "fp8"}}, ["training.precision = 'fp8'", "'fp32'", "'bf16'"]),
    ({"training": {"precision": "tf32"}}, ["tf32", "CUDA"]),
    ({"training": {"rounds": True}}, ["training.rounds = True"]),
    ({"seed": -3}, ["seed = -3"]),
    ({"seed": "x"}, ["seed = 'x'"]),
    ({"algorithm": {"name": "fedrpoto"}}, ["unknown algorithm 'fedrpoto'", "did you mean 'fedproto'"]),
    ({"algorithm": {}}, ["algorithm.name is missing", "fedavg"]),
    ({"algorithm": {"name": "fedprox", "mu": 1}}, ["unknown key in algorithm: 'mu'", "prox_weight"]),
    (
        {"algorithm": {"name": "fedprox", "prox_weight": -1}},
        ["algorithm.prox_weight = -1", "greater than or equal to 0"],
    ),
    ({"algorithm": {"name": "fedgmh", "variant": "twohead"}}, ["algorithm.variant = 'twohead'", "'onehead'"]),
    ({"model": {"name": "mlpp"}}, ["unknown model 'mlpp'", "did you mean 'mlp'"]),
    (
        {"model": {"name": "mlp", "weights": "w.pt"}},
        ["w.pt': must be RUN@ROUND", "only a module (name: ./net.py:Net) takes a file"],
    ),
    (
        {"output": {"trackers": ["tensorboard", {"name": "tensorboard"}]}},
        ["output.trackers = ", "tensorboard is there twice; leave one out"],
    ),
    ({"model": {"name": "mlp", "hidden": 0}}, ["model.hidden = 0"]),
    ({"model": {"name": "cnn"}}, ["8x8", "kernel"]),
    ({"model": []}, ["model = []"]),
    ({"model": 5.0}, ["model = 5.0", "mapping"]),
    ({"data": {"name": "digit"}}, ["unknown dataset 'digit'", "did you mean 'digits'"]),
    ({"data": {"name": "mnist", "root": "/nowhere"}}, ["/nowhere", "download"]),
    ({"partition": {"name": "exdir", "clients": 20, "classes_per_client": 12, "alpha": 1.0}}, ["12", "10"]),
    ({"partition": {"name": "iid", "clients": 100000}}, ["100000", "400"]),
    ({"partition": {"name": "exdri", "clients": 5}}, ["unknown partition 'exdri'", "did you mean 'exdir'"]),
    ({"partition": {"name": "exdir", "clients": 5, "alpha": 1.0}}, ["classes_per_client"]),
    ({"partition": {"path": "/nowhere.npz"}}, ["/nowhere.npz"]),
    ({"runtime": {"device": "cuda"}}, ["cuda"]),
    ({"runtime": {"gpus": 64}}, ["64"]),
    ({"runtime": {"threads": 0}}, ["runtime.threads = 0"]),
    ({"checkpoint": {"every": 0}}, ["checkpoint.every = 0"]),
    (
        {"model": [{"name": "mlp"}, {"name": "mlp", "hidden": 7}], "algorithm": {"name": "fedavg"}},
        ["FedAvg", "one architecture", "mlp (num_features = 100), mlp (num_features = 7)"],
    ),
    ({"model": {"name": 5}}, ["model.name = 5 is not a name"]),
    ({"data": {"name": "mnist", "root": "x" * 300}}, ["data folder", "File name too long"]),
    ({"data": {"name": "mnist", "root": "~nobody-here/x"}}, ["data folder", "home"]),
    ({"partition": {"path": "x" * 300}}, ["File name too long"]),
    ({"runtime": {"threads": 100000}}, ["runtime.threads = 100000", "1024"]),
    ({"runtime": {"timeout": 1e30}}, ["runtime.timeout = 1e+30", "2000000"]),
    (
        {"model": [{"name": "mlp"}, {"name": "mlp", "hidden": 7}], "algorithm": {"name": "fedproto"}},
        ["'means'", "100", "7", "mlp (num_features = 100)", "mlp (num_features = 7)", "same number of features"],
    ),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "my run"
    quick_run.run(quick_run.settings(), folder)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy to be changed by a test."""
    return shutil.copytree(finished, tmp_path / finished.name)


@pytest.mark.parametrize("change, words", REFUSED, ids=lambda value: str(value)[:60] if isinstance(value, dict) else "")
def test_wrong_configurations_are_refused_with_a_clear_text(change, words, tmp_path, monkeypatch):
    from pflmpi.runtime.devices import choose_gpus
    from pflmpi.transports.peers import Peer

    raw = dict(quick_run.QUICK)
    for name, value in change.items():
        keep = isinstance(value, dict) and "name" not in value and "path" not in value and name in raw and value
        raw[name] = {**raw[name], **value} if keep and name not in ("partition", "model") else value
    with pytest.raises(UserError) as caught:
        config = configuration.parse(raw)
        choose_gpus([Peer("a", 1)], config.runtime, config.training)
        quick_run.run(raw, tmp_path / "run")
    assert caught.value.exit_code == 2
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "\n" not in text and "Traceback" not in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["training.lr", "=3", "trainig.lr=1", "training.lr=[", "data.name"])
def test_wrong_overrides_are_refused(text):
    with pytest.raises(PflmpiError, match=r"override|unknown section"):
        configuration.parse(configuration.override(quick_run.QUICK, [text]))


def test_clients_that_train_nothing_are_counted_in_the_run(tmp_path, caplog):
    raw = quick_run.settings(training={"drop_last": True, "batch_size": 50})
    quick_run.run(raw, tmp_path / "run")
    few = int((load_federation(configuration.parse(raw)).num_train < 50).sum())
    assert 0 < few < 7
    assert f"{few} of 7 clients have fewer training samples than training.batch_size = 50" in caplog.text
    caplog.clear()
    quick_run.run(quick_run.settings(training={"drop_last": True, "batch_size": 1}), tmp_path / "other")
    assert not caplog.text


@pytest.mark.parametrize("recorded", ["[1, 2]", "5", "{run: [1], data: 3}", "null", "{versions: 1}", "{code: [1]}"])
def test_a_changed_record_of_a_run_is_one_error(recorded, run, tmp_path, capfd):
    path = run / "config.yaml"
    path.write_text(path.read_text().partition("recorded:")[0] + f"recorded: {recorded}\n")
    for words in (["resume", "--ranks", "1"], ["inspect"], ["inspect", "--verify"], ["report", "--out", str(tmp_path)]):
        code = quick_run.command([*words, str(run)])
        shown = capfd.readouterr().err
        assert code in (0, 1, 2) and "internal error" not in shown and "Traceback" not in shown, (words, shown)


def test_exponents_are_numbers(tmp_path):
    (tmp_path / "c.yaml").write_text("training: {lr: 1e-3, weight_decay: 1E-4}\n")
    assert configuration.read(tmp_path / "c.yaml")["training"] == {"lr": 1e-3, "weight_decay": 1e-4}
    assert configuration.override({}, ["training.lr=5e-2"]) == {"training": {"lr": 0.05}}


@pytest.mark.parametrize("content", ["a: [", "- 1", "just text", "\x00"])
def test_files_that_are_no_configuration_are_refused(content, tmp_path):
    (tmp_path / "c.yaml").write_text(content)
    with pytest.raises(PflmpiError, match=r"c\.yaml"):
        configuration.load(tmp_path / "c.yaml")


def test_a_folder_with_a_run_is_not_overwritten(run):
    before = quick_run.digest(run)
    with pytest.raises(UserError, match=rf"holds a run already; continue it with `pflmpi resume '{run}'`, or"):
        quick_run.run(quick_run.settings(seed=9), run)
    assert quick_run.digest(run) == before


@pytest.mark.parametrize("words", [[], ["--continue"]])
@pytest.mark.parametrize("name", ["metrics.csv", "partition.csv", "config.yaml", "features.h5.tmp"])
def test_a_users_files_in_the_folder_of_a_new_run_stay(name, words, tmp_path, capfd):
    config = tmp_path / "start.yaml"
    config.write_text(yaml.safe_dump(quick_run.settings()))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("a,b\n1,2\n")
    assert quick_run.command(["run", str(config), "--out", str(tmp_path / "mine"), "--ranks", "1", *words]) == 2
    assert f"mine holds {name}, which a run would replace; choose another --out" in capfd.readouterr().err
    assert (tmp_path / "mine" / name).read_text() == "a,b\n1,2\n"


def test_a_run_within_a_run_which_no_folder_of_runs_would_show_is_refused(run, capfd):
    command = ["run", str(run / "config.yaml"), "--ranks", "1", "--out", str(run / "again" / "seed1")]
    assert quick_run.command(command) == 2
    assert f"seed1 is in the run {run}, which would hide it; choose another --out" in capfd.readouterr().err
    assert not (run / "again").exists()


def test_runs_deep_in_a_folder_are_not_buried_by_another(run, tmp_path, capfd):
    shutil.copytree(run, tmp_path / "sweep" / "FedAvg" / "few" / "seed0")
    command = ["run", str(run / "config.yaml"), "--ranks", "1", "--out", str(tmp_path / "sweep")]
    for words in ([], ["--continue"]):
        assert quick_run.command([*command, *words]) == 2
        assert "sweep is a folder of runs (FedAvg/few/seed0), which it would hide" in capfd.readouterr().err


@pytest.mark.parametrize("words", [[], ["--continue"]])
def test_a_run_whose_checkpoints_are_lost_is_not_overwritten(words, run, capfd):
    for path in run.rglob("*.h5"):
        path.unlink()
    figures, command = metrics_file.read_bytes(run), ["run", str(run / "config.yaml"), "--out", str(run), *words]
    assert quick_run.command([*command, "--ranks", "1"]) == 2
    expected = f"{run} has metrics of 3 rounds and no checkpoint; put its checkpoints back from a copy to go on"
    assert expected in capfd.readouterr().err and metrics_file.read_bytes(run) == figures
    metrics_file.restart(run, 0)
    assert quick_run.command([*command, "--ranks", "1"]) == (0 if words else 2)
    assert words or "it has no checkpoint: add --continue" in capfd.readouterr().err


@pytest.mark.parametrize("change", ["training.lr=0.5", "seed=8", "algorithm.critical_share=0.1", "runtime.threads=2"])
def test_continuing_with_another_configuration_is_refused(change, finished):
    with pytest.raises(CheckpointError) as caught:
        stored_config(finished, [change])
    assert change.split("=")[0] in str(caught.value) and "in the run" in str(caught.value)


def test_a_continuation_may_change_where_it_runs(finished):
    changes = ["runtime.timeout=5", "runtime.server=dedicated", "checkpoint.keep=1", "data.root=/elsewhere"]
    config = stored_config(finished, changes)
    assert config.runtime.timeout == 5 and str(config.data.root) == "/elsewhere"


def test_a_run_of_a_version_whose_clients_keep_something_else_is_not_continued(run, monkeypatch):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    today = FedGMH.init_client
    more = {"newly_kept": torch.zeros(2)}
    monkeypatch.setattr(FedGMH, "init_client", lambda self, task: {**today(self, task), **more})
    with pytest.raises(UserError, match=r"newly_kept.*the version that wrote it"):
        quick_run.resume(run, ("training.rounds=5",))
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_changed_data_is_noticed(run):
    path = run / "config.yaml"
    raw = yaml.safe_load(path.read_text())
    raw["recorded"]["data"] = "0" * 64
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(UserError, match="data has changed"):
        quick_run.resume(run)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_diverging_client_is_named(ranks, tmp_path):
    raw = quick_run.settings(algorithm={"name": "fedavg"}, training={"lr": 1e30})
    with pytest.raises(PflmpiError, match=r"round 1: client \d+ diverged.*lower training.lr") as caught:
        quick_run.run(raw, tmp_path / "run", ranks)
    assert caught.value.exit_code == 3
    assert verify.find_newest_good(tmp_path / "run")[0] == 0


def write(raw: dict[str, Any], folder: Path) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return str(path)


@pytest.mark.parametrize("way", ["alone", "mpi", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_the_command_line_shows_one_error_and_ends_with_2(way, tmp_path):
    raw = quick_run.settings(data={"name": "mnist", "root": str(tmp_path)})  # found wrong only when all ranks are up
    command = [*processes.start_way(way, 2), "run", write(raw, tmp_path), "--out", str(tmp_path / "run")]
    done = processes.call(command + (["--ranks", "2"] if way == "alone" else []))
    assert done.returncode == (1 if way == "torchrun" else 2), done.stderr  # torchrun has one code for all failures
    lines = [line for line in done.stderr.splitlines() if line.startswith("pflmpi:")]
    assert len(lines) == 1 and str(tmp_path) in lines[0], done.stderr
    if way != "torchrun":  # which reports the failure of its child with a traceback of its own
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_debug_shows_the_traceback(tmp_path, capfd):
    raw = quick_run.settings(data={"name": "mnist", "root": str(tmp_path)})
    assert quick_run.command(["run", write(raw, tmp_path), "--ranks", "1", "--debug"]) == 2
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("way", ["alone", "mpi", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_fault_on_one_rank_stops_all_and_shows_the_cause(way, tmp_path):
    raw = quick_run.settings(algorithm={"name": "fedavg"}, training={"lr": 1e30, "participation": 0.15})
    command = [*processes.start_way(way, 2), "run", write(raw, tmp_path), "--out", str(tmp_path / "run"), "--quiet"]
    done = processes.call(command + (["--ranks", "2"] if way == "alone" else []))
    assert done.returncode == (1 if way == "torchrun" else 3), done.stderr
    first = next(line for line in done.stderr.splitlines() if line.startswith("pflmpi:"))
    assert "diverged" in first, done.stderr


def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = shutil.which("mount") and processes.call(["mount", "-t", "tmpfs", "-o", "size=1500k", "none", str(small)])
    if not mounted or mounted.returncode:
        pytest.skip("needs root to mount a small file system")
    try:
        raw = quick_run.settings(training={"rounds": 50}, checkpoint={"keep": 0}, model={"name": "mlp", "hidden": 200})
        words = ["run", write(raw, tmp_path), "--ranks", "1", "--out", str(small / "run"), "--quiet"]
        done = processes.call([*processes.PFLMPI, *words])
        assert done.returncode == 3, done.stderr
        assert "No space left" in done.stderr and "resume" in done.stderr, done.stderr
        processes.call(["mount", "-o", "remount,size=30m", str(small)])
        good, _ = verify.find_newest_good(small / "run")
        assert f"complete round is {good};" in done.stderr and verify.problems(small / "run", good) == []
    finally:
        processes.call(["umount", str(small)])
