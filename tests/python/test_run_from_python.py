"""`pflmpi.run` from a script: its ranks are processes, its errors are exceptions, and this process stays as it is."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import pflmpi
import processes
import quick_run
from pflmpi.config import yaml_file
from pflmpi.config.keywords import Config
from pflmpi.errors import ConfigError, DataError
from pflmpi.python.run import Row
from pflmpi.store import run_folder
from project import ROOT

CONFIG = Config(**quick_run.QUICK)


def test_it_gives_the_bits_of_the_command_and_tells_each_round(tmp_path: Path) -> None:
    expected = quick_run.run(quick_run.settings(), tmp_path / "here")
    rows: list[Row] = []
    run = pflmpi.run(CONFIG, out=tmp_path / "run", ranks=2, on_round=rows.append, quiet=True)
    assert run.round().digest() == expected
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert [row["accuracy_mean"] for row in rows] == run.columns["accuracy_mean"].tolist()
    with pytest.raises(ConfigError, match="holds a run already"):
        pflmpi.run(CONFIG, out=tmp_path / "run", ranks=1, quiet=True)
    assert run_folder.digest(run.path, 3) == expected


def test_errors_have_the_class_that_they_have_where_they_are_raised(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml_file.dump({**quick_run.QUICK, "partition": {"path": str(tmp_path / "none.npz")}}))
    with pytest.raises(DataError, match=r"none\.npz does not exist"):
        pflmpi.run(file, out=tmp_path / "run", ranks=1, quiet=True)
    with pytest.raises(ConfigError, match="ranks = 0: must be a whole number of at least 1"):
        pflmpi.run(CONFIG, ranks=0)
    with pytest.raises(ConfigError, match="out = '' names no folder"):
        pflmpi.run(CONFIG, out="")


def test_what_on_round_raises_stops_the_run_which_can_go_on(tmp_path: Path) -> None:
    long = CONFIG.replace(training={"rounds": 2000}, checkpoint={"every": 2000})

    def refuse(row: Row) -> None:
        if row["round"] >= 5:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        pflmpi.run(long, out=tmp_path / "run", ranks=1, on_round=refuse, quiet=True)
    (done,) = run_folder.rounds(tmp_path / "run")[-1:]
    assert 5 <= done < 2000


@pytest.mark.slow
def test_an_interrupt_stops_after_the_round_and_leaves_no_process(tmp_path: Path) -> None:
    script = (
        "import pflmpi\n"
        f"config = pflmpi.Config.load({str(tmp_path / 'config.yaml')!r})\n"
        "try:\n"
        f"    pflmpi.run(config, out={str(tmp_path / 'run')!r}, ranks=2, on_round=lambda row: print('round'))\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    (tmp_path / "config.yaml").write_text(yaml_file.dump(quick_run.settings(training={"rounds": 100_000})))
    process = subprocess.Popen([sys.executable, "-uc", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == "round\n"
    below = processes.descendants(process.pid)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=processes.PATIENCE)
    assert out.endswith("interrupted\n") and process.returncode == 0
    assert below and not any(Path(f"/proc/{one}").exists() for one in below)
    assert run_folder.rounds(tmp_path / "run")


@pytest.mark.slow
def test_the_ranks_stop_when_their_notebook_is_killed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml_file.dump(quick_run.settings(training={"rounds": 100_000})))
    script = f"import pflmpi; pflmpi.run({str(tmp_path / 'config.yaml')!r}, out={str(tmp_path / 'run')!r}, ranks=2)"
    process = processes.launch([sys.executable, "-c", script], cwd=ROOT)
    processes.wait_for(lambda: (tmp_path / "run" / "metrics.csv").exists(), "the run")
    below = processes.descendants(process.pid)
    process.kill()
    processes.wait_for(lambda: not any(Path(f"/proc/{one}").exists() for one in below), "the end of the ranks")
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["alone", "mpirun", "torchrun", "by hand"])
def test_the_example_runs_in_every_way_with_the_same_bits(way: str, tmp_path: Path) -> None:
    """Two runs in a process; by hand, as under srun without MPI, its rank 0 hosts the store in which the ranks meet."""
    command = {
        "alone": [sys.executable],
        "mpirun": [str(ROOT / "launch" / "mpirun"), "-n", "3", "python"],
        "torchrun": [str(ROOT / "launch" / "torchrun"), "--nproc-per-node=2", "python"],
        "by hand": ["bash", "-c", 'RANK=1 "$@" & RANK=0 "$@"; code=$?; wait $! && exit $code', "", sys.executable],
    }[way]
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    active = {"VIRTUAL_ENV": sys.prefix, "PATH": f"{processes.BIN}:{os.environ['PATH']}"}
    variables = {**processes.ENVIRONMENT, **active, **(meeting if way == "by hand" else {})}
    done = processes.call(
        [*command, str(ROOT / "examples" / "from_python.py"), str(tmp_path / "runs")], cwd=ROOT, env=variables
    )
    assert done.returncode == 0, done.stderr
    assert "fedavg: 4 rounds, best accuracy" in done.stdout and "fedgmh: 4 rounds" in done.stdout
    (line,) = {line for line in done.stdout.splitlines() if line.startswith("client 2 of fedavg")}
    right, recorded = line.split(": ")[1].split()[0], line.split()[-1]
    assert right == recorded
