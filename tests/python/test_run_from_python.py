"""pflmpi from a script: configurations from keywords, runs whose ranks are processes, rounds as they come."""

import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pflmpi
import processes
import quick_run
from pflmpi.algorithms.fedgmh import FedGMH
from pflmpi.config import load as configuration
from pflmpi.config import yaml_file
from pflmpi.config.keywords import Config
from pflmpi.errors import CheckpointError, ConfigError, DataError
from pflmpi.learning.training import TrainingConfig
from pflmpi.models import MODELS
from pflmpi.python.run import Row, _report_rounds, parse_row
from pflmpi.store import run_folder
from project import ROOT

CONFIG = Config(**quick_run.QUICK)


def test_it_gives_the_bits_of_the_command_and_tells_each_round(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a notebook does, where a bar would be printed again and again
    expected = quick_run.run(quick_run.settings(), tmp_path / "here")
    rows: list[Row] = []
    run = pflmpi.run(CONFIG, out=tmp_path / "run", ranks=2, on_round=rows.append)
    shown = capfd.readouterr().err
    assert (
        "\x1b" not in shown and [line.startswith("round ") for line in shown.splitlines()] == [False] * 2 + [True] * 3
    )
    assert run.round().digest() == expected
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert [row["accuracy_mean"] for row in rows] == run.columns["accuracy_mean"].tolist()
    with pytest.raises(ConfigError, match="holds a run already"):
        pflmpi.run(CONFIG, out=tmp_path / "run", ranks=1, quiet=True)
    assert run_folder.digest(run.path, 3) == expected


def test_errors_have_the_class_that_they_have_where_they_are_raised(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml_file.dump({**quick_run.QUICK, "partition": {"path": str(tmp_path / "none.npz")}}))
    with pytest.raises(DataError, match=r"none\.npz does not exist"):
        pflmpi.run(file, out=tmp_path / "run", ranks=1, quiet=True)
    with pytest.raises(ConfigError, match="ranks = 0: must be a whole number of at least 1"):
        pflmpi.run(CONFIG, ranks=0)
    with pytest.raises(ConfigError, match=r"ranks = 1\.5: must be a whole number"):
        pflmpi.run(CONFIG, ranks=1.5)
    with pytest.raises(ConfigError, match="ranks = 2 with in_process=True, which has 1"):
        pflmpi.run(CONFIG, out=tmp_path / "run", ranks=np.int64(2), in_process=True)
    with pytest.raises(ConfigError, match="out = '' names no folder"):
        pflmpi.run(CONFIG, out="")


def test_what_on_round_raises_stops_the_run_which_can_go_on(tmp_path):
    long = CONFIG.replace(training={"rounds": 2000}, checkpoint={"every": 2000})

    def refuse(row):
        if row["round"] >= 5:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        pflmpi.run(long, out=tmp_path / "run", ranks=1, on_round=refuse, quiet=True)
    (done,) = run_folder.rounds(tmp_path / "run")[-1:]
    assert 5 <= done < 2000


@pytest.mark.slow
def test_an_interrupt_stops_after_the_round_and_leaves_no_process(tmp_path):
    script = (
        "import pflmpi\n"
        f"config = pflmpi.Config.load({str(tmp_path / 'config.yaml')!r})\n"
        "try:\n"
        f"    pflmpi.run(config, out={str(tmp_path / 'run')!r}, ranks=2, on_round=lambda row: print('round'))\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    (tmp_path / "config.yaml").write_text(yaml_file.dump(quick_run.settings(training={"rounds": 100_000})))
    process = subprocess.Popen([sys.executable, "-uc", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == "round\n"
    below = processes.descendants(process.pid)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=processes.PATIENCE)
    assert out.endswith("interrupted\n") and process.returncode == 0
    assert below and not any(Path(f"/proc/{pid}").exists() for pid in below)
    assert run_folder.rounds(tmp_path / "run")


@pytest.mark.slow
def test_the_ranks_stop_when_their_notebook_is_killed(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml_file.dump(quick_run.settings(training={"rounds": 100_000})))
    script = f"import pflmpi; pflmpi.run({str(tmp_path / 'config.yaml')!r}, out={str(tmp_path / 'run')!r}, ranks=2)"
    process = processes.launch([sys.executable, "-c", script], cwd=ROOT)
    processes.wait_for(lambda: (tmp_path / "run" / "metrics.csv").exists(), "the run")
    below = processes.descendants(process.pid)
    process.kill()
    processes.wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), "the end of the ranks")
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["alone", "mpirun", "torchrun", "by hand"])
def test_the_example_runs_in_every_way_with_the_same_bits(way, tmp_path):
    """Two runs in a process; by hand, as under srun without MPI, its rank 0 hosts the store in which the ranks meet."""
    command = {
        "alone": [sys.executable],
        "mpirun": [str(ROOT / "launch" / "mpirun"), "-n", "3", "python"],
        "torchrun": [str(ROOT / "launch" / "torchrun"), "--nproc-per-node=2", "python"],
        "by hand": ["bash", "-c", 'RANK=1 "$@" & RANK=0 "$@"; code=$?; wait $! && exit $code', "", sys.executable],
    }[way]
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    active = {"VIRTUAL_ENV": sys.prefix, "PATH": f"{processes.BIN}:{os.environ['PATH']}"}
    variables = {**processes.ENVIRONMENT, **active, **(meeting if way == "by hand" else {})}
    done = processes.call(
        [*command, str(ROOT / "examples" / "from_python.py"), str(tmp_path / "runs")], cwd=ROOT, env=variables
    )
    assert done.returncode == 0, done.stderr
    assert "fedavg: 4 rounds, best accuracy" in done.stdout and "fedgmh: 4 rounds" in done.stdout
    (line,) = {line for line in done.stdout.splitlines() if line.startswith("client 2 of fedavg")}
    right, recorded = line.split(": ")[1].split()[0], line.split()[-1]
    assert right == recorded


QUICK = {key: value for key, value in quick_run.QUICK.items() if key != "seed"}


BACKWARDS = """
def backwards(labels, clients, rng):
    return [(own[:30][::-1], own[30:]) for own in np.array_split(rng.permutation(200), clients)]
"""


def test_the_loop_of_the_page_trains_as_the_run_does_whatever_the_order_of_the_samples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("import numpy as np\n" + BACKWARDS)
    sections = {"data": {"name": "digits", "limit": 200}, "partition": {"name": "./mine.py:backwards", "clients": 4}}
    training = {"rounds": 1, "epochs": 2, "participation": 0.5, "lr": 0.05}
    config = Config(**sections, model="mlp", algorithm="fedavg", training=training)
    server = pflmpi.run(config, out="runs/python", in_process=True, quiet=True).round(1).server
    text = (ROOT / "docs" / "python.md").read_text().partition("## A loop of your own")[2]
    names: dict[str, Any] = {}
    exec(text.split("```")[1].removeprefix("python"), names)
    assert len(names["trained"]) == 2
    for path, array in server.items():
        mean = sum(state["received." + path.replace("/", ".")] for state in names["trained"].values()) / 2
        np.testing.assert_allclose(mean, array, atol=1e-6, err_msg="in another order of operations")


@pytest.mark.parametrize("way", [{"in_process": True}, {"ranks": 1}], ids=str)
def test_a_run_goes_on_with_changed_code_only_if_that_is_asked_for(way, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("import numpy as np\n" + BACKWARDS)
    sections = {"data": {"name": "digits", "limit": 200}, "partition": {"name": "./mine.py:backwards", "clients": 4}}
    config = Config(**sections, model="mlp", algorithm="fedavg", training={"rounds": 1})
    pflmpi.run(config, out="run", quiet=True, **way)
    Path("mine.py").write_text("import numpy as np\n\n" + BACKWARDS)
    longer = config.replace(training={"rounds": 2})
    with pytest.raises(CheckpointError, match="changed_code=True"):
        pflmpi.run(longer, out="run", quiet=True, resume=True, **way)
    assert pflmpi.run(longer, out="run", quiet=True, resume=True, changed_code=True, **way).rounds[-1] == 2


def test_keywords_give_what_yaml_gives():
    expected = configuration.parse(quick_run.QUICK).resolved()
    assert Config(seed=3, **QUICK).resolved() == expected
    training = TrainingConfig(rounds=3, participation=0.4, epochs=1, batch_size=10, lr=0.1)
    objects = {**QUICK, "algorithm": FedGMH(), "model": MODELS["mlp"](hidden=12), "training": training}
    assert Config(seed=3, **objects).resolved() == expected
    assert Config(seed=3, **{**QUICK, "algorithm": "fedgmh"}).resolved() == expected


def test_yaml_and_options_take_a_name_in_place_of_a_section_too(tmp_path):
    file = tmp_path / "short.yaml"
    file.write_text("data: digits\npartition: {name: iid, clients: 4}\nmodel: [mlp, {name: mlp}]\nalgorithm: fedavg\n")
    expected = Config(
        data="digits", partition={"name": "iid", "clients": 4}, model=["mlp", {"name": "mlp"}], algorithm="fedavg"
    )
    assert configuration.load(file).resolved() == expected.resolved()
    changed = configuration.load(file, ["algorithm=ditto", "algorithm.prox_weight=0.5", "model=mlp", "model.hidden=5"])
    replaced = expected.replace(algorithm={"name": "ditto", "prox_weight": 0.5}, model={"name": "mlp", "hidden": 5})
    assert changed.resolved() == replaced.resolved()
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom pflmpi.algorithms.fedavg import FedAvg\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(FedAvg):\n    pass\n"
    )
    file.write_text("data: digits\npartition: {name: iid, clients: 4}\nalgorithm: ./mine.py:Mine\n")
    assert configuration.load(file).resolved()["algorithm"]["name"] == f"{tmp_path}/mine.py:Mine"


def test_a_configuration_shows_what_differs_from_the_defaults_as_keywords_that_make_it_again():
    short = Config(data="digits", partition={"name": "iid", "clients": 4}, algorithm="fedavg")
    assert repr(short) == "Config(seed=0, data='digits', partition={'name': 'iid', 'clients': 4}, algorithm='fedavg')"
    numbers = short.replace(data={"name": "digits", "task": "regression"})  # whose measures are those of its own task
    assert numbers.evaluation.measures == ["rmse", "mae", "r2"] and "measures" not in repr(numbers)
    assert numbers.replace(data="digits") == short
    assert "training={'rounds': 3" in repr(CONFIG) and "lr_decay" not in repr(CONFIG)
    for config in (short, CONFIG, CONFIG.replace(model=["mlp", {"name": "mlp", "hidden": 9}])):
        assert eval(repr(config)).resolved() == config.resolved()


def test_a_configuration_is_saved_whole_and_loaded_again(tmp_path):
    CONFIG.save(tmp_path / "saved.yaml")
    assert Config.load(tmp_path / "saved.yaml").resolved() == CONFIG.resolved()
    CONFIG.replace(seed=9).save(tmp_path / "saved.yaml")
    assert Config.load(tmp_path / "saved.yaml").seed == 9
    with pytest.raises(ConfigError, match=r"cannot write .*/x.yaml: No such file or directory; .*another path"):
        CONFIG.save(tmp_path / "none" / "deep" / "x.yaml")


def test_it_goes_through_yaml_unchanged_also_with_numbers_of_numpy():
    config = Config(**{**QUICK, "seed": np.int64(3), "training": {"rounds": np.int32(2), "lr": np.float32(0.5)}})
    assert configuration.parse(yaml_file.parse(yaml_file.dump(config.resolved()), "")).resolved() == config.resolved()


def test_replace_changes_keys_or_a_whole_named_section():
    config = Config.load(ROOT / "configs" / "quickstart.yaml")
    changed = config.replace(training={"rounds": 2}, algorithm="fedavg", seed=5)
    assert (changed.seed, changed.training.rounds, changed.training.lr) == (5, 2, config.training.lr)
    assert changed.resolved()["algorithm"]["name"] == "fedavg" and config.training.rounds == 30


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training": {"round": 3}}, "did you mean 'rounds'"),
        ({"training": 3}, "training = 3: give its keys as a mapping"),
        ({"algorithm": "fedavgg"}, "did you mean 'fedavg'"),
        ({"seed": 1.5}, "must be a whole number"),
    ],
)
def test_what_is_wrong_is_refused_with_what_is_allowed(changes, said):
    with pytest.raises(ConfigError, match=said):
        Config(**{**QUICK, **changes})


def test_another_name_with_the_old_keys_is_refused_with_the_whole_section_to_give():
    with pytest.raises(ConfigError, match=r"'critical_share'.* -s 'algorithm=\{name: fedavg\}'$"):
        configuration.load(ROOT / "configs" / "quickstart.yaml", ["algorithm.name=fedavg"])
    config = configuration.load(ROOT / "configs" / "quickstart.yaml", ["algorithm={name: fedavg}"])
    assert config.resolved()["algorithm"]["name"] == "fedavg"


def test_an_algorithm_that_no_other_process_can_import_is_refused():
    class Mine(FedGMH):
        pass

    with pytest.raises(ConfigError, match="Mine is defined where no other process can import it; put it in a file"):
        Config(**{**QUICK, "algorithm": Mine()})


def test_the_names_of_the_package_are_listed_before_they_are_imported():
    assert {"Config", "open_run", "open_runs", "run"} <= set(dir(pflmpi))


def test_a_line_becomes_numbers_and_what_is_missing_nan():
    line = parse_row({"round": 1, "participants": 3, "accuracy_mean": "0.5", "accuracy_weighted": "", "up_bytes": 10})
    assert (line["round"], line["participants"], line["accuracy_mean"], line["up_bytes"]) == (1, 3, 0.5, 10)
    assert math.isnan(line["accuracy_weighted"]) and isinstance(line["round"], int)


def test_a_round_is_told_once_its_line_is_whole(tmp_path):
    path, numbers = tmp_path / "rounds", []
    with path.open("a") as file, path.open("rb") as rounds:
        for text, expected in (('{"round": 1}\n{"rou', [1]), ('nd": 2', [1]), ("}\n", [1, 2])):
            file.write(text)
            file.flush()
            _report_rounds(rounds, lambda line: numbers.append(line["round"]))
            assert numbers == expected


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong") / "run"
    quick_run.run(quick_run.settings(training={"rounds": 1}), folder)
    return pflmpi.open_run(folder)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: pflmpi.run({"data": {}}, out="x"), r"config = .* is a dict; expected a pflmpi.Config.*Config\(\*\*"),
        (lambda: pflmpi.run(None), "config = None is a NoneType; expected a pflmpi.Config"),
        (lambda: pflmpi.run(CONFIG, out=3), "out = 3 is a int; expected a path"),
        (lambda: pflmpi.run(CONFIG, on_round=3), "on_round = 3 is a int; expected a function of one argument"),
        (lambda: pflmpi.Config.load(3), "path = 3 is a int; expected a path"),
        (lambda: pflmpi.open_run(None), "path = None is a NoneType; expected a path"),
        (lambda: pflmpi.open_runs(3), "paths = 3 is a int; expected a pattern"),
        (lambda: pflmpi.open_runs([None]), "path = None is a NoneType; expected a path"),
    ],
)
def test_a_wrong_type_is_refused(call, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=expected):
        call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda run: run.model(1.5), "client = 1.5: must be a whole number"),
        (lambda run: run.samples("1"), "client = '1': must be a whole number"),
        (lambda run: run.round(1.0), "round = 1.0: must be a whole number"),
        (lambda run: run.cost_to("a"), "target = 'a': must be a share above 0 and at most 1"),
        (lambda run: run.cost_to(90), "target = 90: must be a share above 0 and at most 1, such as 0.9 for 90 %"),
        (lambda run: run.cost_to(2.0, "f1_macro"), "target = 2.0: must be a share above 0"),
        (lambda run: run.cost_to(float("nan"), "test_loss"), "target = nan: must be a number"),
        (lambda run: pflmpi.open_runs([run.path]).summary(90), "target = 90: must be a share above 0"),
    ],
)
def test_a_wrong_argument_of_a_run_is_refused(call, expected, run):
    with pytest.raises(ConfigError, match=expected):
        call(run)


OWN_TASK = """
import torch
from pflmpi.data.task_kinds import Classification

class Costly(Classification):
    summary = "expected cost"

    def loss(self, scores, y):
        return (scores.softmax(-1) * (1 - torch.eye(scores.shape[-1]))[y]).sum(-1)
"""


@pytest.fixture(scope="module")
def adapting_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapting")
    (folder / "own.py").write_text(OWN_TASK)
    data = {"name": "digits", "limit": 400, "task": f"{folder / 'own.py'}:Costly"}
    quick_run.run(quick_run.settings(data=data, algorithm={"name": "fedbabu"}), folder / "run")
    return folder / "run"


MODES = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_models_and_forks_depend_on_no_mode_of_the_caller(mode, adapting_run, tmp_path):
    expected, run = pflmpi.open_run(adapting_run), pflmpi.open_run(adapting_run)
    with mode():
        model, fork = run.model(0), run.fork(tmp_path / "fork")
    x = torch.tensor(run.samples(0).test.x)
    for module in (model, run.model(0), fork.model(0)):
        assert torch.equal(module(x), expected.model(0)(x))


def test_a_run_whose_files_have_moved_is_opened_with_their_new_places(tmp_path):
    x, y = np.random.default_rng(0).random((60, 8), np.float32), np.arange(60) % 3
    np.savez(tmp_path / "before.npz", x=x, y=y)
    data = {"name": None, "path": str(tmp_path / "before.npz")}
    quick_run.run(quick_run.settings(data=data), tmp_path / "run")
    expected = pflmpi.open_run(tmp_path / "run").samples(0).test.x
    moved = str((tmp_path / "before.npz").rename(tmp_path / "after.npz"))
    opened = pflmpi.open_run(tmp_path / "run")
    for read in (opened.samples, opened.model):
        with pytest.raises(DataError, match=r"before.npz' of .* does not exist; .*open_run\(RUN, data={'path': FILE}"):
            read(0)
    opened = pflmpi.open_run(tmp_path / "run", data={"path": moved})
    assert (opened.samples(0).test.x == expected).all()
    assert len(opened.model(0)(torch.tensor(expected))) == len(expected)
    assert opened.fork(tmp_path / "fork").config["data"]["path"] == moved
    with pytest.raises(CheckpointError, match="seed"):
        pflmpi.open_run(tmp_path / "run", seed=9).samples(0)


def test_numbers_of_numpy_are_numbers(run):
    assert run.round(np.int64(1)).number == 1
    assert run.cost_to(np.float32(0.001)) == run.cost_to(0.001)
    assert run.cost_to(90, "test_loss") is not None
    assert len(run.samples(np.int64(1)).test.y)
