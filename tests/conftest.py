"""Fixtures and rules for all tests."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

import testbed

# One thread a process, as the product computes; set before numpy and torch are imported.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# Containers often set it: then every process that a test starts would compile the package anew, half a second each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell ignores SIGINT and SIGQUIT for a job in its background, nohup SIGHUP, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGQUIT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)

# What is started by different workers shares no folder: mpirun keeps one for all of its kind.
OWN = Path(tempfile.gettempdir()) / f"pflmpi-{os.environ.get('PYTEST_XDIST_WORKER', '')}-{os.getpid()}"
if "PYTEST_XDIST_WORKER" in os.environ:
    OWN.mkdir()
    os.environ["TMPDIR"], tempfile.tempdir = str(OWN), None

ALLOWED_SKIPS = (
    "needs a CUDA device",
    "needs real data: set PFLMPI_DATA",
    "needs the Slurm test bed",
    "needs root to mount",
    "needs root to make a namespace",
    "needs mlflow",  # an extra of 300 MB, not among those of the tests
    "needs h5dump",  # this and a browser are programs, which pip does not install
    "needs a browser",
)


def pytest_addoption(parser):
    parser.addoption("--strict-skips", action="store_true", help="fail on a skip whose reason is not a known one")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own hook
def pytest_collection_modifyitems(items):
    """With several workers (`pytest -n 2 --dist loadgroup`) a file is one worker's, and so is all of the test bed."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group("slurm" if item.get_closest_marker("slurm") else str(item.path)))


def pytest_runtest_logreport(report):
    if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
        _SKIPPED.append((report.nodeid, report.longrepr[2].removeprefix("Skipped: ")))


_SKIPPED: list[tuple[str, str]] = []


def pytest_sessionfinish(session, exitstatus):
    shutil.rmtree(OWN, ignore_errors=True)
    unexpected = [f"{node}: {reason}" for node, reason in _SKIPPED if not reason.startswith(ALLOWED_SKIPS)]
    if session.config.getoption("--strict-skips") and unexpected:
        print("\nunexpected skips:\n  " + "\n  ".join(unexpected))
        session.exitstatus = 1


@pytest.fixture
def data_root():
    """The folder with real datasets."""
    root = os.environ.get("PFLMPI_DATA")
    if not root:
        pytest.skip("needs real data: set PFLMPI_DATA")
    return Path(root)


@pytest.fixture(scope="session")
def slurm():
    """A real Slurm, up while the tests that ask for it run."""
    with testbed.cluster():
        yield
