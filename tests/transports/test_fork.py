"""Ranks as forks of one process: what they are told, how they end, and that PyTorch is imported once for all."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import processes
import quick_run

FORKS = """
import os, signal, sys, time
from pathlib import Path
from pflmpi import early_signals
from pflmpi.transports.detect import detect
from pflmpi.transports.start import fork_ranks

folder, way = Path(sys.argv[1]), sys.argv[2]
early_signals.watch(os.environ)

def rank():
    launch = detect(os.environ)
    (folder / f"{launch.rank}").write_text(f"{launch.kind} {launch.size} {os.getsid(0) == os.getpid()}")
    while way != "signal" and launch.rank == 1 and len(list(folder.glob("* waits"))) < 2:
        time.sleep(0.01)
    if way == "one fails" and launch.rank == 1:
        return 7
    if way == "one raises" and launch.rank == 1:
        raise ValueError("from a rank")
    if way == "signal":
        for number in early_signals.FORWARDED.values():
            signal.signal(number, lambda *_: os._exit(75))
    (folder / f"{launch.rank} waits").touch()
    time.sleep(600)

print(fork_ranks(3, rank), flush=True)
"""


# A signal that another thread takes does not interrupt the wait of the main one, just as one that came before it.
MISSED = """
import os, signal, threading, time
from pflmpi.transports.start import _wait_for_failure

rank = os.fork()
if rank == 0:
    time.sleep(20)
    os._exit(0)
signal.signal(signal.SIGTERM, lambda *_: os.kill(rank, signal.SIGKILL))
take = threading.Thread(target=lambda: (time.sleep(0.5), signal.pthread_kill(threading.get_ident(), signal.SIGTERM)))
take.start()
print(_wait_for_failure({rank: 3}))
"""


def forks(folder, way):
    return processes.launch([sys.executable, "-c", FORKS, str(folder), way])


@pytest.mark.parametrize(
    ("way", "outcome"), [("one fails", "Failed(rank=1, code=7)\n"), ("one raises", "Failed(rank=1, code=3)\n")]
)
def test_the_first_rank_that_fails_is_named_and_ends_the_others(way, outcome, tmp_path):
    process = forks(tmp_path, way)
    out, err = process.communicate(timeout=processes.PATIENCE)
    assert (process.returncode, out) == (0, outcome), err
    assert ("ValueError: from a rank" in err) == (way == "one raises")
    contents = {path.name: path.read_text() for path in tmp_path.iterdir() if "waits" not in path.name}
    assert contents == {str(rank): "torchrun 3 True" for rank in range(3)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_all_ranks(number, tmp_path):
    process = forks(tmp_path, "signal")
    processes.wait_for(lambda: len(list(tmp_path.glob("* waits"))) == 3, "three ranks")
    ranks = processes.descendants(process.pid)
    assert len(ranks) == 3
    process.send_signal(number)
    out, err = process.communicate(timeout=processes.PATIENCE)
    assert process.returncode == 0, err
    assert out in [f"Failed(rank={rank}, code=75)\n" for rank in range(3)]
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_a_signal_that_does_not_interrupt_the_wait_for_the_ranks_is_handled():
    done = processes.call([sys.executable, "-c", MISSED])
    assert done.stdout == "Failed(rank=3, code=-9)\n", done.stderr


def test_a_run_on_two_ranks_imports_torch_once_and_its_launcher_never(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(quick_run.settings(training={"rounds": 1})))
    command = [sys.executable, "-X", "importtime", "-m", "pflmpi", "run", str(config), "--out", str(tmp_path / "run")]
    done = processes.call([*command, "--ranks", "2"])
    assert done.returncode == 0, done.stderr
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert imported.count("torch") == 1
    assert not [name for name in imported if name.startswith("torch.distributed.elastic")]


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_an_interrupted_run_says_once_how_it_goes_on(ranks, tmp_path):
    config, run = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(quick_run.settings(training={"rounds": 100_000})))
    words = [sys.executable, "-m", "pflmpi", "run", str(config), "--out", str(run), "--ranks", ranks, "--quiet"]
    process = processes.launch(words)
    while process.poll() is None and not any(run.glob("round_*.h5")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert err.count(f"interrupted; `pflmpi resume {run}` continues from the newest checkpoint") == 1


FAILS = """
import errno, os, sys
from pflmpi.transports import start as fork

os.register_at_fork(after_in_child=lambda: [sum(range(1000)) for _ in range(20_000)])  # an interrupt comes meanwhile
once = fork._fork

def forked():
    if forks:
        raise OSError(errno.EAGAIN, "no more processes")
    forks.append(once())
    return forks[-1]

forks, fork._fork = [], forked
try:
    fork.fork_ranks(2, lambda: 0)
except OSError as error:
    print(error.strerror)
"""


def test_where_not_all_ranks_can_be_started_the_others_end_without_a_word():
    done = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("no more processes\n", "")
