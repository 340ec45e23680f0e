"""`pflmpi scale --submit` with programs that stand in for Slurm's, and the steps of an allocation."""

import re

import pytest

import fake_slurm
import scale_folder
from pflmpi.cli import main
from pflmpi.cluster.batch_script import LAUNCH
from pflmpi.errors import ConfigError
from pflmpi.scaling import records
from pflmpi.scaling.experiment import runs
from pflmpi.scaling.slurm import Allocation, allocation
from pflmpi.store import job_file

SUBMIT = ["scale", "small.yaml", "--ranks", "1,2,4", "--rounds", "4", "--repeats", "1", "--out", "s", "--submit"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a configuration, and a Slurm whose queue is empty."""
    sbatch = 'n=$(ls words* 2> /dev/null | wc -l); printf "%s\\n" "$@" > words$n; cat > script$n; echo "4$n"'
    return fake_slurm.enter(tmp_path, monkeypatch, sbatch)


def test_each_point_is_a_job_with_as_many_tasks_as_ranks(folder, capfd):
    assert main([*SUBMIT, "--time", "0:30:00", "--ntasks-per-node=2", "--mpi", "pmix", "--", "--comment=a"]) == 0
    assert re.findall(r"^ranks .*", capfd.readouterr().out, re.MULTILINE) == [
        f"ranks {ranks}: job 4{n}, log s/ranks-000{ranks}.4{n}.log" for n, ranks in enumerate((1, 2, 4))
    ]
    words = (folder / "words2").read_text().splitlines()
    assert {"--ntasks=4", "--ntasks-per-node=2", "--time=0:30:00", "--comment=a"} <= set(words)
    assert (folder / "s" / "ranks-0004" / "jobs.txt").read_text().startswith("42 - ")
    command = (folder / "script2").read_text().splitlines()[-1]
    assert command.endswith(
        "-m pflmpi scale small.yaml --mpi pmix --ranks 1,2,4 --mode strong --out s --repeats 1 --rounds 4 --only 4"
    )


def test_the_folder_of_a_log_is_made(folder):
    assert main([*SUBMIT, "--output=logs/%x/%j.out"]) == 0
    assert [path.name for path in sorted((folder / "logs").iterdir())] == ["s-1", "s-2", "s-4"]


def test_points_that_are_measured_or_have_a_job_are_not_submitted(folder, capfd):
    scaling = scale_folder.scaling([1, 2, 4], repeats=1)
    scale_folder.measured(folder / "s", scaling)
    for run in runs(scaling)[1:]:
        records.record_failure(run, folder / "s", "no memory is left")
    job_file.append(folder / "s" / "ranks-0002", "7")
    fake_slurm.queue(folder / "bin", fake_slurm.line("7", State="PENDING"))
    assert main(SUBMIT) == 0
    assert re.findall(r"^ranks .*", capfd.readouterr().out, re.MULTILINE) == [
        "ranks 1: measured",
        "ranks 2: job 7 is PENDING already",
        "ranks 4: job 40, log s/ranks-0004.40.log",
    ]


def test_where_all_is_measured_no_job_is_waited_for(folder, capfd):
    scale_folder.measured(folder / "s", scale_folder.scaling([1, 2, 4], repeats=1))
    assert main(SUBMIT) == 0
    assert capfd.readouterr().out.splitlines()[2:] == ["ranks 4: measured", "all is measured: pflmpi report s"]


def test_a_dry_run_changes_nothing(folder, capfd):
    assert main([*SUBMIT, "--dry-run"]) == 0
    assert capfd.readouterr().out.count("#!/bin/bash") == 3
    assert sorted(path.name for path in folder.iterdir()) == ["bin", "small.yaml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ntasks=4"], "--ntasks=4 with --submit: each point is a job with as many tasks as ranks; leave it out"),
        (["--time=auto"], "--time=auto is for `pflmpi submit`; give what each point needs"),
        (["--exclusive"], "sbatch's own go after --, as they are: pflmpi scale ... -- --exclusive"),
        (["--setup", "no.sh"], "--setup no.sh: there is no such file"),
        (["-s", "runtime.transport=mpi"], "with --mpi none every rank would be alone"),
    ],
)
def test_what_no_job_can_do_is_refused(words, said, folder, capfd):
    assert main([*SUBMIT, *words]) == 2
    assert said in capfd.readouterr().err and not (folder / "s").exists()


def test_options_of_sbatch_need_submit(folder, capfd):
    for words, name in ((["--time=30"], "--time"), (["--", "--exclusive"], "--"), (["--dry-run"], "--dry-run")):
        assert main([*SUBMIT[:-1], *words]) == 2
        assert f"{name} is for --submit, which is not given; leave it out" in capfd.readouterr().err


def test_a_step_takes_as_few_nodes_as_it_can_and_shares_the_cores_where_asked():
    job = allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "8"}, "pmix")
    assert job == Allocation(tasks=8, nodes=2, mpi="pmix") and allocation({}, "none") is None
    start = ["bash", str(LAUNCH / "srun"), "--mpi=pmix"]
    assert job.launcher(0, 2) == [*start, "--ntasks=2", "--nodes=1", "--ntasks-per-node=2"]
    assert job.launcher(0, 6) == [*start, "--ntasks=6", "--nodes=2", "--ntasks-per-node=4"]
    assert job.launcher(8, 2) == [*start, "--ntasks=2", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=4"]
    assert job.launcher(8, 6) == [*start, "--ntasks=6", "--nodes=2", "--ntasks-per-node=3", "--cpus-per-task=1"]
    for cores, ranks in ((0, 1), (0, 8), (8, 2), (8, 8)):
        job.check(cores, ranks)
    with pytest.raises(ConfigError, match="--ranks 9, and this job has 8 tasks"):
        job.check(0, 9)
    with pytest.raises(ConfigError, match=r"--ranks 1 in packing mode: 1 on a node, with 8 threads .* has 4 tasks"):
        job.check(8, 1)


def test_in_packing_mode_all_ranks_are_on_one_node(folder, capfd):
    assert main([*SUBMIT, "--mode", "packing"]) == 0
    assert {"--ntasks=4", "--ntasks-per-node=4"} <= set((folder / "words0").read_text().splitlines())
    assert main([*SUBMIT, "--mode", "packing", "--out", "other", "--ntasks-per-node=2"]) == 2
    assert "put as many on each as the largest number of ranks (--ntasks-per-node=4)" in capfd.readouterr().err
