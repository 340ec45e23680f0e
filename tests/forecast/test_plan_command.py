"""`pflmpi plan` from the command line: what it shows, and what it refuses."""

import math
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

import quick_run
from every_algorithm import every_algorithm
from pflmpi.cli import main
from pflmpi.config.load import load
from pflmpi.forecast import advice, forecast
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.store import metrics_file
from pflmpi.text import format_bytes

PARTS = "estimated seconds: train, messages, test"
ROUND = "estimated seconds: a round, all 3"


class Machine:
    """A folder with configurations."""

    def __init__(self, folder, capsys, monkeypatch):
        self.folder = folder
        self._capsys = capsys
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.chdir(folder)

    def config(self, name="fedgmh-full", **sections):
        path = self.folder / "small.yaml"
        path.write_text(yaml.safe_dump(quick_run.settings(every_algorithm()[name], **sections)))
        return path

    def plan(self, *arguments):
        """Exit code, what is shown with single spaces, and errors."""
        self._capsys.readouterr()
        code = main(["plan", *map(str, arguments)])
        shown, errors = self._capsys.readouterr()
        return code, re.sub(r"[ │┃]+", " ", shown), errors


@pytest.fixture
def machine(tmp_path, capfd, monkeypatch):
    return Machine(tmp_path, capfd, monkeypatch)


def row(shown, name):
    """The values of a line of the table."""
    match = re.search(rf"^ {re.escape(name)}.*$", shown, re.MULTILINE)
    assert match, f"{name} is not in\n{shown}"
    return match[0].removeprefix(f" {name}").strip().split(", ")


def test_shows_each_group_of_ranks_and_what_a_run_then_moves(machine, tmp_path):
    config = machine.config()
    code, shown, errors = machine.plan(config, "--ranks", 3)
    assert (code, errors) == (0, "")
    assert re.search(r"^ 0 .*[MG]iB", shown, re.MULTILINE), "rank 0 has a line"
    assert " clients kept " in shown, "whose state is there"
    assert re.search(r"^ 1-2 3-4 ", shown, re.MULTILINE), "ranks 1 and 2, with 3 and 4 clients, have one together"
    quick_run.run(yaml.safe_load(config.read_text()), tmp_path / "run", 3)
    for way in ("up", "down"):
        moved = [
            [int(line[f"{name}_bytes"]) for line in metrics_file.read(tmp_path / "run")]
            for name in (way, f"wire_{way}")
        ]
        mean = [format_bytes(sum(column) / len(column)) for column in moved]
        assert row(shown, f"{way} per round: as papers count, on the wire") == mean
    assert float(row(shown, ROUND)[0]) > 0
    assert 0 <= float(row(shown, "seconds: start-up, about")[0]) < 60


def test_says_that_what_is_chosen_travels_at_most(machine):
    ways = [f"{way} per round: as papers count, on the wire" for way in ("up", "down")]
    for name, most in (("fedavg", ""), ("fedfomo", ", at most")):
        code, shown, _ = machine.plan(machine.config(name), "--ranks", 2)
        assert code == 0 and f" {ways[1]}{most} " in shown and f"{ways[0]}, at most" not in shown, shown


def test_seconds_of_messages_are_bytes_over_the_rate_and_hops_of_the_delay(machine):
    config, nodes = machine.config(), ["--ranks", 2, "--nodes", 2]
    code, shown, _ = machine.plan(config, *nodes)
    assert code == 0 and row(shown, PARTS)[1] == "not estimated"
    assert "note: seconds of messages are estimated with --delay and --rate, between nodes alone" in shown
    _, shown, _ = machine.plan(config, *nodes, "--delay", 1000, "--rate", 1e9)
    # The way up, the way down, the report, and whether all go on; in one round of three rank 0 has all participants.
    assert row(shown, PARTS)[1] == f"{(4 + 4 + 3) / 3:.3f}"
    _, shown, _ = machine.plan(config, *nodes, "--delay", 0, "--rate", 0.008)  # a kilobyte a second
    moved = [row(shown, f"{way} per round: as papers count, on the wire")[1] for way in ("up", "down")]
    counts = [float(number) * {"B": 1, "KiB": 1024}[unit] for number, unit in (text.split() for text in moved)]
    assert float(row(shown, PARTS)[1]) == pytest.approx(sum(counts) / 2 / 1000, rel=0.01)


def test_writes_nothing_and_remembers_nothing(machine):
    config = machine.config()
    assert machine.plan(config, "--ranks", 3)[0] == 0
    assert list(machine.folder.rglob("*")) == [config]


def test_a_run_without_rounds_has_memory_and_a_checkpoint(machine):
    code, shown, errors = machine.plan(machine.config(training={"rounds": 0}), "--ranks", 2)
    assert (code, errors) == (0, "")
    assert "1 checkpoints, at most: at once" in shown


def test_says_what_does_not_fit_on_a_node(machine):
    code, shown, _ = machine.plan(machine.config(), "--memory", 0.01)
    assert code == 1
    assert re.search(r"will not fit: node 0 needs .*iB of memory and has 10.24 MiB: take fewer ranks per node", shown)


def test_says_that_the_state_is_what_does_not_fit(machine):
    many = {"name": "iid", "clients": 400}
    config = machine.config(data={"limit": 1700}, partition=many, model={"name": "mlp", "hidden": 10000})  # 3 MB each
    # In a process of its own: the memory of this one, after many tests, would be most of what a rank needs.
    command = [sys.executable, "-m", "pflmpi", "plan", str(config), "--ranks", "2", "--memory", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    shown = re.sub(r"[ │┃]+", " ", done.stdout)
    assert done.returncode == 1, done.stderr
    assert "most of it is the state of the clients that live there; take more nodes" in shown


def test_says_what_does_not_fit_on_a_gpu(machine):
    config = machine.config(runtime={"device": "auto"})
    code, shown, _ = machine.plan(config, "--ranks", 3, "--gpus", 1, "--gpu-memory", 0.5)
    assert code == 1
    assert re.search(r"GPU 0 of node 0 needs .* and has 512 MiB: lower .*training.batch_size \(now 10\)", shown)
    assert "ranks share it: take one rank per GPU" in shown


def test_a_gpu_holds_no_more_samples_than_a_run_lets_it(machine, monkeypatch):
    most = []
    rank_memory = forecast.forecast_memory
    monkeypatch.setattr(forecast, "forecast_memory", lambda *args: most.append(args[-1]) or rank_memory(*args))
    config = machine.config(runtime={"device": "auto", "gpu_memory": 0.5})
    for options in ([], ["-s", "data.resident=host"], ["-s", "data.resident=device"]):
        machine.plan(config, "--gpus", 1, "--gpu-memory", 4, *options)
    assert most == [2**30, 0, math.inf]


def test_says_how_messages_reach_the_gpus_and_what_nccl_takes_of_them(machine):
    config = machine.config("fedavg", runtime={"device": "auto"})
    way, nccl_memory = "large messages", "of a GPU's memory for NCCL, at most about"
    _, shown, _ = machine.plan(config, "--ranks", 5, "--gpus", 4)
    server = "NCCL from GPU to GPU, on ranks 1-4, and gloo between rank 0 and rank 1, which stands for it"
    assert ", ".join(row(shown, way)) == server
    assert row(shown, nccl_memory) == [format_bytes(1.06e9)]
    (on_gpu,) = re.findall(r"a GPU: needs, has ([0-9.]+) GiB", shown)
    assert float(on_gpu) * 2**30 > 1.06e9
    _, shown, _ = machine.plan(config, "--ranks", 5, "--gpus", 2)
    assert ", ".join(row(shown, way)) == "gloo, through the host: NCCL needs a whole GPU for each rank"
    assert nccl_memory not in shown and "note: up to 2 ranks share a GPU" in shown
    _, shown, _ = machine.plan(config, "--ranks", 2, "--gpus", 2, "-s", "runtime.transport=mpi")
    can = "MPI from GPU to GPU, on ranks 0-1, if the library can, else through the host; `pflmpi doctor` there says"
    assert ", ".join(row(shown, way)) == f"{can} which" and nccl_memory not in shown
    whole_models = machine.config("fedamp", runtime={"device": "auto"}, model={"name": "mlp", "hidden": 2000})
    _, shown, _ = machine.plan(whole_models, "--ranks", 4, "--gpus", 4)
    assert row(shown, nccl_memory) == [format_bytes(1.06e9 + 3 * (4.34e9 - 1.06e9) / 7)], "to three others each"
    _, shown, _ = machine.plan(config, "--ranks", 2)
    assert way not in shown and nccl_memory not in shown


def test_says_what_does_not_fit_on_disk(machine, monkeypatch):
    runtime = RuntimeConfig(state="disk")
    config = SimpleNamespace(checkpoint=SimpleNamespace(keep=0, every=1), runtime=runtime)
    few = SimpleNamespace(
        experiment=SimpleNamespace(config=config), state_on_disk=0, resources=SimpleNamespace(nodes=2)
    )
    few.disk = SimpleNamespace(most=500)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=499))
    (problem,) = advice._check_disk(few, machine.folder / "not" / "there")
    assert problem.startswith(
        f"checkpoints need 500 B and {machine.folder} has 499 B free: keep not all (checkpoint.keep"
    )
    few.disk.most = 499
    assert not list(advice._check_disk(few, machine.folder))
    few.state_on_disk = 1000
    (problem,) = advice._check_disk(few, machine.folder)
    assert problem.startswith(f"checkpoints need 499 B and the state of clients 1000 B and {machine.folder} has")
    config.runtime = RuntimeConfig(state="disk", scratch=str(machine.folder.parent))  # 500 B on each node
    (problem,) = advice._check_disk(few, machine.folder)
    assert problem.endswith("has 499 B free: name another runtime.scratch")


def test_the_state_on_disk_is_not_in_memory_and_grows_with_those_that_train(machine):
    """7 clients of 100 KB, of which 3 train."""
    common = {"model": {"name": "mlp", "hidden": 350}, "training": {"rounds": 1}}
    _, shown, _ = machine.plan(machine.config("fedgmh-full", **common))
    assert "runtime.state" not in shown
    _, shown, _ = machine.plan(machine.config("fedgmh-full", **common, runtime={"state": "disk"}))
    (kibibytes,) = re.findall(r"state of clients on disk \(runtime.state\), at most ([0-9.]+) KiB", shown)
    assert 300 < float(kibibytes) < 350


@pytest.mark.parametrize(
    ("sections", "ranks", "note"),
    [
        ({"runtime": {"executor": "loop"}}, 10, "ranks 8-9 will have nothing to do: there are 7 clients: at most 8"),
        (
            {"runtime": {"executor": "lanes", "lanes": 4}},
            4,
            "the 7 clients are in 2 groups of up to 4; set runtime.lanes lower",
        ),
        ({"training": {"participation": 0.15}}, 7, "at most 1 of them at a time (1 participants"),
        ({"runtime": {"threads": 300}}, 2, "ranks with 300 threads each compute on the"),
    ],
)
def test_says_which_ranks_are_of_no_use(sections, ranks, note, machine):
    # Enough memory for ranks that need as much as this process, which may have run many tests.
    code, shown, _ = machine.plan(machine.config(**sections), "--ranks", ranks, "--memory", 1000)
    assert code == 0
    assert note in shown


def test_an_evaluation_after_many_rounds_counts_as_often_as_it_comes(machine, monkeypatch):
    """One client trains at a time, on one rank; all are tested in round 300, with unseen ones."""
    training, evaluation = {"rounds": 600, "participation": 0.15}, {"every": 300, "unseen": 0.3}
    sections = {"training": training, "evaluation": evaluation, "runtime": {"executor": "loop"}}
    config = load(machine.config("fedavg", **sections))
    here = forecast.Resources(4, 1, 0, 4, memory=2**40, gpu_memory=None, delay=None, rate=None)
    planned = forecast.predict(config, here)
    assert planned.seconds.test > 0
    assert not [note for note in advice.find_useless_ranks(planned) if "nothing to do" in note]
    monkeypatch.setattr(forecast, "_MAX_ROUNDS", 300)
    full = forecast.predict(config, here)
    for (_, *means), (_, *expected) in zip(planned.bytes_per_round(), full.bytes_per_round(), strict=True):
        assert means == pytest.approx(expected)
    costs = planned.measured.costs
    test = [forecast.compute_seconds(planned.ranks, 4, rounds, costs)[1] for rounds in (planned.rounds, full.rounds)]
    assert test[0] == pytest.approx(test[1])


def test_is_refused_under_a_launcher(machine, monkeypatch):
    for name, value in {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    code, _, errors = machine.plan(machine.config())
    assert code == 2
    assert "plan runs alone, and mpi has started 4 ranks; start it without a launcher, with --ranks 4" in errors
