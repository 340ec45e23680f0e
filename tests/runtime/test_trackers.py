"""Trackers show what metrics.csv says, each round once, also after a continuation; none can stop a run."""

import errno
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as Watcher
from torch.utils.tensorboard import SummaryWriter

import processes
import quick_run
from pflmpi.errors import UserError
from pflmpi.runtime import trackers
from pflmpi.runtime.trackers import TensorBoard
from pflmpi.store import metrics_file

ON = {"trackers": ["tensorboard"]}

Scalars = dict[str, list[tuple[int, float]]]


def read(run):
    """All that is in the event files of a run; nothing is thinned out, or left out because it came again."""
    folder = str(run / TensorBoard.FOLDER)
    return EventAccumulator(folder, size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()


def written(run):
    """The rounds and values of each scalar in the event files of a run."""
    events = read(run)
    assert not events.Tags()["tensors"], "what shows scalars shows them"
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def times(run):
    """When each round ended."""
    return [event.wall_time for event in read(run).Scalars("seconds")]


def expected(run):
    """What metrics.csv says, in single precision."""
    result: Scalars = {}
    for line in metrics_file.read(run):
        for name, value in line.items():
            if name != "round" and value:
                result.setdefault(name, []).append((int(line["round"]), float(np.float32(value))))
    return result


def ascending(values):
    return all(before < after for before, after in pairwise(values))


def own_files(run):
    """Those that hold anything."""
    return [path for path in (run / TensorBoard.FOLDER).glob("events.out.tfevents.*.pflmpi") if path.stat().st_size]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_column_of_every_round_is_there_once(tmp_path, ranks):
    run = tmp_path / "run"
    quick_run.run(
        quick_run.settings(output=ON, evaluation={"every": 2, "unseen": 0.2, "when": "both"}, training={"rounds": 4}),
        run,
        ranks,
    )
    scalars = written(run)
    assert scalars == expected(run)
    assert set(scalars) == set(metrics_file.COLUMNS) - {"round"}
    assert list((run / TensorBoard.FOLDER).iterdir()) == own_files(run) and len(own_files(run)) == 1, "by one rank"
    assert ascending(times(run))


def test_a_continuation_has_each_round_once(tmp_path):
    run = tmp_path / "run"
    quick_run.run(quick_run.settings(output=ON), run)
    (run / "round_00003.h5").unlink()  # killed before this checkpoint, but after its line
    with SummaryWriter(str(run / TensorBoard.FOLDER), filename_suffix=".other") as writer:
        writer.add_scalar("of another program", 0.5, 7)
    quick_run.resume(run, ("training.rounds=5",))
    scalars = written(run)
    assert scalars.pop("of another program") == [(7, 0.5)]
    assert scalars == expected(run)
    assert [step for step, _ in scalars["seconds"]] == [1, 2, 3, 4, 5]
    assert ascending(times(run)) and len(own_files(run)) == 1


def test_a_tensorboard_that_is_looking_sees_a_continuation(tmp_path):
    run = tmp_path / "run"
    quick_run.run(quick_run.settings(output=ON), run)
    watcher = Watcher(str(run / TensorBoard.FOLDER)).Reload()
    assert [event.step for event in watcher.Tensors("seconds")] == [1, 2, 3]
    quick_run.resume(run, ("training.rounds=5",))
    assert [event.step for event in watcher.Reload().Tensors("seconds")] == [1, 2, 3, 4, 5]


def test_they_can_be_asked_for_later_and_left_out_later(tmp_path):
    run = tmp_path / "run"
    before = quick_run.run(quick_run.settings(), run)
    assert not (run / TensorBoard.FOLDER).exists()
    quick_run.resume(run, ("training.rounds=4", "output.trackers=[tensorboard]"))
    assert written(run) == expected(run)
    quick_run.resume(run, ("training.rounds=5", "output.trackers=[]"))
    assert [step for step, _ in written(run)["seconds"]] == [1, 2, 3, 4]
    assert before != quick_run.digest(run)


def test_the_results_are_the_same_with_them(tmp_path):
    without = quick_run.run(quick_run.settings(), tmp_path / "without")
    assert quick_run.run(quick_run.settings(output=ON), tmp_path / "with") == without


def test_times_of_earlier_rounds_are_without_pauses(tmp_path):
    metrics_file.path(tmp_path).write_text("")
    end = metrics_file.path(tmp_path).stat().st_mtime
    assert trackers._estimate_times(tmp_path, [5.0, 2.0, 1.0]) == [end - 3, end - 1, end]
    assert trackers._estimate_times(tmp_path, []) == []


def test_a_tracker_that_fails_leaves_the_run_alone_and_says_so_once(tmp_path, monkeypatch, caplog):
    expected_bits = quick_run.run(quick_run.settings(), tmp_path / "without")

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    assert quick_run.run(quick_run.settings(output=ON), tmp_path / "run") == expected_bits
    (text,) = [record.getMessage() for record in caplog.records if "tracker " in record.getMessage()]
    assert text.startswith("the tracker tensorboard fails: [Errno 28] No space left on device; the run goes on without")
    monkeypatch.undo()
    quick_run.resume(tmp_path / "run", ("training.rounds=4",))
    assert written(tmp_path / "run") == expected(tmp_path / "run")


class FakeWandb(ModuleType):
    """Records the calls of Weights & Biases that a run makes."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[str, int]] = []
        self.ended: list[int] = []

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **options: Any) -> "FakeWandb":
        self.begun.append(options)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        assert "accuracy_mean" in values and "round" not in values
        self.logged.append((self.begun[-1]["id"], step))

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


def test_weights_and_biases_has_one_run_with_each_round_once(tmp_path, monkeypatch):
    fake, run = FakeWandb(), tmp_path / "run"
    monkeypatch.setitem(sys.modules, "wandb", fake)
    quick_run.run(quick_run.settings(output={"trackers": ["wandb"]}), run, ranks=2)
    (run / "round_00003.h5").unlink()  # killed before this checkpoint, but after its line
    quick_run.resume(run, ("training.rounds=5",))
    assert [step for _, step in fake.logged] == [1, 2, 3, 4, 5]
    assert len({run_id for run_id, _ in fake.logged}) == 1 and fake.ended == [0, 0]
    first = fake.begun[0]
    assert (first["mode"], first["resume"], first["dir"]) == ("offline", "allow", str(run))
    assert first["config"]["algorithm.name"] == "fedgmh"


def test_weights_and_biases_goes_on_after_its_last_round_was_half_written(tmp_path, monkeypatch):
    fake, run, write = FakeWandb(), tmp_path / "run", Path.write_text
    monkeypatch.setitem(sys.modules, "wandb", fake)

    def cut_short(self, text):
        write(self, "" if text == "3" else text)
        if text == "3":
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(text)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", cut_short)
        quick_run.run(quick_run.settings(output={"trackers": ["wandb"]}), run)
    quick_run.resume(run, ("training.rounds=5",))
    assert [step for _, step in fake.logged] == [1, 2, 3, 3, 4, 5]


class FakeMLflow(ModuleType):
    """Records the calls of MLflow's client that a run makes."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.runs: dict[str, str] = {}  # id there by our tag
        self.metrics: list[tuple[str, str, int]] = []
        self.stores: list[str] = []
        self.states: list[str] = []
        self.entities = SimpleNamespace(
            Metric=lambda key, value, timestamp, step: SimpleNamespace(key=key, step=step), Param=lambda *pair: pair
        )

    def MlflowClient(self, tracking_uri: str) -> "FakeMLflow":
        self.stores.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(experiment_id="7")

    def search_runs(self, experiments: list[str], filter_string: str) -> list[SimpleNamespace]:
        ids = [id_there for ours, id_there in self.runs.items() if ours in filter_string]
        return [SimpleNamespace(info=SimpleNamespace(run_id=id_there)) for id_there in ids]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> SimpleNamespace:
        (ours,) = tags.values()
        self.runs[ours] = f"there-{len(self.runs)}"
        return SimpleNamespace(info=SimpleNamespace(run_id=self.runs[ours]))

    def update_run(self, run: str, status: str) -> None:
        self.states.append(status)

    def get_metric_history(self, run: str, name: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(step=step) for id_there, key, step in self.metrics if (id_there, key) == (run, name)]

    def log_batch(self, run: str, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
        self.metrics += [(run, metric.key, metric.step) for metric in metrics]

    def set_terminated(self, run: str, status: str) -> None:
        self.states.append(status)


def test_mlflow_has_one_run_with_each_round_once(tmp_path, monkeypatch):
    fake, run, store = FakeMLflow(), tmp_path / "run", tmp_path / "mlruns"
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    quick_run.run(quick_run.settings(), run)
    later = f"output.trackers=[{{name: mlflow, store: {store}}}]"
    quick_run.resume(run, (later, "training.rounds=4"), ranks=2)
    quick_run.resume(run, ("training.rounds=5",))
    assert [(id_there, step) for id_there, key, step in fake.metrics if key == "accuracy_mean"] == [
        ("there-0", round) for round in range(1, 6)
    ]
    assert fake.stores[0] == f"sqlite:///{store}/mlflow.db" and fake.states == ["FINISHED", "RUNNING", "FINISHED"]


READ_MLFLOW = """
import json, mlflow, sys
client = mlflow.MlflowClient(tracking_uri=sys.argv[1])
(run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
points = {name: [[point.step, point.value] for point in history] for name, history in histories.items()}
print(json.dumps([run.info.status, run.data.params["algorithm.name"], points]))
"""


def test_mlflows_own_client_reads_each_round_once(tmp_path):
    if find_spec("mlflow") is None:
        pytest.skip("needs mlflow")
    run, store = tmp_path / "run", tmp_path / "mlruns"
    quick_run.run(quick_run.settings(), run)
    environment = {name: value for name, value in processes.ENVIRONMENT.items() if name != "PYTHONWARNINGS"}

    def python(*words):
        done = processes.call([sys.executable, *words], env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for change in (f"output.trackers=[{{name: mlflow, store: {store}}}]", "training.rounds=5"):
        python("-m", "pflmpi", "resume", str(run), "-s", "training.rounds=4", "-s", change, "--ranks", "1", "--quiet")
    columns: dict[str, list[list[float]]] = {}
    for line in metrics_file.read(run):
        for name, value in line.items():
            if name != "round" and value:
                columns.setdefault(name, []).append([int(line["round"]), float(value)])
    assert json.loads(python("-c", READ_MLFLOW, f"sqlite:///{store}/mlflow.db")) == ["FINISHED", "fedgmh", columns]


MINE = """
from pathlib import Path
from pflmpi.runtime.trackers import Tracker

class Mine(Tracker):
    def __init__(self, run, file):
        self.file = Path(file)

    def add(self, line, at):
        with self.file.open("a") as file:
            file.write(f"{line['round']} ")

    def close(self, completed):
        with self.file.open("a") as file:
            file.write(f"{completed}")

class Other:
    pass
"""


def test_a_class_of_ones_own_gets_its_options_and_each_round(tmp_path, caplog):
    (tmp_path / "mine.py").write_text(MINE)
    tracker = {"name": f"{tmp_path}/mine.py:Mine", "file": str(tmp_path / "said")}
    quick_run.run(quick_run.settings(output={"trackers": [tracker]}), tmp_path / "run", ranks=2)
    assert (tmp_path / "said").read_text() == "1 2 3 True"
    assert "code" not in caplog.text
    quick_run.resume(tmp_path / "run", ("training.rounds=4",))
    assert (tmp_path / "said").read_text() == "1 2 3 True1 2 3 4 True", "it does not say what it has"
    assert f"names code, which is executed now: {tmp_path}/mine.py:Mine" in caplog.text
    metrics_file.path(tmp_path / "run").unlink()
    quick_run.resume(tmp_path / "run", ("training.rounds=5",))
    assert (tmp_path / "said").read_text().endswith("4 True5 True"), "nothing of rounds whose figures are lost"


REFUSED = {
    "unknown": (["tensorbord"], "unknown tracker 'tensorbord'; did you mean 'tensorboard'. known: mlflow, tensor"),
    "options": ([{"name": "wandb", "moode": 1}], "output.trackers: wandb: got an unexpected keyword .*'moode'.*mode"),
    "no name": ([{"store": "mlruns"}], "output.trackers = .*has no name"),
    "no list": ("tensorboard", "output.trackers = 'tensorboard'"),
    "another class": (["mine.py:Other"], "tracker .*Other.*is no subclass of pflmpi.runtime.trackers.Tracker"),
    "no tensorboard": (["tensorboard"], "needs the package tensorboard, which is not installed; `pip install tensorb"),
    "no wandb": (["wandb"], "needs the package wandb, which is not installed; `pip install wandb`"),
    "no mlflow": (["mlflow"], "needs the package mlflow, which is not installed; `pip install mlflow`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_track_is_refused_before_anything_is_written(case, tmp_path, monkeypatch):
    setting, words = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    for name in ("torch.utils.tensorboard", "mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=words):
        quick_run.run(quick_run.settings(output={"trackers": setting}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
