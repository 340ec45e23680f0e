"""Early stop: the same round everywhere, also after a kill, and known to every command."""

import pytest
import yaml

import processes
import quick_run
from every_algorithm import ON_ANY_MODEL
from pflmpi.analysis.run import open_run
from pflmpi.analysis.table import compute_entries
from pflmpi.cluster.run_status import format_progress, read_run_status, summarize_progress
from pflmpi.config.load import parse
from pflmpi.errors import ConfigError
from pflmpi.experiment.build import prepare
from pflmpi.learning.early_stop import EarlyStop, EarlyStopConfig
from pflmpi.learning.task import HOST
from pflmpi.store import metrics_file, run_folder
from pflmpi.sweep.pending import find_run_state, plan_cell
from pflmpi.sweep.table import SweepTable, list_cells

ROUNDS = 12
# No accuracy rises by more than 1, so that the first one stays the best: the run ends 3 rounds after it.
STOP = {"metric": "accuracy_mean", "patience": 3, "min_delta": 1.0}


def settings(rounds=ROUNDS, stop=STOP, **sections):
    return quick_run.settings(sections, training={"rounds": rounds, "stop": stop})


@pytest.mark.parametrize(
    ("metric", "patience", "min_delta", "values", "met"),
    [
        ("accuracy_mean", 2, 0.0, "0.5 0.6 0.6 0.6", True),
        ("accuracy_mean", 2, 0.0, "0.5 0.6 0.6 0.61", False),
        ("accuracy_mean", 2, 0.01, "0.85 0.86 0.86", True),  # better by 0.01 is not by more than 0.01
        ("accuracy_mean", 2, 0.01, "0.85 0.86 0.861", False),
        ("test_loss", 2, 0.0, "2.0 1.0 1.5 1.0", True),
        ("test_loss", 2, 0.0, "2.0 1.0 1.5 0.9", False),
        ("test_loss", 2, 0.0, "nan nan 2.0 nan", False),
        ("test_loss", 2, 0.0, "2.0 nan inf", True),
        ("train_loss", 2, 0.0, "nan nan nan", True),
        ("test_loss", 2, 0.0, "3e-09 2e-09 1e-09", False),
        ("test_loss", 2, 1e-9, "3e-09 2e-09 2e-09", True),  # better by 1e-9 is not by more
        ("accuracy_mean", 2, 0.0, "0.5 - - -", False),  # not measured: nothing is decided
        ("accuracy_mean", 2, 0.0, "0.5 - - 0.5", True),  # rounds count, not evaluations
        ("accuracy_mean", 2, 0.0, "- - - 0.5", False),  # from the first evaluation on
    ],
)
def test_patience_counts_rounds_since_the_best(metric, patience, min_delta, values, met):
    lines = [{"round": str(round), metric: value.strip("-")} for round, value in enumerate(values.split(), 1)]
    stop = EarlyStop(EarlyStopConfig(metric=metric, patience=patience, min_delta=min_delta), lines)
    assert stop.met == met, stop.why


def test_a_run_ends_with_the_bits_of_a_run_of_as_many_rounds(tmp_path):
    stopped = quick_run.run(settings(checkpoint={"every": 5}), tmp_path / "stopped")
    assert run_folder.rounds(tmp_path / "stopped")[-1] == 4
    assert len(metrics_file.read(tmp_path / "stopped")) == 4
    assert quick_run.run(settings(4, None), tmp_path / "short") == stopped


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_that_was_killed_stops_at_the_same_round(tmp_path, ranks):
    stop = {"metric": "train_loss", "patience": 2, "min_delta": 0.2}
    digest = quick_run.run(settings(20, stop), tmp_path / "whole")
    last = run_folder.rounds(tmp_path / "whole")[-1]
    assert 3 < last < 20
    quick_run.run(settings(last - 1, stop), tmp_path / "run", ranks=ranks)
    assert quick_run.resume(tmp_path / "run", ("training.rounds=20",), ranks=4 - ranks) == digest
    assert run_folder.rounds(tmp_path / "run")[-1] == last


def test_resume_says_that_a_run_has_stopped_and_goes_on_without(tmp_path, capfd):
    run = tmp_path / "run"
    stopped = quick_run.run(settings(), run)
    before = (run / "metrics.csv").read_bytes()
    assert quick_run.resume(run, ranks=2) == stopped
    stdout = " ".join(capfd.readouterr().out.split())
    assert f"nothing is left to do: {run} has stopped early after round 4" in stdout
    assert "accuracy_mean" in stdout and "-s training.stop=null" in stdout
    assert (run / "metrics.csv").read_bytes() == before
    assert quick_run.resume(run, ("training.stop=null", "training.rounds=6")) == quick_run.run(
        settings(6, None), tmp_path / "whole"
    )
    assert open_run(run).config["training"]["stop"] is None


def test_one_value_of_the_section_can_be_overridden(tmp_path):
    run = tmp_path / "run"
    quick_run.run(settings(), run)
    quick_run.resume(run, ("training.stop.patience=5",))
    assert run_folder.rounds(run)[-1] == 6
    assert open_run(run).config["training"]["stop"] == {**STOP, "patience": 5}


def test_every_command_knows_that_it_has_ended(tmp_path, capsys):
    run = tmp_path / "run"
    quick_run.run(settings(), run)
    status = read_run_status(run)
    assert status is not None and status.done
    assert "stopped early: accuracy_mean" in "\n".join(format_progress(status, None))
    assert "round 4 of 12, stopped early" in summarize_progress(status, None)
    state = find_run_state(run, parse(settings()))
    assert (state.state, state.done) == ("done", 4)
    longer = find_run_state(run, parse(settings(stop={**STOP, "patience": 6})))
    assert (longer.state, longer.changes) == ("continue", {"training.stop": {**STOP, "patience": 6}})
    assert find_run_state(run, parse(settings(stop=None))).changes == {"training.stop": None}
    shorter = find_run_state(run, parse(settings(stop={**STOP, "patience": 2})))
    assert shorter.state == "other" and "training.stop ends it after round 3 now" in shorter.problem
    assert open_run(run).stopped_early.startswith("accuracy_mean")
    assert quick_run.command(["inspect", str(run)]) == 0
    assert "stopped early" in capsys.readouterr().out


@pytest.mark.slow
def test_reports_and_plans_say_so(tmp_path, capsys):
    run, config = tmp_path / "run", tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings()))
    quick_run.run(settings(), run)
    assert quick_run.command(["report", str(run), "--out", str(tmp_path / "report")]) == 0
    assert "stopped early after round 4 of 12" in (tmp_path / "report/report.html").read_text()
    assert quick_run.command(["plan", str(config), "--ranks", "1"]) == 0
    assert "at most 12" in capsys.readouterr().out


@pytest.mark.slow
def test_a_launcher_ends_with_zero_and_the_same_bits(tmp_path):
    run, config = tmp_path / "run", tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings()))
    expected = quick_run.run(settings(), tmp_path / "alone")
    for words in (["run", str(config), "--out", str(run)], ["resume", str(run)]):
        done = processes.call([*processes.start_way("mpi", 3), *words])
        assert done.returncode == 0, done.stderr
        assert quick_run.digest(run) == expected
    assert "has stopped early after round 4" in done.stdout


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (
            {"stop": {"metric": "accuracy", "patience": 3}},
            "training.stop.metric = 'accuracy': must be one of",
        ),
        ({"stop": {"metric": "accuracy_mean"}}, "training.stop.patience is missing: rounds"),
        ({"stop": {"metric": "accuracy_mean", "patience": 0}}, "training.stop.patience = 0: must be greater than"),
        ({"stop": {"metric": "accuracy_mean", "wait": 3}}, "unknown key in training.stop: 'wait'"),
        ({"stop": 3}, "training.stop = 3"),
        ({"stop": {"metric": "unseen_accuracy_mean", "patience": 3}}, "evaluation.unseen"),
        ({"stop": {"metric": "trained_accuracy_mean", "patience": 3}}, "evaluation.when"),
    ],
)
def test_bad_values_are_refused(training, message, tmp_path):
    with pytest.raises(ConfigError) as error:
        quick_run.run(quick_run.settings(training=training), tmp_path / "run")
    assert message in str(error.value)


OWN_STEPS = """
from dataclasses import dataclass

from pflmpi import tree
from pflmpi.algorithms.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class Own(FedAvg):
    \"\"\"Steps of its own, by torch alone.\"\"\"

    def client_update(self, task, client, down, data):
        model = tree.clone(down["model"])
        for batch in data.passes["train"]:
            model = tree.map(lambda leaf: leaf * (1 - 0.01 * batch.active), model)
        return client, {"model": model}
"""


def test_a_training_loss_that_is_never_measured_is_refused_at_the_start(tmp_path, capfd):
    (tmp_path / "own.py").write_text(OWN_STEPS)
    config, stop = tmp_path / "config.yaml", {"metric": "train_loss", "patience": 2}
    config.write_text(yaml.safe_dump(settings(stop=stop, algorithm={"name": "./own.py:Own"})))
    words = ["run", str(config), "--out", str(tmp_path / "run"), "--ranks", "1"]
    assert quick_run.command(words) == 2
    err = " ".join(capfd.readouterr().err.split())
    assert "training.stop.metric = 'train_loss', but the local training of Own measures no loss; choose another" in err
    assert not (tmp_path / "run").exists()
    assert quick_run.command([*words, "-s", "training.stop.metric=test_loss", "-s", "training.rounds=1"]) == 0


@pytest.mark.parametrize(
    "option", ["momentum=0.9", "weight_decay=0.01", "clip_norm=1.0", "optimizer=adam", "optimizer=adamw"]
)
def test_an_option_of_the_optimizer_that_takes_no_step_is_refused_at_the_start(option, tmp_path, capfd):
    (tmp_path / "own.py").write_text(OWN_STEPS)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings(algorithm={"name": "./own.py:Own"})))
    words = ["run", str(config), "--out", str(tmp_path / "run"), "--ranks", "1", "-s", f"training.{option}"]
    assert quick_run.command(words) == 2
    err, key = " ".join(capfd.readouterr().err.split()), option.split("=")[0]
    assert f"training.{key} = " in err and "the local training of Own takes no step of the optimizer" in err
    assert not (tmp_path / "run").exists()


UNEVEN = """
import numpy as np


def uneven(labels, clients, rng):
    return np.split(rng.permutation(len(labels)), [4, *range(100, 100 * (clients - 1), 100)])
"""


def test_a_client_without_a_minibatch_does_not_speak_for_the_others(tmp_path):
    (tmp_path / "own.py").write_text(UNEVEN)
    partition = {"name": f"{tmp_path}/own.py:uneven", "clients": 4}
    training = {"momentum": 0.9, "drop_last": True, "batch_size": 10, "rounds": 1}
    experiment = prepare(parse({**quick_run.settings(training=training), "partition": partition}), HOST)
    assert experiment.federation.num_train[0] < 10


@pytest.mark.parametrize("name", ["fedavg", "fedavg_ft"])
@pytest.mark.parametrize("option", [{"momentum": 0.9}, {"stop": {"metric": "train_loss", "patience": 2}}], ids=str)
def test_a_client_without_a_step_before_the_deadline_does_not_speak_for_the_others(option, name):
    slow = {"step_seconds": 1.0, "step_spread": 1.0, "deadline": 1.2, "participation": 1.0}  # client 0 takes 2.1 s
    raw = quick_run.settings({"algorithm": {"name": name}}, training={**slow, **option})
    assert prepare(parse(raw), HOST)


def test_options_of_the_optimizer_are_those_of_fine_tuning_too():
    raw = quick_run.settings({"algorithm": {"name": "fedavg_ft"}}, training={"epochs": 0, "momentum": 0.9})
    assert prepare(parse(raw), HOST)


def test_an_algorithm_that_does_not_take_made_up_messages_is_not_refused(tmp_path):
    check = "        assert not down['model']['head']['bias'].any(), 'the bias starts at zero'\n"
    (tmp_path / "own.py").write_text(OWN_STEPS.replace("        model = tree", f"{check}        model = tree"))
    own, loop = {"name": f"{tmp_path}/own.py:Own"}, {"executor": "loop"}
    raw = quick_run.settings(algorithm=own, training={"momentum": 0.9}, runtime=loop)
    assert prepare(parse(raw), HOST)


def test_without_local_steps_there_is_no_training_loss():
    with pytest.raises(ConfigError, match="the local training of FedGMH measures no loss"):
        prepare(
            parse(quick_run.settings(training={"epochs": 0, "stop": {"metric": "train_loss", "patience": 2}})), HOST
        )


@pytest.mark.parametrize("name", ON_ANY_MODEL)
def test_every_algorithm_can_be_stopped_by_its_training_loss(name):
    training = {"stop": {"metric": "train_loss", "patience": 2}, "participation": 1.0}
    assert prepare(parse(quick_run.settings(algorithm={"name": name}, training=training)), HOST).config.training.stop


def test_a_stopped_run_is_a_finished_cell(tmp_path):
    table = SweepTable(
        title="t",
        source="none",
        seeds=[0],
        base={key: value for key, value in settings().items() if key not in ("seed", "algorithm")},
        columns={"digits": {}},
        rows={"Local": {"algorithm": {"name": "local"}}},
    )
    listed = list_cells(table, (), None)
    quick_run.run(listed[0].raw, listed[0].run(tmp_path))
    listed[0].config(tmp_path).write_text(yaml.safe_dump(listed[0].raw))
    assert plan_cell(listed[0], parse(listed[0].raw), tmp_path, 1).state == "done"
    (entry,) = compute_entries(table, listed, tmp_path)
    assert (entry.finished, entry.seeds, entry.state) == (1, 1, "")
    last = float(metrics_file.read(listed[0].run(tmp_path))[-1]["accuracy_mean"])
    assert entry.ours is not None and entry.ours.value == pytest.approx(100 * last)
