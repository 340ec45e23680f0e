"""The launch wrappers, around programs that stand in for the launchers and print how they were started."""

import contextlib
import os
import pwd
import shutil
import signal
from pathlib import Path

import pytest

import processes
from project import ROOT

WRAPPERS = ("mpirun", "torchrun", "srun")
FAKE_RUN = '[ "$1" != --version ] || { echo "mpirun (Open MPI) 5.0.11"; exit; }\n'


class Bench:
    """A folder with programs that stand in for launchers and print how they were started."""

    def __init__(self, folder: Path, wrapper: str, cores: int = 4) -> None:
        self.folder, self.wrapper = folder, wrapper
        self.environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "VIRTUAL_ENV": "/env"}
        (folder / "bin").mkdir()
        for name in WRAPPERS:
            self.program(name, f'{FAKE_RUN}echo "$@"; env; echo 0 > "$PFLMPI_EXIT_FILE"')
        self.program("nproc", f"echo {cores}")
        self.program("scontrol", "echo node7")

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def call(self, *words: str, **variables: str) -> tuple[int, str, str]:
        """The exit code, the words that the launcher got, and what else was printed, such as its variables."""
        command = [str(ROOT / "launch" / self.wrapper), *words]
        done = processes.call(command, env={**self.environment, **variables}, cwd=self.folder, timeout=30)
        first, _, rest = done.stdout.partition("\n")
        return done.returncode, first, rest + done.stderr

    def left(self) -> list[str]:
        """What lies in the folder."""
        return [path.name for path in self.folder.iterdir() if path.name != "bin"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_shows_its_usage_and_refuses_what_starts_nothing(wrapper, tmp_path):
    bench = Bench(tmp_path, wrapper)
    code, first, rest = bench.call("--help")
    assert code == 0 and first.startswith(wrapper) and f"launch/{wrapper} " in rest and "Exit code" in rest
    code, first, rest = bench.call()
    assert (code, first) == (2, "") and f"launch/{wrapper} " in rest
    code, _, rest = bench.call("-n", "2", "run", "a.yaml")
    assert code == 2 and "'-n 2 run a.yaml' starts neither pflmpi nor a script of Python" in rest
    assert bench.call("python", "script.py", "x")[0] == 0


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_says_what_it_needs_where_its_launcher_is_missing(wrapper, tmp_path):
    for name in ("bash", "env", "basename", "dirname", "readlink", "nproc"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    command = [str(ROOT / "launch" / wrapper), "pflmpi", "run", "a.yaml"]
    done = processes.call(command, env={"PATH": str(tmp_path), "VIRTUAL_ENV": "/env"}, cwd=tmp_path)
    assert done.returncode == 2 and f"there is no {wrapper} here; " in done.stderr


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_starts_nothing_in_a_folder_without_space(wrapper, tmp_path):
    bench, small = Bench(tmp_path, wrapper), tmp_path / "small"
    small.mkdir()
    mounted = shutil.which("mount") and processes.call(["mount", "-t", "tmpfs", "-o", "size=8k", "none", str(small)])
    if not mounted or mounted.returncode:
        pytest.skip("needs root to mount a small file system")
    try:
        (small / "full").write_bytes(bytes(8192))
        command = [str(ROOT / "launch" / wrapper), "-n", "2", "pflmpi", "run", "a.yaml"]
        done = processes.call(command, env=bench.environment, cwd=small)
        assert (done.returncode, done.stdout, os.listdir(small)) == (2, "", ["full"])
        assert f"cannot write in {small}; make it writable and free space there, or start in another" in done.stderr
    finally:
        processes.call(["umount", str(small)])


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_on_PATH_does_not_start_itself(wrapper, tmp_path):
    bench = Bench(tmp_path, wrapper)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / wrapper).symlink_to(ROOT / "launch" / wrapper)
    search_path = bench.environment["PATH"]
    for first in (ROOT / "launch", tmp_path / "links"):
        code, words, rest = bench.call("pflmpi", "run", "a.yaml", PATH=f"{first}:{search_path}")
        assert code == 0 and words.endswith("pflmpi run a.yaml") and f"\nPATH={search_path}\n" in rest


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_hands_its_words_on_and_counts_threads(wrapper, tmp_path):
    bench = Bench(tmp_path, wrapper)
    words = ("-x", "a b", "pflmpi", "run", "a.yaml")
    code, first, rest = bench.call(*words)
    assert code == 0 and first.endswith("-x a b pflmpi run a.yaml")
    assert "\nOMP_NUM_THREADS=1\n" in rest
    rest = bench.call(*words, SLURM_EXPORT_ENV="NONE")[2]
    assert "SLURM_EXPORT_ENV" not in rest, "srun would start ranks without what is set here"
    assert "\nOMP_NUM_THREADS=3\n" in bench.call(*words, OMP_NUM_THREADS="3")[2]
    assert f"\nHOME={pwd.getpwuid(os.getuid()).pw_dir}\n" in rest, "without one mpirun ends with an internal failure"
    assert bench.left() == []


@pytest.mark.parametrize(
    "words, variables, binding, crowded",
    [
        (["-n", "4"], {}, True, False),
        (["-n", "5"], {}, True, True),
        (["--np", "5", "--host", "a,b"], {}, True, False),
        (["-n", "8"], {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, False, False),
        (["-n", "10"], {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, True, False),
        ([], {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "5"}, True, False),
        (["-n", "8"], {"PBS_NODEFILE": "bin/nodes"}, False, False),
        ([], {"PBS_NODEFILE": "bin/nodes"}, False, False),
        (["-n", "9"], {"LSB_MCPU_HOSTS": "a 4 b 4", "LSB_DJOB_NUMPROC": "8"}, True, False),
        ([], {"LSB_MCPU_HOSTS": "a 4 b 4", "LSB_DJOB_NUMPROC": "8"}, False, False),
        ([], {"PE_HOSTFILE": "/spool/hosts", "NHOSTS": "1", "NSLOTS": "5"}, True, False),
    ],
)
def test_mpirun_binds_in_an_allocation_and_crowds_only_one_machine(words, variables, binding, crowded, tmp_path):
    bench = Bench(tmp_path, "mpirun")
    (tmp_path / "bin" / "nodes").write_text("a\n" * 4 + "b\n" * 4)
    code, _, rest = bench.call(*words, "pflmpi", "run", "a.yaml", **variables)
    assert code == 0
    assert ("PRTE_MCA_hwloc_default_binding_policy=none" in rest) == binding
    assert ("PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe" in rest) == crowded
    assert ("OMPI_MCA_btl=tcp,sm,self" in rest) == crowded
    assert "OMPI_MCA_mpi_yield_when_idle=1" in rest


@pytest.mark.parametrize(
    "program",
    [
        ("python", "own.py", "-n", "500", "--host", "localhost"),
        ("/opt/bin/python3.11", "own.py", "-n", "auto"),
        ("./own.py", "-c", "x"),
        ("apptainer", "exec", "-H", "/home", "-c", "pflmpi.sif", "pflmpi", "run", "a.yaml"),
        ("nice", "-n", "19", "pflmpi", "run", "a.yaml"),
    ],
)
def test_mpirun_reads_its_own_words_alone_and_not_those_of_the_program(program, tmp_path):
    bench = Bench(tmp_path, "mpirun")
    code, first, rest = bench.call("-n", "5", *program)
    assert code == 0 and first.endswith(f"-n 5 {' '.join(program)}"), rest
    assert "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe" in rest, "for 5 ranks on 4 cores of one machine"
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    assert "hwloc_default_binding_policy" not in bench.call("-n", "8", *program, **job)[2], "ranks are bound in a job"


@pytest.mark.parametrize(("home", "other"), [(True, False), (False, False), (False, True)])
def test_mpirun_of_a_module_wins_over_the_one_of_venv(home, other, tmp_path):
    """.venv, which is used where no environment is active, may bring an mpirun that knows nothing of the cluster."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    for folder, name in ((".venv", "own"), ("module", "module")):
        (tmp_path / folder / "bin").mkdir(parents=True)
        program = tmp_path / folder / "bin" / "mpirun"
        does = f'[ "$1" = --version ] || {{ echo {name} mpirun "$@"; env; echo 0 > "$PFLMPI_EXIT_FILE"; }}'
        program.write_text(f"#!/bin/bash\n{does}\n")
        program.chmod(0o755)
    (tmp_path / ".venv" / "bin" / "activate").write_text(f"PATH={tmp_path}/.venv/bin:$PATH")
    (tmp_path / "module" / "lib").mkdir()
    (tmp_path / "module" / "lib" / "libmpi.so.40").touch()
    if other:  # not a module's folder: /usr/bin, say
        (tmp_path / "module" / "bin" / "python3").touch()
    where = {"MPI_HOME": f"{tmp_path}/module"} if home else {}
    path = "/usr/bin:/bin" if home else f"{tmp_path}/module/bin:/usr/bin:/bin"
    command = [str(tmp_path / "launch" / "mpirun"), "-n", "2", "pflmpi", "run", "a.yaml"]
    done = processes.call(command, env={"PATH": path, **where}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    used, unused = (".venv", "module") if other else ("module", ".venv")
    assert done.stdout.startswith(f"{'own' if other else 'module'} mpirun -n 2 pflmpi run a.yaml\n")
    assert f"launch/mpirun: uses {tmp_path}/{used}/bin/mpirun, not {tmp_path}/{unused}/bin/mpirun" in done.stderr
    assert (f"MPI4PY_LIBMPI={tmp_path}/module/lib\n" in done.stdout) != other


@pytest.mark.parametrize(
    "script, submit, next_job",
    [
        ("train.pbs", "qsub", "submits -v CONFIG=a.yaml,OUT=runs/a,MINUTES=235,CONTINUES=yes slurm/train.pbs"),
        ("train.lsf", "bsub", "submits #!/bin/bash with a.yaml runs/a 235 CONTINUES=yes"),
    ],
)
def test_the_script_of_another_batch_system_warns_before_the_end_and_continues_in_another_job(
    script, submit, next_job, tmp_path
):
    bench = other_batch_system(tmp_path)
    done = processes.call(["bash", str(ROOT / "slurm" / script)], env=bench.environment)
    run = "pflmpi run a.yaml --out runs/a --continue"
    assert (done.returncode, done.stdout.splitlines()) == (
        75,
        [
            f"--foreground --preserve-status --signal=USR1 235m launch/mpirun --restarts 3 {run}",
            f"-x OMP_NUM_THREADS -x PFLMPI_EXIT_FILE -x PFLMPI_RESTARTED {run}",
            next_job,
        ],
    )
    refused = processes.call(["bash", str(ROOT / "slurm" / script)], env={**bench.environment, "OUT": ""})
    assert refused.returncode == 2 and f"{submit} " in refused.stderr


@pytest.mark.parametrize("script", ["train.pbs", "train.lsf"])
def test_the_script_of_another_batch_system_ends_after_five_jobs_in_a_row_without_a_checkpoint(script, tmp_path):
    bench = other_batch_system(tmp_path)
    run = tmp_path / "home" / "a"
    run.mkdir(parents=True)
    bench.program("mpirun", f'{FAKE_RUN}[ -z "$ROUND" ] || touch {run}/"$ROUND"; exit 75')
    bench.environment |= {"OUT": "~/a" if script == "train.pbs" else str(run), "HOME": str(tmp_path / "home")}

    handed_over = {}

    def job(round="", submission=False):
        environment = {**bench.environment, "ROUND": round, **({} if submission else handed_over)}
        done = processes.call(["bash", str(ROOT / "slurm" / script)], env=environment)
        assert done.returncode == 75
        handed_over.update({"CONTINUES": "yes"} if "CONTINUES=yes" in done.stdout else {})
        return "submits " in done.stdout, "five starts in a row were stopped before a round" in done.stderr

    assert [job() for _ in range(4)] == [(True, False)] * 4
    assert job("round_00003.h5") == (True, False)
    assert [job() for _ in range(4)] == [(True, False)] * 4
    assert job(submission=True) == (True, False), "the first of five: the job before was deleted"
    assert [job() for _ in range(4)] == [(True, False)] * 3 + [(False, True)]


def test_starts_without_a_checkpoint_are_counted_for_each_run_however_long_its_path(tmp_path):
    runs = ["a/b", "a-b", "/".join("c" * 100 for _ in range(5))]
    jobs = [[start_again(tmp_path, run) for run in runs] for _ in range(5)]
    assert [[printed for printed, _ in job] for job in jobs] == [["again\n"] * 3] * 4 + [[""] * 3]
    assert all("five starts in a row were stopped before a round" in errors for _, errors in jobs[4])
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_cannot_be_counted_is_the_last(tmp_path):
    (tmp_path / "gone").mkdir()
    printed, errors = start_again(tmp_path / "gone", "run", "rmdir ../gone; ")
    assert printed == "" and "not started again, for starts without a new round are counted in" in errors


def start_again(folder, run, before=""):
    """What a job prints that was stopped before a round of the run, and its errors; "again" where it is requeued."""
    script = f"{before}. {ROOT}/launch/settings; requeue_after 75 {run} '' echo again"
    done = processes.call(["bash", "-c", script], env={**os.environ, "CONTINUES": "yes"}, cwd=folder)
    return done.stdout, done.stderr


def other_batch_system(folder):
    """A bench with programs that stand in for those of PBS and LSF, in the folder from which jobs are submitted."""
    bench = Bench(folder, "mpirun")
    for name in ("launch", "slurm"):
        (folder / name).symlink_to(ROOT / name)
    bench.program("timeout", 'echo "$@"; while [[ "$1" = -* ]]; do shift; done; shift; "$@"')
    bench.program("mpirun", FAKE_RUN + 'echo "$@"; exit 75')
    bench.program("qsub", 'echo submits "$@"')
    bench.program("bsub", 'read -r line; echo submits "$line" with "$CONFIG $OUT $MINUTES CONTINUES=$CONTINUES"')
    variables = {"CONFIG": "a.yaml", "OUT": "runs/a", "PBS_O_WORKDIR": str(folder), "LS_SUBCWD": str(folder)}
    bench.environment |= variables
    return bench


@pytest.mark.parametrize("wrapper", ["mpirun", "srun"])
@pytest.mark.parametrize(
    ("word", "own", "starts", "expected"),
    [
        ("lost", 137, 3, 3),  # a rank was killed
        ("lost", 0, 3, 3),
        ("", 137, 3, 3),  # before the ranks were connected
        ("", 1, 1, 1),  # the launcher's own error
        ("", 0, 3, 3),  # srun ends with 0 although "task 0 launch failed"
        ("ended", 0, 1, 0),  # a script, which says by its own exit code how it ended
        ("ended", 4, 1, 4),
        ("3", 137, 1, 3),  # a rank's own error
        ("2", 1, 1, 2),
        ("75", 0, 1, 75),
        ("lost", 75, 1, 75),  # a second signal
        ("0", 1, 1, 0),
        ("$'75\\nt'", 137, 1, 75),  # the first line counts
        ("7t", 1, 1, 1),  # no exit code
    ],
)
def test_ranks_start_again_after_one_was_lost_and_for_no_other_reason(word, own, starts, expected, wrapper, tmp_path):
    bench = Bench(tmp_path, wrapper)
    leave = f'echo {word} > "$PFLMPI_EXIT_FILE"' if word else ""
    bench.program(wrapper, f'{FAKE_RUN}echo "start $PFLMPI_RESTARTED"; {leave}\nexit {own}')
    code, first, rest = bench.call("--restarts", "2", "-n", "3", "pflmpi", "run", "a.yaml")
    assert code == expected and [first, *rest.splitlines()].count("start 0") == 1
    assert (first + rest).count("start ") - rest.count("all start again") == starts
    assert rest.count("a rank was lost; all start again from the newest checkpoint (2 of 2)") == (starts == 3)
    assert bench.left() == []


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_restarts_are_a_number(wrapper, tmp_path):
    code, _, rest = Bench(tmp_path, wrapper).call("--restarts", "often", "pflmpi", "run", "a.yaml")
    assert code == 2 and "--restarts 'often': expected is how often, 0 or more" in rest


def test_torchrun_gets_restarts_as_its_own_option(tmp_path):
    bench = Bench(tmp_path, "torchrun")
    first = bench.call("--restarts=2", "-m", "pflmpi", "run", "a.yaml")[1]
    assert first.endswith("--max-restarts=2 -m pflmpi run a.yaml")
    job = {"SLURM_JOB_ID": "70", "SLURM_JOB_NUM_NODES": "2"}
    first = bench.call("--restarts", "2", "-m", "pflmpi", "run", "a.yaml", **job)[1]
    assert first.endswith("launch/torchrun --restarts 2 -m pflmpi run a.yaml")


def test_torchrun_is_told_of_a_program_before_the_script(tmp_path):
    bench = Bench(tmp_path, "torchrun")
    assert "--no-python" in bench.call("--nproc-per-node=2", "python", "own.py", "a")[1]
    assert "--no-python" in bench.call("--nproc-per-node=2", "pflmpi", "run", "a.yaml")[1]
    assert "--no-python" in bench.call("--nproc-per-node=2", "/opt/bin/python3.11", "own.py")[1]
    for words in (["own.py", "--tag", "pflmpi"], ["-m", "pflmpi", "run", "a.yaml"]):
        assert "--no-python" not in bench.call("--nproc-per-node=2", *words)[1]


def test_mpirun_of_another_library_gets_no_option_of_open_mpi(tmp_path):
    bench = Bench(tmp_path, "mpirun")
    text = 'if [ "$1" = --version ]; then echo HYDRA; else printf "%s " "$@"; echo 0 > "$PFLMPI_EXIT_FILE"; fi'
    bench.program("mpirun", text)
    assert bench.call("-n", "3", "pflmpi", "run", "a.yaml")[:2] == (0, "-n 3 pflmpi run a.yaml ")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_launcher_that_has_no_rank_yet_has_begun_nothing(wrapper, tmp_path):
    """mpirun and srun are killed by USR1 before they watch for it; torchrun has no children to hand it on to."""
    bench = Bench(tmp_path, wrapper)
    waits = "import time; print('ready', flush=True); time.sleep(60)"
    bench.program(wrapper, f'{FAKE_RUN}exec python3 -c "{waits}"')
    assert stopped(bench, [signal.SIGUSR1])[0] == 75
    assert bench.left() == []


@pytest.mark.parametrize("word, own, expected", [("75", 1, 75), ("2", 1, 2), ("", 1, 1), ("", 0, 3)])
def test_torchrun_ends_with_what_rank_0_has_left(word, own, expected, tmp_path):
    bench = Bench(tmp_path, "torchrun")
    leave = f'echo {word} > "$PFLMPI_EXIT_FILE"' if word else ""
    bench.program("torchrun", f"{leave}\nexit {own}")
    assert bench.call("-m", "pflmpi", "run", "a.yaml")[0] == expected
    assert bench.left() == []


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_launcher_that_ends_with_0_before_a_rank_has_started_is_not_believed(wrapper, tmp_path):
    bench = Bench(tmp_path, wrapper)
    bench.program(wrapper, FAKE_RUN + "exit 0")
    for words in (["pflmpi", "run", "a.yaml"], ["pflmpi", "doctor"], ["python", "script.py"]):
        code, _, rest = bench.call(*words)
        assert code == 3 and f"launch/{wrapper}: {wrapper} ended with 0, but rank 0 did not" in rest
    assert bench.left() == []


@pytest.mark.parametrize(("made", "code"), [(None, 0), (None, 4), ("0", 4), ("3", 0)])
def test_a_script_says_itself_how_it_ended_whatever_became_of_its_runs(made, code, tmp_path):
    bench = Bench(tmp_path, "srun")
    bench.program("srun", 'exec "$@"')
    run = """
from pflmpi.python import run
run.sys.executable = 'bin/run'  # stands in for the process that pflmpi.run starts
run._run_command([], None, None)
"""
    bench.program("run", f'echo {made} > "$PFLMPI_EXIT_FILE"; exit {made}')
    (tmp_path / "bin" / "script.py").write_text(f"import sys, pflmpi{run if made else ''}\nsys.exit({code})")
    assert bench.call(*processes.PFLMPI[:1], "bin/script.py", PYTHONPATH=str(ROOT))[0] == code
    assert bench.left() == []


def test_a_requeued_job_removes_the_file_that_its_killed_start_has_left(tmp_path):
    bench = Bench(tmp_path, "srun")
    (tmp_path / ".pflmpi-exit.70.0.abcdef").write_text("lost\n")
    (tmp_path / ".pflmpi-exit.71.0.abcdef").write_text("lost\n")
    assert bench.call("pflmpi", "run", "a.yaml", SLURM_JOB_ID="70", SLURM_RESTART_COUNT="1")[0] == 0
    assert bench.left() == [".pflmpi-exit.71.0.abcdef"], "of another job"


STEP = {"SLURM_JOB_ID": "70", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NODELIST": "node[7-9]"}


def test_torchrun_meets_at_a_free_port_alone_and_at_the_steps_own_on_several_nodes(tmp_path):
    bench = Bench(tmp_path, "torchrun")
    words = ("--nproc-per-node=2", "-m", "pflmpi", "run", "a.yaml")
    first = bench.call(*words)[1]
    assert first.startswith("--nnodes=1 --rdzv-backend=c10d") and "--rdzv-endpoint=localhost:0 --nproc" in first
    _, first, rest = bench.call(*words, **STEP, SLURM_JOB_NUM_NODES="3")
    assert first.startswith("--nnodes=3 --rdzv-backend=c10d --rdzv-endpoint=node7:22432 --rdzv-id=70.2 --nproc")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in rest


def test_torchrun_on_several_hosts_without_slurm_meets_where_it_is_told(tmp_path):
    bench = Bench(tmp_path, "torchrun")
    last = ("-m", "pflmpi", "run", "a.yaml", "--out", "--rdzv-id")
    for words in (
        ("--nnodes=2", "--node-rank=1", "--master-addr=a", "--master-port=29512"),
        ("--nnodes", "2", "--node_rank", "1", "--rdzv_endpoint", "a:29512"),
    ):
        assert bench.call(*words, *last)[1] == " ".join((*words, *last)), "without a rendezvous of the wrapper"
    meet = ("--nnodes=2", "--rdzv-id=a7", "--rdzv-endpoint=a:29512")
    assert bench.call(*meet, *last)[1] == " ".join(("--rdzv-backend=c10d", *meet, *last))
    bench.program("torchrun", "exit 0")
    assert bench.call(*meet, *last)[0] == 0, "rank 0 may be on the other host"
    bench.program("torchrun", 'echo 75 > "$PFLMPI_EXIT_FILE"; exit 1')
    assert bench.call(*meet, *last)[0] == 75
    bench.program("torchrun", "exit 0")
    for words in (("--nnodes=1",), ()):
        assert bench.call(*words, *last)[0] == 3
    code, _, rest = bench.call("--nnodes=2", *last)
    assert code == 2 and "--nnodes=2: the hosts also need where they meet: --rdzv-endpoint=HOST:PORT" in rest
    assert bench.left() == []


def test_torchrun_in_a_batch_script_starts_itself_once_on_each_node(tmp_path):
    bench = Bench(tmp_path, "torchrun")
    job = {"SLURM_JOB_ID": "70", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "8", "SLURM_GPUS_PER_TASK": "1"}
    _, first, rest = bench.call("--nproc-per-node=4", "-m", "pflmpi", "run", "a.yaml", **job)
    assert "--nodes=2 --ntasks-per-node=1" in first
    assert first.endswith(f"{ROOT}/launch/torchrun --nproc-per-node=4 -m pflmpi run a.yaml")
    assert bench.left() == [], "what the agents share is read and removed here"
    assert "SLURM_NTASKS=" not in rest and "SLURM_GPUS_PER_TASK=" not in rest and "--gpu" not in first
    first = bench.call("-m", "pflmpi", "run", "a.yaml", **job, SLURM_GPUS_ON_NODE="4")[1]
    assert "--gpus-per-node=4 --gpu-bind=none" in first, "a step of one task on a node would get one GPU"


def test_an_agent_of_torchrun_need_not_have_rank_0(tmp_path):
    bench = Bench(tmp_path, "torchrun")
    bench.program("torchrun", "exit 0")
    assert bench.call("-m", "pflmpi", "run", "a.yaml", **STEP)[0] == 0
    (tmp_path / "bin" / "shared").touch()
    shared = str(tmp_path / "bin" / "shared")
    assert bench.call("-m", "pflmpi", "run", "a.yaml", **STEP, PFLMPI_EXIT_FILE=shared)[0] == 0
    bench.program("torchrun", 'echo 75 > "$PFLMPI_EXIT_FILE"; exit 1')
    assert bench.call("-m", "pflmpi", "run", "a.yaml", **STEP, PFLMPI_EXIT_FILE=shared)[0] == 1
    assert Path(shared).read_text() == "75\n", "the wrapper that started the agents reads it"


def test_srun_gets_the_cores_per_task_of_the_job_and_ends_all_ranks_with_one(tmp_path):
    _, _, rest = Bench(tmp_path, "srun").call("pflmpi", "run", "a.yaml", SLURM_CPUS_PER_TASK="6")
    assert "SRUN_CPUS_PER_TASK=6" in rest and "SLURM_KILL_BAD_EXIT=1" in rest


@pytest.mark.parametrize(("module", "code"), [("numpy", 0), ("no_such_module", 1)])
def test_what_is_installed_is_found_out_without_importing_it(module, code, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit(9)")
    script = f". {ROOT}/launch/environment; set +e; ready {module}; exit $?"
    environment = {**processes.ENVIRONMENT, "PYTHONPATH": str(tmp_path), "PATH": f"{processes.BIN}:/usr/bin:/bin"}
    assert processes.call(["bash", "-c", script], env=environment).returncode == code


RANK = """trap 'echo rank asked; exit 75' USR1
trap 'echo rank killed; exit 1' TERM
echo ready; for _ in {1..400}; do sleep 0.05; done"""
STUBBORN = RANK.replace("rank asked; exit 75", "rank asked")
AGENT = "trap 'echo agent killed; kill -TERM $!; exit 1' TERM\n( {rank} ) & wait $!; code=$?; wait $!; exit $code"


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_the_wrapper_asks_the_ranks_to_stop(wrapper, number, tmp_path):
    bench = Bench(tmp_path, wrapper)
    text = AGENT.format(rank=RANK) if wrapper == "torchrun" else RANK
    bench.program(wrapper, FAKE_RUN + text)
    assert stopped(bench, [number]) == (75, ["rank asked"])
    assert bench.left() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_at_once_is_not_lost_where_the_machine_is_busy(number, tmp_path):
    """The shell takes half a second for each `trap`, so that what it starts before one is there long before it."""
    bench = Bench(tmp_path, "mpirun")
    bench.program("mpirun", FAKE_RUN + RANK)
    slow = "unset BASH_ENV; set -T; trap '[[ $BASH_COMMAND != trap* ]] || sleep 0.5' DEBUG\n"
    (tmp_path / "bin" / "slow").write_text(slow)
    bench.environment["BASH_ENV"] = str(tmp_path / "bin" / "slow")
    assert stopped(bench, [number]) == (75, ["rank asked"])


@pytest.mark.parametrize("wrapper", ["mpirun", "srun"])
def test_a_second_signal_ends_a_launcher_whose_ranks_do_not(wrapper, tmp_path):
    bench = Bench(tmp_path, wrapper)
    bench.program(wrapper, FAKE_RUN + STUBBORN)
    assert stopped(bench, [signal.SIGUSR1, signal.SIGTERM]) == (1, ["rank asked", "rank killed"])


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_interrupted_wrapper_says_how_to_go_on(wrapper, tmp_path):
    bench = Bench(tmp_path, wrapper)
    bench.program(wrapper, FAKE_RUN + RANK)
    command = [str(ROOT / "launch" / wrapper), "-n", "2", "pflmpi", "run", "a.yaml"]
    process = processes.launch(command, env=bench.environment, cwd=tmp_path)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        processes.kill_all(process.pid)
    how = "the same command with --continue, or `pflmpi resume RUN`, goes on from the newest checkpoint"
    assert (process.returncode, err) == (130, f"launch/{wrapper}: interrupted; {how}\n")


# Notes each signal in a file of its name, and ends, as mpirun and torchrun do also for a signal that is ignored.
NOTES = """
import os, signal, sys, time
def note(number, _):
    open(signal.Signals(number).name, "w")
    sys.exit(1)
for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGTSTP", "SIGUSR1"):
    signal.signal(getattr(signal, name), note)
print("prints", flush=True)
open(sys.argv[1], "w")
for _ in range(400):
    if os.path.exists("end"):
        sys.exit(open("done", "w").close())
    if os.path.exists("SIGUSR1"):
        sys.exit(1)  # torchrun, whose rank has ended
    time.sleep(0.05)
"""


@contextlib.contextmanager
def at_a_terminal(bench, before=""):
    """A shell that has started a wrapper at a terminal, where what is in the background may not print; its keyboard."""
    python = f"python3 {bench.folder}/bin/notes.py"
    (bench.folder / "bin" / "notes.py").write_text(NOTES)
    rank = f"{python} rank & until [ -e rank ]; do sleep 0.05; done; rm rank\n" if bench.wrapper == "torchrun" else ""
    bench.program(bench.wrapper, f"{FAKE_RUN}{rank}exec {python} ready")
    keyboard, terminal = os.openpty()
    tty = os.ttyname(terminal)
    command = f"exec < {tty} > {tty} 2>&1; stty tostop; {before} {ROOT}/launch/{bench.wrapper} pflmpi run a.yaml"
    options = {"env": bench.environment, "cwd": bench.folder, "start_new_session": True}
    with open(keyboard, "wb", buffering=0) as keys:
        # Its end sends SIGHUP, and the launcher may take of two signals the later one first.
        noted = "until ls SIG* > /dev/null 2>&1; do sleep 0.05; done"
        shell = processes.launch(["bash", "-c", f"{command}; echo $? > code; {noted}"], **options)
        started = [shell.pid]
        try:
            processes.wait_for(lambda: "ready" in bench.left(), "the launcher", 60)
            os.close(terminal)
            started += processes.descendants(shell.pid)
            yield shell, keys
        finally:
            for pid in started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    shell.communicate(timeout=20)


def exit_files(bench):
    return [name for name in bench.left() if name.startswith(".pflmpi-exit")]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("before", "note"), [("", "SIGUSR1"), ("nohup", "done")])
def test_a_closed_terminal_asks_the_ranks_to_stop_and_under_nohup_nothing(before, note, wrapper, tmp_path):
    bench = Bench(tmp_path, wrapper)
    with at_a_terminal(bench, before) as (shell, keys):
        keys.close()
        shell.wait(20)  # what it waited for gets SIGHUP then
        if before:
            (tmp_path / "end").touch()
        processes.wait_for(lambda: set(bench.left()) > {"ready"} and not exit_files(bench), "the end", 30)
    assert set(bench.left()) - {"ready", "end", "nohup.out"} == {note}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("key", "note", "code"), [(b"\x03", "SIGTERM", 130), (b"\x1c", "SIGTERM", 130), (b"\x1a", "SIGTSTP", 148)]
)
def test_a_key_that_interrupts_or_suspends_reaches_the_launcher_as_one_signal(key, note, code, wrapper, tmp_path):
    bench = Bench(tmp_path, wrapper)
    with at_a_terminal(bench, "set -m;") as (_, keys):
        keys.write(key)
        processes.wait_for(lambda: {note, "code"} <= set(bench.left()) and not exit_files(bench), "the end", 30)
    assert set(bench.left()) == {"ready", note, "code"}
    assert (tmp_path / "code").read_text() == f"{code}\n"


def stopped(bench, signals):
    """The exit code of a wrapper that gets signals, one after each line of its ranks, and these lines."""
    command = [str(ROOT / "launch" / bench.wrapper), "pflmpi", "run", "a.yaml"]
    process = processes.launch(command, env=bench.environment, cwd=bench.folder)
    lines = []
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for number in signals:
            os.kill(process.pid, number)
            lines.append(process.stdout.readline().strip())
        return process.wait(20), lines
    finally:
        processes.kill_all(process.pid)
        process.communicate()
