"""`submit --time=auto`, `--ntasks=auto` and `--mem=auto`, with programs that stand in for Slurm's."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import fake_slurm
import pflmpi
import quick_run
import table_file
from pflmpi.cli import main
from pflmpi.cluster import run_status
from pflmpi.errors import RunError
from pflmpi.forecast import job
from pflmpi.store import job_file
from pflmpi.store.job_file import Submission

LONG = "training.rounds=1003"  # 1000 more than a quick run has


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder where `submit` is started, with a configuration and a Slurm whose queue is empty."""
    fake_slurm.enter(tmp_path, monkeypatch, 'printf "%s\\n" "$@" > words; cat > script; echo 42')
    fake_slurm.program("sinfo", 'echo "main* 2-00:00:00 8"; echo "gpu infinite 64+"; echo "short 1:00:00 8"')
    return tmp_path


@pytest.fixture
def ran(monkeypatch):
    """Make a run of three rounds that a job has computed, with so many seconds for each."""
    took: dict[Path, float] = {}

    def ran(run, seconds, partition="", raw=None):
        quick_run.run(raw or quick_run.settings(), run)
        if partition is not None:
            job_file.append(run, "7", record=Submission("log", partition=partition))
        job_file.append(run, "7", "0")
        took[run.resolve()] = seconds

    def read_run_status(run):
        state = run_status.read_run_status(run)
        return state and replace(state, per_round=took.get(run.resolve(), 6.0))

    monkeypatch.setattr(job, "read_run_status", read_run_status)
    return ran


def asked(folder, option):
    """What sbatch was asked for."""
    (word,) = [word for word in (folder / "words").read_text().splitlines() if word.startswith(f"--{option}=")]
    return word.partition("=")[2]


# --- time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", ["", None])
def test_the_time_of_a_job_is_one_and_a_half_of_what_its_rounds_took_and_ten_minutes(partition, ran, folder, capfd):
    ran(folder / "runs/small", 6.0, partition)
    assert main(["submit", "small.yaml", "--ntasks=1", "--cpus-per-task=1", "--time=auto", "-s", LONG]) == 0
    assert asked(folder, "time") == str(1000 * 6 * 3 // 2 // 60 + 10)
    assert "pflmpi: auto is --time=160\n" in capfd.readouterr().err


def test_the_time_is_that_of_the_slowest_run_of_the_configuration_with_any_seed(ran, folder):
    ran(folder / "runs/a", 6.0, raw=quick_run.settings(seed=5))
    ran(folder / "runs/b", 12.0)
    ran(folder / "runs/other", 100.0, raw=quick_run.settings(algorithm={"name": "local"}))
    assert main(["submit", "small.yaml", "--ntasks=1", "--cpus-per-task=1", "--time=auto", "-s", LONG]) == 0
    assert asked(folder, "time") == str(-(-1003 * 12 * 3 // 2 // 60) + 10)


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (["-s", "training.lr=0.5"], {"partition": ""}),
        (["--partition=gpu"], {"partition": ""}),
        (["--partition=gpu"], {"partition": "main"}),
        (["--", "-p", "gpu"], {"partition": "main"}),
        (["--cpus-per-task=2"], {"partition": ""}),  # 2 ranks
        ([], None),  # not by a job
    ],
)
def test_a_run_that_says_nothing_of_the_job_is_not_looked_at(words, made, ran, folder, capfd):
    if made:
        ran(folder / "runs/before", 6.0, **made)
    else:
        quick_run.run(quick_run.settings(), folder / "runs/before")
    cores = [] if "--cpus-per-task=2" in words else ["--cpus-per-task=1"]
    assert main(["submit", "small.yaml", "--time=auto", *cores, *words]) == 2
    error = capfd.readouterr().err
    assert "--time=auto: no run of this configuration, in runs/small or beside it, has been computed by " in error
    assert "give a --time, or --trial" in error and not (folder / "script").exists()


def test_a_time_that_the_partition_does_not_allow_is_refused_unless_the_job_requeues_itself(ran, folder, capfd):
    ran(folder / "runs/small", 6.0, "short")
    command = ["submit", "small.yaml", "--ntasks=1", "--partition=short", "--time=auto", "-s", LONG]
    assert main(command) == 2
    error = capfd.readouterr().err
    assert "--time=auto: the job needs 2:40:00, and short allows 1:00:00; take more ranks or another" in error
    assert "or add --requeue" in error and not (folder / "script").exists()
    assert main([*command, "--requeue"]) == 0
    assert asked(folder, "time") == "60"


def test_an_array_has_the_time_of_its_longest_cell(ran, folder):
    table = table_file.write(folder, rows={"Local": {"algorithm": {"name": "local"}}}, seeds=[0, 1])
    cells = folder / "sweeps/small/Local"
    base = table_file.TABLE["base"]
    job_file.append(folder_of(folder / "sweeps/small"), "7", record=Submission("log", partition=""))
    for column, seconds in (("few", 6.0), ("many_M", 12.0)):
        changes = table_file.TABLE["columns"]["few" if column == "few" else "many (M)"]
        raw = {**base, "algorithm": {"name": "local"}, **changes, "seed": 0}
        raw["training"] = {**base["training"], **changes.get("training", {})}
        ran(cells / column / "seed0", seconds, None, raw)
    command = ["submit", "--array", str(table), "--cpus-per-task=1", "--time=auto"]
    assert main([*command, "-s", "training.rounds=1002"]) == 0
    assert asked(folder, "time") == str(-(-1002 * 12 * 3 // 2 // 60) + 10), "of seed 1, which has no round yet"
    assert main([*command, "-s", "training.rounds=1002", "--pack=2"]) == 0
    assert asked(folder, "time") == str(-(-2002 * 12 * 3 // 2 // 60) + 20), "many/seed0, then many/seed1"
    assert main([*command, "--partition=short"]) == 2


def folder_of(path):
    path.mkdir(parents=True)
    return path


# --- a trial ------------------------------------------------------------------------------------------------------


def test_a_trial_is_submitted_and_waited_for_and_its_rounds_are_kept(ran, folder, capfd):
    """It is a job like the other, of the same folder, that ends after some minutes and does not requeue itself."""
    ran(folder / "made", 6.0)
    fake_slurm.program(
        "sbatch",
        '[ -e words ] && mv words first; printf "%s\\n" "$@" > words; cat > script; '
        "[ -e first ] || /bin/cp -r made/* runs/small/; [ -e first ] && echo 43 || echo 42",
    )
    command = ["submit", "small.yaml", "--ntasks=1", "--cpus-per-task=1", "--time=auto", "--trial", "-s", LONG]
    assert main([*command, "--requeue", "--", "--exclusive"]) == 0
    first = (folder / "first").read_text().splitlines()
    assert "--time=10" in first and "--exclusive" in first and "--requeue" not in first
    assert asked(folder, "time") == "160" and "--requeue" in (folder / "words").read_text()
    shown = capfd.readouterr().out.splitlines()
    assert shown[0] == "job 42, a trial of at most 10 minutes, is waited for; log: runs/small.42.log"
    assert shown[1] == "job 43: runs/small"
    (folder / "first").unlink()
    assert main([*command, "--out", "runs/second"]) == 0
    assert "a trial" not in capfd.readouterr().out, "the first one says it"


def test_a_trial_that_completes_the_run_is_all(ran, folder, capfd):
    ran(folder / "made", 6.0)
    fake_slurm.program("sbatch", "touch script; /bin/cp -r made/* runs/small/; echo 42")
    assert main(["submit", "small.yaml", "--ntasks=1", "--time=auto", "--trial"]) == 0
    assert capfd.readouterr().out.splitlines()[1:] == ["all 3 rounds of runs/small are done; nothing to submit"]


def test_a_trial_without_a_round_is_no_measure(folder, capfd):
    queued = fake_slurm.line("42", State="FAILED", exit_code=3 << 8)
    (folder / "queue").write_text(queued)
    fake_slurm.program("squeue", "[ ! -e script ] || /bin/cat queue")
    with pytest.raises(RunError, match=r"job 42, the trial, has ended \(FAILED\) before a round was complete; its log"):
        pflmpi.submit("small.yaml", ntasks=1, time="auto", trial=5)
    assert asked(folder, "time") == "5"


# --- ranks and memory ---------------------------------------------------------------------------------------------


def ten_clients(device):
    """A configuration with ten clients, all of which train in each round."""
    runtime = {"device": device, "executor": "loop"}
    training = {"participation": 1.0}
    return quick_run.settings(partition={"name": "iid", "clients": 10}, training=training, runtime=runtime)


def forecast_of(raw, words, folder):
    (folder / "small.yaml").write_text(yaml.safe_dump(raw))
    assert main(["submit", "small.yaml", "--ntasks=auto", *words]) == 0
    return int(asked(folder, "ntasks"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--partition=gpu"], 10),  # a rank for each client, of 64 cores
        ([], 8),  # the cores of a node
        (["--cpus-per-task=2"], 4),
        (["--nodes=2", "--cpus-per-task=2"], 8),
    ],
)
def test_there_are_as_many_ranks_as_have_clients_to_train(words, expected, folder, capfd):
    assert forecast_of(ten_clients("cpu"), words, folder) == expected
    assert f"auto is --ntasks={expected}\n" in capfd.readouterr().err


def test_ranks_of_a_sample_of_the_clients_are_as_many_as_train_at_once(folder):
    raw = ten_clients("cpu")
    raw["training"]["participation"] = 0.4
    assert forecast_of(raw, ["--partition=gpu"], folder) in (4, 5)


def test_each_gpu_has_a_rank_and_one_serves(folder):
    assert forecast_of(ten_clients("auto"), ["--nodes=2", "--gpus-per-node=a100:2"], folder) == 5
    assert forecast_of(ten_clients("auto"), ["--gpus-per-node=64"], folder) == 11


def test_cores_that_slurm_does_not_say_are_asked_for(folder, capfd):
    fake_slurm.program("sinfo", "exit 1")
    assert main(["submit", "small.yaml", "--ntasks=auto"]) == 2
    assert "--ntasks=auto: Slurm does not say how many cores a node of the partition has" in capfd.readouterr().err


def test_an_array_has_the_memory_of_its_largest_cell(folder):
    columns = {"few": {}, "large": {"model": {"name": "mlp", "hidden": 20_000}}}
    table = table_file.write(folder, columns=columns, seeds=[0])
    needed = {}
    for only in ("*/few", "*/large", "*"):
        assert main(["submit", "--array", str(table), "--only", only, "--ntasks=2", "--mem=auto"]) == 0
        needed[only] = int(asked(folder, "mem").removesuffix("M"))
    assert needed["*/few"] < needed["*/large"] and abs(needed["*"] - needed["*/large"]) < 0.2 * needed["*"]
    assert job_file.read_submissions(Path("sweeps/small"))["42"].memory <= needed["*"] << 20
