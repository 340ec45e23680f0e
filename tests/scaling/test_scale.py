"""`pflmpi scale`: what it measures, in which order, what it makes of it, and what it refuses."""

import csv
import platform
import shutil
import signal

import pytest
import yaml

import processes
import quick_run
import scale_folder
from pflmpi import machine
from pflmpi.config.load import parse
from pflmpi.errors import ConfigError
from pflmpi.scaling import experiment, records
from pflmpi.scaling.experiment import runs
from pflmpi.scaling.results import PARTS, format_table, read_results, write_table
from pflmpi.scaling.running import make_task, scaling_of
from pflmpi.sweep.pending import prepare_cell

MB = 2**20


def test_repeats_take_turns():
    order = runs(scale_folder.scaling([1, 2, 4]))
    assert [(run.ranks, run.repeat) for run in order] == [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]


def test_a_mode_says_what_differs_between_points():
    def of(mode, ranks):
        raw = scale_folder.scaling(
            [1, 2, 4], mode, training={"rounds": 99, "stop": {"metric": "accuracy_mean", "patience": 3}}
        ).raw(ranks)
        assert raw["training"]["stop"] is None
        return raw["partition"]["clients"], raw["runtime"]["threads"], raw["training"]["rounds"]

    assert [of("strong", ranks) for ranks in (1, 4)] == [(7, 1, 4)] * 2
    assert [of("weak", ranks) for ranks in (1, 4)] == [(7, 1, 4), (28, 1, 4)]
    assert [of("packing", ranks) for ranks in (1, 4)] == [(7, 8, 4), (7, 2, 4)]


def test_weak_mode_sets_steps_instead_of_epochs():
    config = parse(quick_run.settings(training={"epochs": 2}))
    scaling, remark = scaling_of(config, [1], "weak", 1, 2, 0)
    training = parse(scaling.raw(1)).training
    assert (training.epochs, remark.startswith(f"training.steps = {training.steps}, ")) == (1, True)


def test_points_and_repeats_can_be_added_and_nothing_else(tmp_path):
    experiment.write(scale_folder.scaling([1, 4], repeats=3), tmp_path)
    joined = experiment.join(scale_folder.scaling([2, 4], repeats=2), tmp_path)
    assert (joined.ranks, joined.repeats, joined.base) == ((1, 2, 4), 3, 1)
    with pytest.raises(Exception, match=r"another scaling experiment: training.lr = 0.1 there, 0.2 now; choose"):
        experiment.join(scale_folder.scaling([1], training={"lr": 0.2}), tmp_path)
    with pytest.raises(Exception, match="mode = 'strong' there, 'weak' now"):
        experiment.join(scale_folder.scaling([1], "weak"), tmp_path)


def test_a_weak_experiment_keeps_the_ranks_for_which_the_configuration_has_the_clients(tmp_path):
    experiment.write(scale_folder.scaling([2], "weak"), tmp_path)
    with pytest.raises(ConfigError, match=r"first number of --ranks = 2 there, 1 now; choose another --out"):
        experiment.join(scale_folder.scaling([1, 2], "weak"), tmp_path)
    joined = experiment.join(scale_folder.scaling([2, 4], "weak"), tmp_path)
    assert [joined.clients(ranks) for ranks in joined.ranks] == [7, 14]


def test_speed_up_efficiency_and_parts_leave_the_first_round_out(tmp_path):
    def seconds(ranks):  # two ranks: one of them trains 3 s, the other 2 s; then 1 s of messages
        if ranks == 1:
            return {"seconds": 6, "compute_seconds": 5, "evaluation_seconds": 0.5, "checkpoint_seconds": 0.25}
        return {"seconds": 4, "compute_seconds": 3, "waiting_seconds": 0.5, "evaluation_seconds": 0.25}

    results = read_results(scale_folder.measured(tmp_path, scale_folder.scaling([1, 2]), seconds))
    one, two = results.points
    assert (one.seconds, two.seconds, results.speed_up(two), results.efficiency(two)) == (6, 4, 1.5, 0.75)
    assert one.parts == dict(zip(PARTS, (4.5, 0.5, 0.75, 0.0, 0.25), strict=True))
    assert two.parts == dict(zip(PARTS, (2.25, 0.25, 1.0, 0.5, 0.0), strict=True))
    assert sum(two.parts.values()) == two.seconds
    assert (two.most("memory_rank_bytes"), two.most("memory_bytes"), two.wire_bytes) == (MB, 2 * MB, 100)


@pytest.mark.parametrize(("mode", "speed_up", "efficiency"), [("weak", 8.0, 4.0), ("packing", 4.0, 4.0)])
def test_what_is_ideal_depends_on_the_mode(mode, speed_up, efficiency, tmp_path):
    """The helper's rounds become shorter with the ranks, which in these modes they do not really."""
    results = read_results(scale_folder.measured(tmp_path, scale_folder.scaling([2, 8], mode)))
    assert (results.speed_up(results.points[1]), results.efficiency(results.points[1])) == (
        speed_up * (2 if mode == "weak" else 1),
        efficiency,
    )


@pytest.mark.parametrize(
    ("mode", "same"), [("strong", [True, False]), ("weak", [True, True]), ("packing", [True, True])]
)
def test_points_with_the_same_clients_and_threads_must_have_the_same_bits(mode, same, tmp_path):
    by_ranks = scale_folder.measured(
        tmp_path / "a", scale_folder.scaling([1, 2], mode), digest=lambda run: str(run.ranks)
    )
    assert [point.same_bits for point in read_results(by_ranks).points] == same
    by_repeat = scale_folder.measured(
        tmp_path / "b", scale_folder.scaling([1, 2], mode), digest=lambda run: str(run.repeat)
    )
    results = read_results(by_repeat)
    assert not any(point.same_bits for point in results.points)
    assert (
        results.problems == ["results differ between ranks or repeats on 1, 2 ranks"]
        and format_table(results)[1][0][-1] == "different"
    )


def test_the_record_of_a_run_on_cpus_does_not_ask_for_gpus(tmp_path, monkeypatch):
    run = runs(scale_folder.scaling([1]))[0]
    quick_run.run(quick_run.settings(training={"rounds": 1}), run.run(tmp_path))
    monkeypatch.setattr(machine, "gpus", None)
    assert records.record(run, tmp_path, 1, {}) == ""
    written = records.read(run.record(tmp_path))
    assert (written["device"], written["gpus"], written["driver"]) == (platform.machine(), "", "")


def test_the_csv_has_a_line_for_each_run_also_for_one_that_failed(tmp_path):
    scaling = scale_folder.scaling([1, 2])
    out = scale_folder.measured(tmp_path, scaling)
    records.record_failure(runs(scaling)[-1], out, "no memory is left")
    write_table(read_results(out))
    with open(out / "scale.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["ranks"], line["repeat"], line["problem"]) for line in lines] == [
        ("1", "1", ""),
        ("1", "2", ""),
        ("2", "1", ""),
        ("2", "2", "no memory is left"),
    ]
    assert [line["speed_up"] for line in lines] == ["1", "1", "2", ""]
    assert {line["cpu"] for line in lines[:3]} == {"Old Faithful"} and {line["commit"] for line in lines[:3]} == {
        "abc+"
    }
    assert read_results(out).problems == ["2 ranks, repeat 2: no memory is left"]


def test_a_run_whose_folder_was_deleted_is_measured_again(tmp_path):
    scaling = scale_folder.scaling([1, 2])
    out, deleted = scale_folder.measured(tmp_path, scaling), runs(scaling)[0]
    shutil.rmtree(deleted.run(out))
    commands = {planned.name: make_task(planned, scaling, out).command for planned in runs(scaling)}
    assert [name for name, command in commands.items() if command] == [deleted.name]
    assert [len(point.runs) for point in read_results(out).points] == [1, 2]


def test_a_measurement_that_was_not_finished_starts_anew_and_is_kept_aside(tmp_path):
    scaling = scale_folder.scaling([1, 2])
    planned = runs(scaling)[0]
    folder = planned.run(tmp_path)
    folder.mkdir(parents=True)
    (folder / "round_00001.h5").touch()
    prepare_cell(make_task(planned, scaling, tmp_path), tmp_path)
    (aside,) = folder.parent.glob("old-repeat1-*")
    assert (aside / "round_00001.h5").exists() and not folder.exists()


@pytest.mark.slow
def test_it_measures_goes_on_after_ctrl_c_and_reports_what_fails(tmp_path):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(quick_run.settings()))
    environment = {**processes.ENVIRONMENT, "COLUMNS": "200"}
    command = [
        *processes.PFLMPI,
        "scale",
        "small.yaml",
        "--ranks",
        "1,2",
        "--repeats",
        "2",
        "--rounds",
        "3",
        "--out",
        "s",
    ]
    started = processes.launch(command, cwd=tmp_path, env=environment)
    processes.errors_until(started, "[1/4] 1 rank, repeat 1: 3 rounds")
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=processes.PATIENCE)
    assert started.returncode == 128 + signal.SIGINT and "the same command goes on from here" in err
    before = (tmp_path / "s" / "ranks-0001" / "repeat1.json").stat().st_mtime_ns

    done = processes.call(command, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "s" / "ranks-0001" / "repeat1.json").stat().st_mtime_ns == before, "measured once"
    with open(tmp_path / "s" / "scale.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["ranks"], line["repeat"], line["rounds"]) for line in lines] == [
        ("1", "1", "2"), ("1", "2", "2"), ("2", "1", "2"), ("2", "2", "2"),
    ]  # fmt: skip
    assert len({line["digest"] for line in lines}) == 1 and {line["same_bits"] for line in lines} == {"1"}
    for line in lines:
        parts = sum(float(line[f"{name}_seconds"]) for name in PARTS)
        assert parts == pytest.approx(float(line["seconds"]), rel=0.5), "a mean, and a median of two"
        assert int(line["memory_rank_bytes"]) > 100 * MB
        assert (float(line["wire_bytes"]) > 0) == (int(line["ranks"]) > 1)
    assert " same" in done.stdout and "medians of 2 rounds, the first left out" in done.stdout


@pytest.mark.slow
def test_a_point_that_cannot_run_is_reported_and_the_others_are_measured(tmp_path):
    partition = {"name": "exdir", "clients": 7, "classes_per_client": 3, "alpha": 0.7, "min_samples": 40}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(quick_run.settings(partition=partition)))
    environment = {**processes.ENVIRONMENT, "COLUMNS": "200"}
    words = ["scale", "small.yaml", "--ranks", "1,2", "--mode", "weak", "--repeats", "1", "--rounds", "2", "--out", "s"]
    done = processes.call([*processes.PFLMPI, *words], cwd=tmp_path, env=environment)
    assert done.returncode == 1 and "2 ranks, repeat 1: " in done.stderr and "min_samples" in done.stderr, done.stderr
    assert done.stdout.startswith("training.steps = ") and "failed" in done.stdout
    with open(tmp_path / "s" / "scale.csv", newline="") as file:
        assert [(line["ranks"], bool(line["seconds"])) for line in csv.DictReader(file)] == [("1", True), ("2", False)]
