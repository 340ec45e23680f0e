"""`pflmpi submit` with programs that stand in for Slurm's: what is refused, what sbatch gets, what is printed."""

import getpass
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import fake_slurm
import quick_run
import table_file
from pflmpi.cli import main
from pflmpi.cluster.batch_script import LAUNCH
from pflmpi.config import load as configuration
from pflmpi.store import job_file
from pflmpi.store.job_file import Submission
from pflmpi.sweep.table import list_cells, load
from project import ROOT


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder where `submit` is started, with a configuration and a Slurm whose queue is empty."""
    sbatch = 'printf "%s\\n" "$@" > words; cat > script; echo "42;here"'
    return fake_slurm.enter(tmp_path, monkeypatch, sbatch)


def directives(text):
    return [shlex.split(line)[1] for line in text.splitlines() if line.startswith("#SBATCH")]


def last_line(text):
    return shlex.split(text.strip().splitlines()[-1])


# --- one run ------------------------------------------------------------------------------------------------------


def test_the_script_of_a_dry_run_is_what_sbatch_gets(folder, capfd):
    command = ["submit", "small.yaml", "--nodes=2", "--time", "1:00:00", "-s", "seed=4", "--mpi", "pmix"]
    assert main([*command, "--dry-run"]) == 0
    shown = capfd.readouterr()
    assert "make runs/ before you submit this" in shown.err
    assert sorted(path.name for path in folder.iterdir()) == ["bin", "small.yaml"]
    assert main(command) == 0
    assert (folder / "script").read_text() == shown.out
    words = (folder / "words").read_text().splitlines()
    assert words == ["--parsable", *directives(shown.out)]  # SBATCH_ variables come before the script, words do not
    assert set(words) >= {"--nodes=2", "--time=1:00:00", "--job-name=small", f"--chdir={folder}"}
    assert "--output=runs/small.%j.log" in words and not any(word.startswith("--comment") for word in words)
    (copy,) = folder.glob("runs/small.*.yml")
    assert f"runs/{copy.name}, which the job reads, " in shown.err and "put small.yaml -s seed=4 in its" in shown.err
    rank = ["run", f"runs/{copy.name}", "--out", "runs/small", "--continue"]
    assert last_line(shown.out) == [
        "bash",
        str(LAUNCH / "srun"),
        "--mpi=pmix",
        sys.executable,
        "-P",
        "-m",
        "pflmpi",
        *rank,
    ]
    assert (folder / "runs" / "small" / "jobs.txt").read_text().startswith(f"42 - {socket.gethostname()} ")


def test_each_of_two_jobs_in_a_row_keeps_the_configuration_that_was_submitted(folder):
    scripts = []
    for rounds in (12, 24):
        (folder / "small.yaml").write_text(yaml.safe_dump(quick_run.settings(training={"rounds": rounds})))
        assert main(["submit", "small.yaml", "-s", f"seed={rounds}", "--", "--dependency=singleton"]) == 0
        scripts.append((folder / "script").read_text())
    (folder / "small.yaml").unlink()
    configs = [configuration.load(Path(last_line(text)[8])) for text in scripts]
    assert [(config.training.rounds, config.seed) for config in configs] == [(12, 12), (24, 24)]


def test_submit_says_what_was_submitted_and_how_to_watch_it(folder, capfd):
    assert main(["submit", "small.yaml", "--out", "first run"]) == 0
    shown = capfd.readouterr()
    assert shown.err.startswith("pflmpi: a rank for each core (1 without ") and shown.err.count("\n") == 1
    assert shown.out.splitlines() == [
        "job 42: first run",
        "log: first run.42.log",
        "watch: pflmpi status 42    or: tail -F 'first run.42.log'",
    ]


def test_options_after_two_dashes_reach_sbatch_as_they_are_and_last(folder, capfd):
    sbatch_options = ["-J", "mine", "--comment=night shift", "--gres", "gpu:2", "--signal=USR2@300"]
    assert main(["submit", "-o", "logs/%j.txt", "--requeue", "--time=20", "small.yaml", "--", *sbatch_options]) == 0
    lines = [line for line in (folder / "script").read_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --output=logs/%j.txt" in lines and "#SBATCH --job-name=mine" in lines
    assert lines[-1] == "#SBATCH -J mine '--comment=night shift' --gres gpu:2 --signal=USR2@300"
    assert (folder / "words").read_text().splitlines()[-len(sbatch_options) :] == sbatch_options
    assert "log: logs/42.txt" in capfd.readouterr().out and (folder / "logs").is_dir()


def test_the_folder_of_a_job_names_its_log_and_whether_it_requeues(folder):
    table_file.write(folder)
    assert main(["submit", "--array", "small.yaml", "--out", "50%"]) == 0
    array = job_file.read_submissions(Path("50%"))["42"]
    assert (array.log, array.rounds, len(array.cells)) == (f"{folder}/50%%.42_%a.log", 0, 8)
    assert main(["submit", "--array", "small.yaml", "--only", "Local/*", "--pack=3"]) == 0
    cells = [f"Local/{column}/seed{seed}" for column in ("few", "many_M") for seed in (0, 1)]
    packed = job_file.read_submissions(Path("sweeps/small"))["42"].cells
    assert packed == dict(zip(cells, (0, 0, 0, 3), strict=True))
    (folder / "small.yaml").write_text(yaml.safe_dump(quick_run.settings()))
    assert main(["submit", "small.yaml", "--requeue", "-o", "logs/%x-%j", "--partition=main"]) == 0
    inode = Path("runs/small").stat().st_ino
    noted = Submission(f"{folder}/logs/small-42", requeues=True, partition="main", folder=inode, rounds=3)
    assert job_file.read_submissions(Path("runs/small")) == {"42": noted}


def test_the_memory_of_a_job_is_what_plan_counts(folder, capfd):
    assert main(["submit", "small.yaml", "--ntasks=2", "--mem=auto"]) == 0
    (option,) = [word for word in directives((folder / "script").read_text()) if word.startswith("--mem=")]
    needed = int(re.fullmatch(r"--mem=(\d+)M", option)[1])
    counted = job_file.read_submissions(Path("runs/small"))["42"].memory
    assert needed > 100 and (needed - 1) << 20 < counted <= needed << 20
    (folder / "script").unlink()
    less = f"--mem={needed // 2}M"
    assert main(["submit", "small.yaml", "--out=less", "--ntasks=2", less]) == 2
    error = capfd.readouterr().err
    assert f"{less}: plan counts " in error and "with 2 ranks on 1 node; give --mem=" in error
    assert not (folder / "script").exists()
    for enough in ("--mem=40G", "--mem=0", f"-- {less}"):
        assert main(["submit", "small.yaml", "--out=less", "--ntasks=2", "--dry-run", *enough.split()]) == 0


@pytest.mark.usefixtures("folder")
def test_a_percent_sign_in_a_name_is_no_pattern(capfd):
    assert main(["submit", "small.yaml", "--out", "50%j"]) == 0
    assert "--output=50%%j.%j.log" in directives(Path("script").read_text())
    assert "log: 50%j.42.log" in capfd.readouterr().out


def test_the_folder_of_a_log_is_made_by_the_name_that_slurm_gives_it(folder, capfd):
    user = getpass.getuser()
    for words, name in (([], "small"), (["--", "-J", "mine"], "mine"), (["--", "--job-name=50%"], "50%")):
        assert main(["submit", "small.yaml", "--output=logs/%x/%u-100%%/%x-%u-%j", *words]) == 0
        log = f"logs/{name}/{user}-100%/{name}-{user}-42"
        assert f"log: {log}" in capfd.readouterr().out
        assert job_file.read_submissions(Path("runs/small"))["42"].log == f"{folder}/{log.replace('%', '%%')}"
        assert (folder / "logs" / name / f"{user}-100%").is_dir()
    assert "--output=logs/50%%/" in (folder / "script").read_text()


def test_the_folders_of_logs_that_are_named_after_two_dashes_are_made_too(folder, capfd):
    assert main(["submit", "small.yaml", "--", "-e", "logs/%x/err-%j", "--output=out/%u/%j"]) == 0
    assert "log: logs/small/err-42" in capfd.readouterr().out, "where progress and errors are"
    assert (folder / "logs" / "small").is_dir() and (folder / "out" / getpass.getuser()).is_dir()
    assert job_file.read_submissions(Path("runs/small"))["42"].log == f"{folder}/logs/small/err-42"


@pytest.mark.usefixtures("folder")
def test_a_job_takes_nothing_of_the_job_in_which_it_is_submitted(monkeypatch):
    fake_slurm.program("sbatch", "cat > script; env > variables; echo 42")
    of_job = {"SLURM_MEM_PER_CPU": "100", "SRUN_CPUS_PER_TASK": "2", "SBATCH_CPU_BIND": "quiet"}
    for name, value in {**of_job, "SLURM_CONF": "/etc/own.conf", "SBATCH_ACCOUNT": "mine"}.items():
        monkeypatch.setenv(name, value)
    for number, left in (("7", {"SLURM_CONF", "SBATCH_ACCOUNT"}), (None, {"SLURM_CONF", "SBATCH_ACCOUNT", *of_job})):
        monkeypatch.setenv("SLURM_JOB_ID", number) if number else monkeypatch.delenv("SLURM_JOB_ID")
        assert main(["submit", "small.yaml"]) == 0
        names = {line.partition("=")[0] for line in Path("variables").read_text().splitlines()}
        assert {name for name in names if name.startswith(("SLURM_", "SBATCH_", "SRUN_"))} == left


def test_variables_of_sbatch_count_as_its_options_do(folder, monkeypatch, capfd):
    fake_slurm.program("sbatch", 'printf "%s\\n" "$@" > words; env > variables; cat > script; echo 42')
    values = {"ERROR": "logs/%x/err-%j", "PARTITION": "low", "TIMELIMIT": "2", "ARRAY_INX": "0-1", "WAIT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    assert main(["submit", "small.yaml"]) == 0
    assert "log: logs/small/err-42" in capfd.readouterr().out and (folder / "logs" / "small").is_dir()
    assert {"--error=logs/small/err-%j", "--partition=low", "--time=2"} <= {*Path("words").read_text().splitlines()}
    assert job_file.read_submissions(Path("runs/small"))["42"].partition == "low"
    assert not re.search("^SBATCH_(ARRAY_INX|WAIT)=", Path("variables").read_text(), re.MULTILINE)
    assert main(["submit", "small.yaml", "--requeue"]) == 2
    assert "--requeue with --time=2: Slurm warns the run 120 s before" in capfd.readouterr().err
    assert main(["submit", "small.yaml", "--requeue", "--time=20", "-p", "main"]) == 0
    assert "--partition=main" in Path("words").read_text()


def test_a_requeueing_job_is_warned_and_requeues_itself(folder):
    assert main(["submit", "small.yaml", "--requeue"]) == 0
    text = (folder / "script").read_text()
    assert {"--requeue", "--signal=USR1@120", "--open-mode=append"} <= set(directives(text))
    assert 'requeue_after "$code" runs/small "$before"' in text
    assert main(["submit", "small.yaml"]) == 0
    text = (folder / "script").read_text()
    assert "--requeue" not in directives(text) and "requeue_after" not in text


def test_a_warning_that_fits_the_time_limit_is_taken(folder):
    for time in (
        "--time=4",
        "--time=1-0",
        "--time=UNLIMITED",
        "--time=2 -- --signal=USR1@20",
        "--time=3 -- --signal=R:USR2",
    ):
        assert main(["submit", "small.yaml", "--requeue", "--dry-run", *time.split()]) == 0, time


def test_a_set_up_comes_before_the_run_and_may_choose_the_interpreter(folder):
    (folder / "modules.sh").write_text("python=/other/python; echo loaded")
    assert main(["submit", "small.yaml", "--setup", "modules.sh"]) == 0
    fake_slurm.program("srun", 'echo "$@"; echo 0 > "$PFLMPI_EXIT_FILE"')
    text = (folder / "script").read_text()
    shown = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown[0] == "loaded" and " /other/python -P -m pflmpi run runs/small." in shown[1]
    (folder / "modules.sh").write_text("set -eu\nfalse || true\n")
    assert "run runs/small." in subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout
    (folder / "modules.sh").write_text("cd /")
    fake_slurm.program("srun", 'pwd; echo 0 > "$PFLMPI_EXIT_FILE"')
    where = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout
    assert where == f"{folder}\n", "from which configuration and run are named"
    (folder / "modules.sh").write_text("[ -n '' ] && export A=1")
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, ""), "nothing starts without it"
    assert done.stderr.startswith(f"pflmpi: the setup file {folder}/modules.sh ended with status 1; its last command")


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_the_interpreter_is_the_one_that_the_setup_file_activates(variable, folder):
    fake_slurm.program("python", "", folder / "env" / "bin")
    activated = f"export {variable}={folder}/env PATH={folder}/env/bin:$PATH"
    (folder / "modules.sh").write_text(activated)
    assert main(["submit", "small.yaml", "--setup", "modules.sh"]) == 0
    fake_slurm.program("srun", 'echo "$@"; echo 0 > "$PFLMPI_EXIT_FILE"')
    text = (folder / "script").read_text()

    def started() -> str:
        return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout

    assert f" {folder}/env/bin/python -P -m pflmpi run " in started()
    (folder / "modules.sh").write_text(f"set -eu; python=/other/python; {activated}")
    assert " /other/python -P -m pflmpi run " in started(), "one that it names comes first"
    (folder / "modules.sh").write_text(f"export PATH={folder}/env/bin:$PATH")
    assert f" {sys.executable} -P -m pflmpi run " in started(), "a module of Python is not an environment with pflmpi"


@pytest.mark.parametrize(
    "state, exit_code, done, expected",
    [
        ("COMPLETED", 0, 3, 0),
        ("COMPLETED", 0, 0, 3),
        ("FAILED", 75, 0, 75),
        ("TIMEOUT", 0, 0, 3),
    ],
)
def test_waiting_for_a_job_ends_with_the_exit_code_of_its_run(state, exit_code, done, expected, folder, capfd):
    """Also where Slurm takes the job for complete and the run is not."""
    lines = [fake_slurm.line("42", State="RUNNING"), fake_slurm.line("42", State=state, exit_code=exit_code << 8)]
    for number, line in enumerate(lines):
        (folder / f"queue{number}").write_text(line)
    fake_slurm.program("squeue", "[ ! -e script ] || { [ -e asked ] && cat queue1; } || { touch asked; cat queue0; }")
    fake_slurm.program("sbatch", f"touch script; {'mv done/* runs/small/' if done else ':'}; echo 42")
    if done:
        quick_run.run(quick_run.settings(), folder / "done")
    assert main(["submit", "small.yaml", "--wait"]) == expected
    assert f"job 42 {state}" in capfd.readouterr().out


def test_a_shorter_run_of_before_does_not_make_a_failed_job_a_success(folder, capfd):
    quick_run.run(quick_run.settings(), folder / "runs/small")
    assert main(["submit", "small.yaml", "-s", "training.rounds=4"]) == 0
    for state, status, code in (("FAILED", 2 << 8, 2), ("CANCELLED", 15, 3)):
        fake_slurm.queue(folder / "bin", fake_slurm.line("42", State=state, exit_code=status))
        for what in ("runs/small", "42"):
            assert main(["status", what, "--wait"]) == code
    fake_slurm.queue(folder / "bin", fake_slurm.line("42", State="COMPLETED"))
    quick_run.resume(folder / "runs/small", ("training.rounds=4",))
    assert main(["status", "runs/small", "--wait"]) == 0


def test_a_test_says_when_a_job_would_start(folder, capfd):
    fake_slurm.program("sbatch", 'printf "%s\n" "$@" > words; echo "sbatch: Job 3 to start at noon" >&2')
    assert main(["submit", "small.yaml", "--test-only"]) == 0
    assert capfd.readouterr().out == "Job 3 to start at noon\n"
    assert "--test-only" in (folder / "words").read_text() and not (folder / "runs").exists()


def test_all_jobs_of_a_folder_or_a_table_are_cancelled(folder, capfd):
    fake_slurm.program("scancel", 'echo "$@" > cancelled')
    table = table_file.write(folder)
    job_file.append(make(folder / "sweeps/small"), "7")
    job_file.append(make(folder / "runs/a"), "9")
    lines = [fake_slurm.line("7_1", JobID=8), fake_slurm.line("7_[2-3%1]", State="PENDING"), fake_slurm.line("9")]
    fake_slurm.queue(folder / "bin", *lines, fake_slurm.line("7_0", State="COMPLETED"))
    for what, ids in ((str(table), "7_1 7"), ("sweeps/small", "7_1 7"), ("runs/a", "9")):
        assert main(["cancel", what]) == 0
        assert Path("cancelled").read_text() == f"{ids}\n"
        assert f"job {ids.split()[0]} cancelled (RUNNING)" in capfd.readouterr().out
    assert main(["cancel", "runs"]) == 2
    assert "no job of yours works in runs or waits to" in capfd.readouterr().err


def make(folder):
    folder.mkdir(parents=True)
    return folder


def test_a_finished_run_is_not_submitted(folder, capfd):
    quick_run.run(quick_run.settings(), folder / "run")
    assert main(["submit", "small.yaml", "--out", "run"]) == 0
    assert capfd.readouterr().out == "all 3 rounds of run are done; nothing to submit\n"
    assert not (folder / "script").exists()
    assert main(["submit", "small.yaml", "--out", "run", "-s", "training.rounds=4"]) == 0
    assert (folder / "script").exists()


@pytest.mark.parametrize(
    "words, expected",
    [
        (["small.yaml", "-s", "training.lr=-1"], "training.lr = -1"),
        (["nothing.yaml"], "cannot read nothing.yaml"),
        (["small.yaml", "--exclusive"], "unknown option '--exclusive'; `pflmpi submit --help` lists those that are"),
        (["--gres", "gpu:2", "small.yaml"], "sbatch's own go after --, as they are: pflmpi submit ... -- --gres"),
        (["small.yaml", "other.yaml"], "unexpected argument 'other.yaml'"),
        ([], "give one of them"),
        (["small.yaml", "--array", "table.yaml"], "give one of them"),
        (["small.yaml", "--jobs", "2"], "--jobs is for --array TABLE"),
        (["small.yaml", "--only", "A/*"], "--only is for --array TABLE"),
        (["--array", "small.yaml", "--jobs", "0"], "--jobs 0: must be at least 1"),
        (["small.yaml", "--restarts", "-1"], "--restarts -1: must be at least 0"),
        (["small.yaml", "--requeue", "--time=1"], "120 s before the limit, or up to a minute earlier"),
        (["small.yaml", "--requeue", "--time=0:03:00"], "give a --time of more than 3 minutes"),
        (["small.yaml", "--mem", "1G", "--nodes", "2-4"], "--nodes=2-4: what `plan` counts is for a number"),
        (["small.yaml", "--trial"], "--trial is for --time=auto, which is not given"),
        (["small.yaml", "--trial=0", "--time=auto"], "--trial 0: must be at least 1"),
        (["small.yaml", "--srun=hostname"], "--srun='hostname': 'hostname' is no option of srun"),
        (["small.yaml", "--srun=--cpu-bind='cores"], "cannot be read as words: No closing quotation; close the quotes"),
        (["small.yaml", "--", "--error=logs/%j/err"], "--error=logs/%j/err: the folder of a log must exist before"),
        (["small.yaml", "--output=logs/%j/%x.out"], "when nobody knows what %j stands for; there use %x"),
        (["small.yaml", "--setup", "nowhere.sh"], "--setup nowhere.sh: there is no such file"),
        (["small.yaml", "-s", "runtime.transport=mpi"], "every rank would be alone; give --mpi pmix"),
        (["small.yaml", "--out", "small.yaml/run"], "cannot write the folder small.yaml"),
        (["small.yaml", "--output", "small.yaml/log"], "small.yaml: File exists; fix that, or choose another one"),
        (["small.yaml", "--", "--chdir=/tmp"], "--chdir=/tmp: a job works in the folder where it is submitted"),
        (["small.yaml", "--", "-Q"], "-Q: sbatch then does not print the id of the job"),
        (["small.yaml", "--", "--quiet"], "--quiet: sbatch then does not print the id of the job"),
        (["small.yaml", "--", "--test-only"], "--test-only: sbatch then submits nothing; `pflmpi submit --test-only`"),
        (["small.yaml", "--", "-W"], "-W: sbatch then ends with the exit code of the job; leave it out"),
        (["small.yaml", "--requeue", "--time=9", "--", "--signal=B:USR1@60"], "in the form --signal=USR1@60"),
        (["small.yaml", "--requeue", "--time=9", "--", "--signal", "USR1@600"], "600 s before the limit"),
        (["small.yaml", "--requeue", "--", "-t", "2"], "--requeue with --time=2: Slurm warns the run 120 s before"),
        (["small.yaml", "--", "-D", "/tmp"], "--chdir=/tmp: a job works in the folder where it is submitted"),
    ],
)
def test_wrong_input_is_refused_and_nothing_submitted(words, expected, folder, capfd):
    assert main(["submit", *words]) == 2
    assert expected in capfd.readouterr().err
    assert not (folder / "script").exists() and not (folder / "runs").exists()


def test_options_of_srun_come_between_it_and_the_interpreter(folder):
    more = "--cpu-bind=cores --mpi=pmix_v4"
    assert main(["submit", "small.yaml", f"--srun={more}", "-s", "runtime.transport=mpi"]) == 0
    words = last_line((folder / "script").read_text())
    assert words[2:5] == ["--mpi=pmix_v4", "--cpu-bind=cores", sys.executable]
    assert main(["submit", "small.yaml", "--srun=--container-image=image.sqsh --container-mounts=/a"]) == 0
    words = last_line((folder / "script").read_text())
    assert words[3:7] == ["--container-image=image.sqsh", "--container-mounts=/a", "python", "-P"]


# --- a profile of the site ----------------------------------------------------------------------------------------

PROFILE = {
    "account": "mine",
    "partition": "gpu",
    "mpi": "pmix",
    "setup": "modules.sh",
    "srun": "--cpu-bind=cores",
    "gres": "gpu:a100",
    "container": {"apptainer": "pflmpi.sif", "options": "--nv"},
}


@pytest.fixture
def site(folder, monkeypatch):
    """Write the profiles of a site."""

    def write(profiles):
        (folder / "home/.config/pflmpi").mkdir(parents=True, exist_ok=True)
        (folder / "home/.config/pflmpi/site.yaml").write_text(yaml.safe_dump(profiles))
        (folder / "home/.config/pflmpi/modules.sh").touch()

    monkeypatch.setenv("HOME", str(folder / "home"))
    write({"big": PROFILE, "plain": None})
    return write


def test_a_profile_says_what_the_command_line_does_not(folder, site, monkeypatch):
    place = folder / "home/.config/pflmpi"
    assert main(["submit", "small.yaml", "--site=big", "--partition=fast", "--gpus-per-node=v100:2"]) == 0
    text = (folder / "script").read_text()
    assert {"--account=mine", "--partition=fast", "--gres=gpu:a100:2"} <= set(directives(text))
    assert not any(word.startswith(("--gpus", "--qos")) for word in directives(text))
    assert f"# options of --site='big': '{place}/site.yaml'\n" in text and f". {place}/modules.sh || {{\n" in text
    container = ["apptainer", "exec", "--nv", f"{place}/pflmpi.sif", "python", "-P"]
    assert last_line(text)[2:10] == ["--mpi=pmix", "--cpu-bind=cores", *container]
    assert main(["submit", "small.yaml", "--site=big", "--mpi=pmi2", "--srun=--exclusive"]) == 0
    assert last_line((folder / "script").read_text())[2:5] == ["--mpi=pmi2", "--exclusive", "apptainer"]
    (place / "site.yaml").rename(folder / "other.yaml")
    monkeypatch.setenv("PFLMPI_SITE", "other.yaml")
    assert main(["submit", "small.yaml", "--site=plain"]) == 0
    assert last_line((folder / "script").read_text())[2:4] == ["--mpi=none", sys.executable]


def test_the_profile_of_the_page_is_one(folder, site, capfd):
    (text,) = re.findall("```yaml\n(gpu:.*?)```", (ROOT / "docs/clusters.md").read_text(), re.DOTALL)
    site(yaml.safe_load(text))
    assert main(["submit", "small.yaml", "--site=gpu", "--gpus-per-node=4"]) == 0
    assert "--gres=gpu:a100:4" in directives((folder / "script").read_text())
    assert "a rank for each of 4 GPUs" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("profiles", "expected"),
    [
        ({"bigger": {}}, "site.yaml: unknown site 'big'; did you mean 'bigger'?"),
        ({"big": {"acount": "a"}}, "site.yaml: unknown key in big: 'acount'; did you mean 'account'?"),
        ({"big": {"mpi": "openmpi"}}, "site.yaml: big.mpi = 'openmpi': must be 'none', 'pmix' or 'pmi2'"),
        ({"big": {"container": {"options": "--nv"}}}, "site.yaml: big.container.apptainer is missing"),
        ({"big": {"container": "a.sif"}}, "site.yaml: big.container = 'a.sif': "),
        ({"big": {"setup": "nowhere.sh"}}, "nowhere.sh: there is no such file"),
        (["big"], "site.yaml"),
    ],
)
def test_a_wrong_profile_is_refused(profiles, expected, folder, site, capfd):
    site(profiles)
    assert main(["submit", "small.yaml", "--site=big"]) == 2
    error = capfd.readouterr().err
    assert expected in error and error.count("\n") == 1 and not (folder / "script").exists()


def test_an_unknown_option_is_one_line(folder, capfd):
    assert main(["submit", "small.yaml", "--exclusive"]) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_a_run_of_another_configuration_is_not_submitted(folder, capfd):
    quick_run.run(quick_run.settings(), folder / "runs" / "small")
    assert main(["submit", "small.yaml", "-s", "training.lr=0.7"]) == 2
    assert "training.lr = 0.1 in the run, 0.7 now" in capfd.readouterr().err
    assert not (folder / "script").exists()


def test_a_second_job_for_a_folder_must_wait_for_the_first(folder, capfd):
    assert main(["submit", "small.yaml"]) == 0
    (folder / "script").unlink()
    fake_slurm.queue(folder / "bin", fake_slurm.line("42", State="PENDING"))
    assert main(["submit", "small.yaml"]) == 2
    assert "job 42 is PENDING and works in runs/small already" in capfd.readouterr().err
    assert not (folder / "script").exists()
    assert main(["submit", "small.yaml", "--", "--dependency=afterany:42"]) == 0
    assert main(["submit", "small.yaml", "--out", "runs/other"]) == 0


@pytest.mark.parametrize("what", [["runs/small"], ["42"]])
def test_a_job_that_will_never_start_is_not_waited_for_and_says_what_to_do(what, folder, capfd):
    assert main(["submit", "small.yaml", "--", "--dependency=afterok:41"]) == 0
    line = fake_slurm.line("42", State="PENDING", Reason="DependencyNeverSatisfied", NodeList="", WorkDir=folder)
    fake_slurm.queue(folder / "bin", line)
    capfd.readouterr()
    end = "will never start: its --dependency can no longer be met; end it (scancel 42) and submit again\n"
    assert main(["status", *what, "--wait"]) == 3 and f"\n  {end}" in capfd.readouterr().out
    assert main(["submit", "small.yaml"]) == 2
    assert capfd.readouterr().err.endswith(f"job 42, submitted for runs/small before, {end}")


def test_a_job_that_was_to_continue_a_run_begins_none_where_that_was_moved_away(folder, capfd):
    quick_run.run(quick_run.settings(), folder / "runs/small")
    assert main(["submit", "small.yaml", "-s", "training.rounds=4"]) == 0
    (folder / "runs/small").rename(folder / "runs/moved")
    words = last_line((folder / "script").read_text())
    assert main(words[words.index("run") :]) == 2 and not (folder / "runs/small").exists()
    assert "runs/small has no checkpoint any more, from which this job was" in capfd.readouterr().err


def test_an_error_of_sbatch_is_shown(folder, capfd):
    fake_slurm.program("sbatch", "echo 'sbatch: error: invalid partition specified: none' >&2; exit 1")
    assert main(["submit", "small.yaml", "--partition=none"]) == 2
    shown = capfd.readouterr()
    assert "sbatch refused the job: sbatch: error: invalid partition specified: none" in shown.err
    assert shown.out == ""
    fake_slurm.program("sbatch", "echo slurm 22.05.8")
    assert main(["submit", "small.yaml", "--", "--version"]) == 2
    error = capfd.readouterr().err
    assert "sbatch printed 'slurm 22.05.8' instead of the id of a job, which it may have submitted" in error


def test_a_machine_without_slurm_is_reported(folder, monkeypatch, capfd):
    shutil.rmtree(folder / "bin")
    monkeypatch.setenv("PATH", str(folder))
    assert main(["submit", "small.yaml"]) == 2
    assert "there is no sbatch here: submit on a login node of a Slurm cluster" in capfd.readouterr().err
    assert main(["submit", "small.yaml", "--dry-run"]) == 0


# --- a sweep ------------------------------------------------------------------------------------------------------


def test_an_array_has_the_cells_that_are_not_done(folder, capfd):
    path = table_file.write(folder)  # 2 rows, 2 columns, 2 seeds
    for number in (0, 5):
        cell = list_cells(load(path), [], None)[number]
        quick_run.run(cell.raw, cell.run(Path("sweeps/small")))
    command = ["submit", "--array", "small.yaml", "--ntasks=2", "--time", "10", "--jobs", "2", "--restarts", "2"]
    assert main([*command, "--mpi", "pmi2"]) == 0
    text = (folder / "script").read_text()
    assert {"--array=1-4,6-7%2", "--output=sweeps/small.%A_%a.log"} <= set(directives(text))
    (line,) = [line for line in text.splitlines() if "SLURM_ARRAY_TASK_ID" in line]
    launcher = f"bash {LAUNCH}/srun --restarts=2 --mpi=pmi2"
    (copy,) = folder.glob("sweeps/small.*.yml")
    words = ["sweep", f"sweeps/{copy.name}", "--out", "sweeps/small"]
    rest = ["--cell", "$SLURM_ARRAY_TASK_ID", "--launcher", launcher]
    assert shlex.split(line) == [sys.executable, "-P", "-m", "pflmpi", *words, *rest]
    shown = capfd.readouterr().out
    assert "job 42: sweeps/small, 6 of 8 cells" in shown and "tail -F sweeps/small.42_*.log" in shown
    assert main([*command, "--only", "FedAvg/few", "--seeds", "1"]) == 0
    assert capfd.readouterr().out == "all 1 cells in sweeps/small are done; nothing to submit\n"


def test_the_cells_of_an_array_that_waits_are_those_that_were_submitted(folder):
    trace = {"participation": 1.0, "selection": "trace.csv"}
    (folder / "trace.csv").write_text("round,client\n1,0\n2,0\n")
    exceptions = [{"row": "Local", "set": {"training": trace}}]
    table_file.write(folder, exceptions=exceptions)
    other = {"title": "another metric", "source": "none", "metric": "spread", "runs_of": "small.yaml"}
    (folder / "other.yaml").write_text(yaml.safe_dump(other))
    submitted = list_cells(load(Path("small.yaml")), [], None)
    for table in ("small.yaml", "other.yaml"):
        assert main(["submit", "--array", table, "--out", table[:5]]) == 0
    table_file.write(folder, seeds=[5], rows={"New": {"algorithm": {"name": "fedper"}}})
    for name in ("small", "other"):
        (copy,) = folder.glob(f"{name}.*.yml")
        assert list_cells(load(copy), [], None) == submitted
    assert load(copy).metric == "spread"


def test_a_task_may_have_several_of_the_cells_that_are_to_be_done(folder, capfd):
    path = table_file.write(folder)  # 8 cells
    done = list_cells(load(path), [], None)[2]
    quick_run.run(done.raw, done.run(Path("sweeps/small")))
    command = ["submit", "--array", "small.yaml", "--pack", "3", "--jobs", "2"]
    assert main(command) == 0 and "7 of 8 cells" in capfd.readouterr().out
    text = (folder / "script").read_text()
    assert "--array=0,4,7%2" in directives(text), "a task is named after its first cell"
    *head, last = text.splitlines()
    assert '--cell "${cells[SLURM_ARRAY_TASK_ID]}"' in last
    chosen = "\n".join([*head, 'echo "${cells[SLURM_ARRAY_TASK_ID]}"'])
    for task, expected in (("0", "0-1,3"), ("4", "4-6"), ("7", "7")):
        done = subprocess.run(["bash", "-c", chosen], capture_output=True, text=True, env={"SLURM_ARRAY_TASK_ID": task})
        assert done.stdout.strip() == expected
    assert main(["submit", "small.yaml", "--pack", "3"]) == 2
    assert main([*command, "--pack", "0"]) == 2
    error = capfd.readouterr().err
    assert "--pack is for --array TABLE" in error and "--pack 0: must be at least 1" in error


@pytest.mark.usefixtures("folder")
def test_a_cell_whose_task_ended_before_it_began_has_failed():
    table_file.write(Path(), seeds=[0])
    command = ["submit", "--array", "small.yaml", "--failed", "--dry-run"]
    assert main(["submit", "--array", "small.yaml", "--pack=2"]) == 0 and main(command) == 0
    Path("sweeps/small.42_2.log").write_text("pflmpi: modules.sh ended with 1\n")
    fake_slurm.program("sbatch", "cat > script; echo 42")
    assert main(command[:-1]) == 0
    assert "--array=2-3" in directives(Path("script").read_text()), "tasks that have not started have not failed"


def test_an_array_takes_the_failed_cells_alone_and_starts_those_anew_that_cannot_continue(folder, capfd):
    path = table_file.write(folder)
    out = Path("sweeps/small")
    for number in (0, 3, 5):
        cell = list_cells(load(path), [], None)[number]
        quick_run.run(cell.raw, cell.run(out))
        if number != 0:
            (cell.run(out) / "round_00002.h5").unlink()
            cell.log(out).touch()
    path = table_file.write(folder, exceptions=[{"row": "Local", "set": {"training": {"lr": 0.02}}}])
    command = ["submit", "--array", "small.yaml", "--failed"]
    assert main(command) == 2
    error = capfd.readouterr().err
    assert "Local/few/seed1: sweeps/small/Local/few/seed1 was made with another" in error and "or --anew" in error
    assert main([*command, "--anew"]) == 0
    text = (folder / "script").read_text()
    assert "--array=3,5" in directives(text) and "2 of 8 cells" in capfd.readouterr().out
    assert "--anew" in last_line(text) and "--failed" not in last_line(text), "which would number other cells"
    assert main([*command, "--only", "FedAvg/few"]) == 0
    assert capfd.readouterr().out == "no cell in sweeps/small has failed; nothing to submit\n"
    for word in ("--failed", "--anew"):
        assert main(["submit", "small.yaml", word]) == 2
        assert f"{word} is for --array TABLE" in capfd.readouterr().err


def test_the_cells_of_an_array_are_those_of_its_options(folder):
    table_file.write(folder)
    options = ["--only", "Local/*", "--seeds", "1", "-s", "training.rounds=1"]
    assert main(["submit", "--array", "small.yaml", *options]) == 0
    text = (folder / "script").read_text()
    assert "--array=0-1" in directives(text)
    words = last_line(text)
    assert sorted(words[words.index("--out") + 2 : words.index("--cell")]) == sorted(options)


def test_a_table_with_a_wrong_cell_is_not_submitted(folder, capfd):
    path = table_file.write(folder, exceptions=[{"row": "Local", "set": {"model": {"hidden": -1}}}])
    assert main(["submit", "--array", str(path)]) == 2
    assert "Local/few: model.hidden = -1" in capfd.readouterr().err
    table_file.write(folder)
    cell = list_cells(load(path), [], None)[0]
    quick_run.run(cell.raw, cell.run(Path("sweeps/small")))
    assert main(["submit", "--array", str(path), "-s", "training.momentum=0.5"]) == 2
    assert "FedAvg/few/seed0: sweeps/small/FedAvg/few/seed0 was made with another config" in capfd.readouterr().err
    assert not (folder / "script").exists()
