"""`pflmpi doctor` as it is used: sound set-ups pass, and each broken one is named with its remedy."""

import os
import re

import pytest
import yaml

import processes
import quick_run
import raw_files
from pflmpi.cli import main
from pflmpi.doctor import facts

ENVIRONMENT = {name: text for name, text in processes.ENVIRONMENT.items() if name != "PFLMPI_DATA"}
SOUND = "no problems found"


def doctor(way, folder, *options, rank_1="", mpirun=(), **variables):
    """Run the doctor in a folder, on two ranks unless alone; return the exit code and what it has printed.

    Args:
        rank_1: shell commands for rank 1 alone, before it starts; under mpirun.
        mpirun: its options.
        variables: of the environment.
    """
    command = [*processes.start_way(way, 2), "doctor", *map(str, options)]
    if way == "mpi":
        only = f'[ "$OMPI_COMM_WORLD_RANK" = 0 ] || {{ {rank_1 or ":"}; }}; exec "$@"'
        command = [command[0], *mpirun, *command[1:3], "sh", "-c", only, "sh", *command[3:]]
    done = processes.call(command, cwd=folder, env={**ENVIRONMENT, "COLUMNS": "400", **variables})
    return done.returncode, done.stdout


def problems(printed):
    return [line.removeprefix("problem: ") for line in printed.splitlines() if line.startswith("problem: ")]


def write(folder, **sections):
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(quick_run.settings(**sections)))
    return path


def first_in_path(folder):
    """A PYTHONPATH with this folder before what there is."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def patch(folder, code):
    """Write code that Python runs first with this PYTHONPATH."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    return first_in_path(folder)


@pytest.fixture
def here(tmp_path, monkeypatch, capfd):
    """Runs the doctor alone in this process; the exit code and what it has printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PFLMPI_DATA", raising=False)
    return lambda *options: (main(["doctor", *map(str, options)]), capfd.readouterr().out)


@pytest.mark.parametrize("way", ["alone", "mpi", "torchrun"])
def test_a_sound_set_up_has_no_problems_and_one_table(way, tmp_path, here):
    options = ["--config", write(tmp_path), "--out", tmp_path / "runs" / "first"]
    code, printed = here(*options) if way == "alone" else doctor(way, tmp_path, *options)
    assert code == 0 and SOUND in printed and not problems(printed), printed
    assert printed.count("┃ rank ┃") == 1
    rows = [line for line in printed.splitlines() if line.startswith(("│ 0 ", "│ 1 "))]
    assert len(rows) == (1 if way == "alone" else 2), printed
    library = "not used" if way == "torchrun" else "Open MPI"
    for text in (library, "gloo: yes", f"{tmp_path}: written", "digits", "mpi4py"):
        assert text in " ".join(printed.split()), text
    tried = re.search(r"│ messages +│ (.*?) +│ all", printed)
    times = r": 1 MiB from rank 0 to all in \S+ ms, to the next rank in \S+ ms"
    assert tried and re.fullmatch(
        {"alone": "not used", "mpi": f"MPI{times}", "torchrun": f"gloo{times}"}[way], tried[1]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.yaml"]  # nothing is left of what was tried


def test_the_configuration_of_a_run_is_one_of_others(tmp_path, here):
    quick_run.run(quick_run.settings(training={"rounds": 1}), tmp_path / "run")
    code, printed = here("--config", tmp_path / "run" / "config.yaml")
    assert code == 0 and SOUND in printed, printed


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.parametrize("mpi", ["none", "pmix"])
def test_a_sound_job_has_no_problems(mpi, slurm, tmp_path):
    command = ["srun", f"--mpi={mpi}", "-w", "node1,node2", "-N2", "--ntasks-per-node=1", *processes.PFLMPI, "doctor"]
    done = processes.call(command, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0 and SOUND in done.stdout, done.stdout + done.stderr
    assert "node1" in done.stdout and "node2" in done.stdout and "tasks 2" in done.stdout


def test_the_exit_code_goes_where_a_launcher_wants_it(tmp_path, monkeypatch, here):
    file = tmp_path / "exit"
    monkeypatch.setenv("PFLMPI_EXIT_FILE", str(file))
    for threads, code in (("1", 0), ("64", 1)):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert (here()[0], file.read_text()) == (code, f"{code}\n")


def test_no_mpi_is_named_by_every_rank(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('there is no MPI')")
    code, printed = doctor("mpi", tmp_path, PYTHONPATH=first_in_path(tmp_path))
    lines = problems(printed)
    assert code == 1 and len(lines) == 2, printed
    assert printed.count("┃ rank ┃") == 1
    for line in lines:
        assert "MPI cannot be used (there is no MPI); load the cluster's MPI module" in line


def test_gpus_that_were_requested_and_are_not_there_are_named(here, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_GPUS", "2")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, printed = here()
    assert code == 1 and len(problems(printed)) == 1, printed
    assert "a GPU was requested (SLURM_STEP_GPUS = '2' on rank 0 " in problems(printed)[0]
    assert problems(printed)[0].endswith("or set runtime.device = 'cpu'")


def test_two_ranks_on_one_gpu_are_named(tmp_path):
    one_for_all = patch(
        tmp_path / "patch",
        "from pflmpi import machine\n"
        "from pflmpi.doctor import facts\n"
        "machine.gpus = lambda visible: (machine.Gpu('4-2', 'GPU of a test', 1 << 33),)\n"
        "facts.read_gpu = lambda chosen: {'name': 'GPU of a test', 'uuid': '4-2',\n"
        "                           'memory': 1 << 33, 'memory_free': 1 << 32}\n",
    )
    config = write(tmp_path, runtime={"server": "shared", "device": "auto"})
    code, printed = doctor("mpi", tmp_path, "--config", config, PYTHONPATH=one_for_all)
    assert code == 1 and len(problems(printed)) == 1, printed
    assert "2 ranks share one GPU (GPU of a test, 4-2); give each its own (--ntasks-per-node" in problems(printed)[0]
    assert "GPU of a test, 4 of 8 GiB" in printed


@pytest.fixture(scope="module")
def other_rank(tmp_path_factory):
    """What is printed when rank 1 has another version and no data."""
    folder = tmp_path_factory.mktemp("other")
    raw_files.write_idx(folder / "data" / "MNIST" / "raw", "mnist", packed=False)
    old = patch(folder / "old", "import h5py\nh5py.__version__ = '3.0.1'\n")
    config = write(folder, data={"name": "mnist"})
    different = f"export PYTHONPATH={old}; unset PFLMPI_DATA"
    code, printed = doctor("mpi", folder, "--config", config, rank_1=different, PFLMPI_DATA=str(folder / "data"))
    assert code == 1, printed
    return printed


@pytest.mark.parametrize(
    ("problem", "remedy"),
    [
        ("h5py is 3.0.1 here, and ", "use one environment on all hosts"),
        ("no data folder is set for dataset 'mnist'", "rank 0 can read it: make the folder visible"),
    ],
)
def test_a_rank_that_differs_is_named(problem, remedy, other_rank):
    lines = [line for line in problems(other_rank) if problem in line]
    assert len(lines) == 1 and lines[0].startswith("rank 1 on ") and remedy in lines[0], other_rank


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path, here):
    (tmp_path / "file").touch()
    code, printed = here("--out", tmp_path / "file" / "run")
    assert code == 1 and len(problems(printed)) == 1, printed
    assert f"the run folder {tmp_path / 'file'} cannot be written (Not a directory); choose a folder" in printed


def test_tasks_of_slurm_that_are_one_process_are_named(monkeypatch, here):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    code, printed = here()
    assert code == 1 and len(problems(printed)) == 1, printed
    assert "this is one process: a world of size 1" in printed and "srun --mpi=pmix (Open MPI)" in printed


def test_worlds_of_size_1_are_named(tmp_path):
    code, printed = doctor("alone", tmp_path, OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2")  # another mpirun's
    assert code == 1 and len(problems(printed)) == 1, printed
    assert problems(printed)[0].startswith("rank 1 on ") and "┃ rank ┃" not in printed
    assert "has started 2 ranks, but MPI sees 1: 2 worlds of size 1; start with the mpirun of Open MPI" in printed


@pytest.mark.slow
@pytest.mark.slurm
def test_a_wrong_flag_of_srun_is_named(slurm, tmp_path):
    config = write(tmp_path, runtime={"transport": "mpi"})
    command = ["srun", "-N2", "--ntasks-per-node=1", *processes.PFLMPI, "doctor", "--config", str(config)]
    done = processes.call(command, cwd=tmp_path, env=ENVIRONMENT)
    lines = problems(done.stdout)
    assert done.returncode == 1 and len(lines) == 2, done.stdout + done.stderr
    assert all("MPI sees 1: 2 worlds of size 1; start with srun --mpi=pmix" in line for line in lines)


def test_variables_that_contradict_each_other_are_named(monkeypatch, here):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    code, printed = here()
    assert code == 1 and len(problems(printed)) == 1, printed
    assert "contradict each other: OMPI_COMM_WORLD_RANK = 2" in printed and "unset what an earlier launch" in printed


@pytest.mark.slow
def test_a_rank_that_never_comes_is_noticed(tmp_path):
    code, printed = doctor("mpi", tmp_path, rank_1="sleep 100")
    assert code == 1, printed
    assert "rank 0 on " in printed and "not all ranks have come within 60 s" in printed and "firewall" in printed


def test_a_torch_that_is_broken_is_named_whatever_needs_it(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "torch.py").write_text("raise ImportError('libcublas.so is missing')")
    config = write(tmp_path)
    code, printed = doctor("alone", tmp_path, "--config", config, PYTHONPATH=first_in_path(tmp_path / "lib"))
    assert code == 1, printed
    assert "torch cannot be imported (libcublas.so is missing); install the package again" in printed


def test_a_configuration_that_is_wrong_everywhere_is_wrong_use(tmp_path):
    command = [*processes.start_way("mpi", 2), "doctor", "--config", "nothing.yaml"]
    done = processes.call(command, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 2 and "rank" not in done.stdout
    assert done.stderr.count("pflmpi: cannot read nothing.yaml: No such file or directory") == 1, done.stderr


def test_a_lock_that_rank_0_holds_is_looked_for(tmp_path, monkeypatch):
    with facts.hold_probe_file(tmp_path) as name:
        assert facts.inspect_folder(tmp_path, name).lock_seen is True
        monkeypatch.setattr(facts.fcntl, "flock", lambda *_: None)  # as where locks hold on one host only
        assert facts.inspect_folder(tmp_path, name).lock_seen is False
    assert list(tmp_path.iterdir()) == []
