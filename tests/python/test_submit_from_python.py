"""`pflmpi.submit`: jobs of a stand-in for Slurm, and processes that stand in for jobs."""

import time
from pathlib import Path

import pytest
import yaml

import fake_slurm
import pflmpi
import quick_run
import table_file
from pflmpi.commands.submit import copy_path
from pflmpi.config import yaml_file
from pflmpi.config.keywords import Config
from pflmpi.errors import ConfigError, RunError

CONFIG = Config(**quick_run.QUICK)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with small.yaml and a Slurm whose queue is empty."""
    return fake_slurm.enter(tmp_path, monkeypatch, 'printf "%s\\n" "$@" > words; cat > script; echo 42')


def test_a_local_job_gives_the_bits_of_a_run(tmp_path):
    job = pflmpi.submit(CONFIG, out=tmp_path / "run", cluster="local", ntasks=2)
    assert job.result().round().digest() == quick_run.run(quick_run.settings(), tmp_path / "here")
    assert job.state == "COMPLETED" and job.done() and f"run: {tmp_path / 'run'}" in job.stdout() == job.stderr()
    again = pflmpi.submit(CONFIG, out=tmp_path / "run", cluster="local")
    assert again.id == "" and again.state == "COMPLETED" and again.result().rounds == [1, 2, 3]


def test_a_local_job_that_fails_says_why(tmp_path):
    job = pflmpi.submit(
        CONFIG.replace(data={"name": "mnist", "root": str(tmp_path)}), out=tmp_path / "run", cluster="local", ntasks=1
    )
    with pytest.raises(RunError, match=r"ended as FAILED before its run was complete: dataset 'mnist' was not found"):
        job.result()


def test_local_jobs_of_a_table_run_one_after_another_and_can_be_cancelled(folder):
    table = table_file.write(folder, seeds=[0], base={**table_file.TABLE["base"], "training": {"rounds": 100_000}})
    first, *_, last = jobs = pflmpi.submit(table, cluster="local", ntasks=1)
    assert len(jobs) == 4 and first.folder == Path("sweeps/small/FedAvg/few/seed0")
    while not (first.folder / "metrics.csv").exists():
        assert time.sleep(0.1) is None and first.state in ("PENDING", "RUNNING"), first.stdout()
    assert first.state == "RUNNING"
    assert [job.state for job in jobs[1:]] == ["PENDING"] * 3
    for job in reversed(jobs):
        job.cancel()
        job.wait()
    assert [job.state for job in jobs] == ["CANCELLED"] * 4 and not last.folder.exists()
    with pytest.raises(RunError, match=r"ended as CANCELLED before its run was complete.* and it continues"):
        first.result()


def test_a_job_of_slurm_is_asked_for_and_cancelled(folder, monkeypatch):
    (folder / "site.yaml").write_text("gpu: {partition: gpu, srun: --cpu-bind=cores}")
    monkeypatch.setenv("PFLMPI_SITE", str(folder / "site.yaml"))
    options = {"nodes": 2, "ntasks": 8, "time": "30", "mem": "auto", "site": "gpu", "requeue": True}
    job = pflmpi.submit(CONFIG, out="runs/a", sbatch=["--exclusive"], **options)
    words = (folder / "words").read_text().split()
    assert {"--nodes=2", "--ntasks=8", "--time=30", "--partition=gpu", "--requeue", "--exclusive"} <= set(words)
    assert " --cpu-bind=cores " in (folder / "script").read_text()
    (copy,) = folder.glob("runs/a.*.yml")
    assert f" run runs/{copy.name} --out runs/a --continue" in (folder / "script").read_text()
    assert "--job-name=a" in words and yaml.safe_load(copy.read_text()) == CONFIG.resolved()
    assert (job.id, job.folder, job.log) == ("42", Path("runs/a"), Path("runs/a.42.log"))
    fake_slurm.queue(folder / "bin", fake_slurm.line("42", State="PENDING"))
    assert job.state == "PENDING" and not job.done()
    fake_slurm.queue(folder / "bin", fake_slurm.line("42", State="PENDING", Reason="DependencyNeverSatisfied"))
    with pytest.raises(RunError, match=r"job 42 will never start: .*\(scancel 42\)"):
        job.result()
    assert job.done()
    fake_slurm.program("scancel", 'echo "$@" > cancelled')
    job.cancel()
    assert Path("cancelled").read_text() == "42\n"
    fake_slurm.queue(folder / "bin")
    assert job.state == "UNKNOWN" and job.done(), "Slurm has forgotten it"
    Path("runs/a.42.log").write_text("pflmpi: no data here\n")
    with pytest.raises(RunError, match="job 42 ended as UNKNOWN before its run was complete: no data here; its log is"):
        job.result()


def test_a_job_that_failed_has_not_the_result_of_a_shorter_run_of_before(folder):
    longer = quick_run.settings(training={"rounds": 4})
    base = {key: value for key, value in longer.items() if key != "seed"}
    table = table_file.write(folder, base=base, rows={"A": {}}, columns={"x": {}}, seeds=[3])
    for run in ("runs/a", "cells/A/x/seed3"):
        quick_run.run(quick_run.settings(), folder / run)
    jobs = [pflmpi.submit(Config(**longer), out="runs/a"), *pflmpi.submit(table, out="cells")]
    fake_slurm.queue(folder / "bin", *(fake_slurm.line(id, State="FAILED") for id in ("42", "42_0")))
    for job in jobs:
        with pytest.raises(RunError, match=f"job {job.id} ended as FAILED before its run was complete"):
            job.result()


def test_the_cells_of_a_table_are_a_list_of_jobs(folder):
    jobs = pflmpi.submit(table_file.write(folder), out="cells", only=["Local/*"], seeds=1, jobs=1)
    assert [job.id for job in jobs] == ["42_0", "42_1"] and jobs[1].log == Path("cells.42_1.log")
    assert "--array=0-1%1" in (folder / "words").read_text()
    fake_slurm.queue(folder / "bin", fake_slurm.line("42_0", JobID=43), fake_slurm.line("42_[1%1]", State="PENDING"))
    assert [job.state for job in jobs] == ["RUNNING", "PENDING"]
    jobs = pflmpi.submit("small.yaml", out="packed", seeds=1, pack=3)
    assert [job.id for job in jobs] == ["42_0", "42_0", "42_0", "42_3"] and jobs[2].log == Path("packed.42_0.log")
    assert [job.folder for job in jobs[2:]] == [Path("packed/Local/few/seed0"), Path("packed/Local/many_M/seed0")]
    assert "cells=([0]=0-2 [3]=3)" in (folder / "script").read_text()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"task": 3}, "unknown option 'task'; did you mean 'ntasks'\\? known: account, "),
        ({"mpi": "openmpi"}, "argument --mpi: invalid choice: 'openmpi'"),
        ({"restarts": "often"}, "argument --restarts: invalid int value: 'often'"),
        ({"cluster": "pbs"}, "cluster = 'pbs': must be 'slurm' or 'local'"),
        ({"site": "gpu"}, "unknown site 'gpu'; did you mean 'gpus'"),
        ({"seeds": 2}, "--seeds is for --array TABLE"),
    ],
)
def test_wrong_options_are_refused_by_name(options, message, folder, monkeypatch):
    (folder / "site.yaml").write_text("gpus: {partition: gpu}")
    monkeypatch.setenv("PFLMPI_SITE", str(folder / "site.yaml"))
    with pytest.raises(ConfigError, match=message):
        pflmpi.submit("small.yaml", **options)
    assert not (folder / "script").exists()


def test_a_configuration_that_cannot_be_written_is_refused(tmp_path):
    copy_path(tmp_path / "run", yaml_file.dump(CONFIG.resolved())).mkdir()
    with pytest.raises(ConfigError, match=r"cannot write .*/run\..*\.yml: Is a directory; .* or choose another --out"):
        pflmpi.submit(CONFIG, out=tmp_path / "run", cluster="local")


def test_jobs_run_the_configuration_as_it_was_when_they_were_submitted(folder):
    jobs = []
    for rounds in (1, 2):
        Path("small.yaml").write_text(yaml.safe_dump(quick_run.settings(training={"rounds": rounds})))
        jobs.append(pflmpi.submit("small.yaml", out=f"runs/{rounds}", cluster="local", ntasks=1))
    assert [job.result().config["training"]["rounds"] for job in jobs] == [1, 2]


def test_cells_of_a_table_that_wait_are_those_that_were_submitted(folder):
    table = table_file.write(folder, seeds=[0], columns={"few": {}})
    jobs = pflmpi.submit(table, cluster="local", ntasks=1)
    table_file.write(folder, seeds=[5, 6], rows={"New": {"algorithm": {"name": "fedper"}}, **table_file.TABLE["rows"]})
    assert [job.result().config["seed"] for job in jobs] == [0, 0]
    assert sorted(path.name for path in Path("sweeps/small").iterdir() if path.is_dir()) == ["FedAvg", "Local"]
