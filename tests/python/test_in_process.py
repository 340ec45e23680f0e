"""pflmpi.run(..., in_process=True): no process is started, and this one is afterwards what it was."""

import random
import signal
import subprocess
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pflmpi
import quick_run
from pflmpi.commands.progress import round_display
from pflmpi.config.keywords import Config
from pflmpi.errors import ConfigError
from pflmpi.python import run as from_python
from pflmpi.store import run_folder

CONFIG = Config(**quick_run.QUICK)
ATTENTION = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x):
        x = self.conv(x.reshape(len(x), 8, 8))
        return self.head(nn.functional.scaled_dot_product_attention(x, x, x).mean(1))
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return quick_run.run(quick_run.QUICK, tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))


def state():
    """What a notebook may have set, and what it would draw next."""
    backends = torch.backends
    return (
        (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
        (torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory),
        (torch.get_float32_matmul_precision(), backends.cudnn.benchmark, backends.cudnn.deterministic),
        (
            torch.get_rng_state().sum().item(),
            random.getstate(),
            str(np.random.get_state()),
        ),
        (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)),
    )


@pytest.fixture
def odd_settings():
    """Settings that would change the bits of a run, or that a run changes."""
    before = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(3)
    torch.set_default_dtype(torch.float64)
    torch.set_deterministic_debug_mode("warn")
    torch.set_float32_matmul_precision("medium")
    torch.manual_seed(7)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        yield
    torch.set_num_threads(before[0])
    torch.set_default_dtype(before[1])
    torch.set_deterministic_debug_mode("default")
    torch.set_float32_matmul_precision("highest")


def test_it_has_the_bits_of_any_run_and_leaves_every_setting_as_it_was(expected, odd_settings, tmp_path, capsys):
    before, rows = state(), []
    run = pflmpi.run(CONFIG, out=tmp_path / "run", in_process=True, on_round=rows.append)
    assert state() == before
    assert run_folder.digest(run.path, 3) == expected and [row["round"] for row in rows] == [1, 2, 3]
    assert len([line for line in capsys.readouterr().err.splitlines() if line.startswith("round ")]) == 3


def test_what_on_round_raises_leaves_every_setting_as_it_was_and_the_run_can_go_on(expected, odd_settings, tmp_path):
    before = state()

    def stop(row):
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        pflmpi.run(CONFIG, out=tmp_path / "run", in_process=True, quiet=True, on_round=stop)
    with pytest.raises(ConfigError, match="holds a run already"):
        pflmpi.run(CONFIG, out=tmp_path / "run", in_process=True, quiet=True)
    assert state() == before
    run = pflmpi.run(CONFIG, out=tmp_path / "run", in_process=True, quiet=True, resume=True)
    assert run_folder.digest(run.path, 3) == expected and state() == before


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_stops_after_the_round_and_a_second_one_at_once(times, expected, tmp_path):
    before = state()

    def interrupt(row):
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        pflmpi.run(CONFIG, out=tmp_path / "run", in_process=True, quiet=True, on_round=interrupt)
    assert run_folder.rounds(tmp_path / "run")[-1:] == ([1] if times == 1 else [0]) and state() == before
    run = pflmpi.run(CONFIG, out=tmp_path / "run", in_process=True, quiet=True, resume=True)
    assert run_folder.digest(run.path, 3) == expected


def test_what_cannot_be_in_one_process_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"ranks = 2 with in_process=True, which has 1; leave one of them out"):
        pflmpi.run(CONFIG, out=tmp_path / "run", in_process=True, ranks=2)
    with torch.device("meta"), pytest.raises(ConfigError, match=r"default device .*meta; set it to None"):
        pflmpi.run(CONFIG, out=tmp_path / "run", in_process=True)
    assert not (tmp_path / "run").exists()


def test_kernels_that_were_switched_off_change_no_bits_and_stay_off(tmp_path):
    backends, attention = torch.backends, torch.backends.cuda
    (tmp_path / "net.py").write_text(ATTENTION)
    config = CONFIG.replace(model={"name": f"{tmp_path / 'net.py'}:Net", "head": "head"}, training={"rounds": 1})
    expected = quick_run.run(config.resolved(), tmp_path / "expected", 1)
    backends.mkldnn.enabled = False
    attention.enable_flash_sdp(False)
    try:
        run = pflmpi.run(config, out=tmp_path / "run", in_process=True, quiet=True)
        assert run.round().digest() == expected
        assert not backends.mkldnn.enabled and not attention.flash_sdp_enabled()
    finally:
        backends.mkldnn.enabled = True
        attention.enable_flash_sdp(True)


def test_a_run_in_a_second_thread_is_refused_while_one_is_going_on_and_one_within_a_run_is_not(tmp_path):
    before, errors = state(), []

    def start(name):
        try:
            pflmpi.run(CONFIG, out=tmp_path / name, in_process=True, quiet=True)
        except ConfigError as error:
            errors.append(str(error))

    def start_two(row):
        if row["round"] == 1:
            thread = threading.Thread(target=start, args=("second",))
            thread.start()
            thread.join()
            start("within")

    pflmpi.run(CONFIG, out=tmp_path / "run", in_process=True, quiet=True, on_round=start_two)
    start("after")
    assert [("another thread" in error, "leave in_process out" in error) for error in errors] == [(True, True)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "run", "within"] and state() == before


@pytest.fixture
def notebook(monkeypatch):
    """The displays of a notebook: for each, the texts that it has shown."""
    displays = []

    def display(content, raw, display_id):
        assert raw and display_id
        displays.append([content["text/plain"]])
        return SimpleNamespace(update=lambda content, raw: displays[-1].append(content["text/plain"]))

    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr("builtins.get_ipython", lambda: shell, raising=False)
    monkeypatch.setitem(__import__("sys").modules, "IPython.display", SimpleNamespace(display=display))
    return displays


def test_a_notebook_has_one_display_for_all_rounds(notebook, tmp_path, capsys):
    pflmpi.run(CONFIG, out=tmp_path / "run", in_process=True)
    assert len(notebook) == 1 and [text.split()[:2] for text in notebook[0]] == [["round", f"{n}/3"] for n in (1, 2, 3)]
    assert "round " not in capsys.readouterr().err


def test_the_rounds_of_other_processes_are_in_one_display_too(notebook, capsys):
    lines = ["fedavg on digits\n", "round 1/2  participants 3\n", "round 2/2  participants 3\n", "pflmpi: a warning\n"]
    from_python._show_stderr(SimpleNamespace(stderr=lines))
    assert notebook == [["round 1/2  participants 3", "round 2/2  participants 3"]]
    assert capsys.readouterr().err == "fedavg on digits\npflmpi: a warning\n"


def test_elsewhere_a_round_is_a_line_of_stderr(capsys):
    round_display()("round 1/2")
    assert capsys.readouterr().err == "round 1/2\n"
