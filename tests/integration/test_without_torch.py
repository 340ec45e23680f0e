"""Reading runs in an environment without torch, torchvision and MPI: what docs/analysis.md names for it is enough.

The environment is a real one, and has links to the distributions that are installed here; nothing is fetched.
"""

import re
import sys
import venv
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import processes
import quick_run
from project import ROOT

HERE = Path(sys.executable)
ABSENT = ("torch", "torchvision", "mpi4py")
OPTIONAL = ("pandas", "safetensors")
OPEN = """
import sys
import numpy as np, pflmpi
run = pflmpi.open_run(sys.argv[1])
weights = run.round().clients["model/head.weight"]
print(type(run.metrics).__name__, len(run.metrics), np.asarray(weights).shape, run.round().digest())
"""


def named():
    """What the documentation tells to install for reading alone."""
    section = (ROOT / "docs" / "analysis.md").read_text()
    assert "`pip install --no-deps -e .`" in section
    (names,) = re.findall(r"`pip install ([a-z][^`]*)`", section)
    return names.split()


def needed(names):
    """The named distributions and all that they need, as they are installed here."""
    distributions: dict[str, metadata.Distribution] = {}
    queue = list(names)
    while queue:
        name = canonicalize_name(queue.pop())
        if name not in distributions:
            distributions[name] = metadata.distribution(name)
            requirements = [Requirement(text) for text in distributions[name].requires or []]
            queue += [need.name for need in requirements if not need.marker or need.marker.evaluate({"extra": ""})]
    return distributions


def environment(folder, names):
    """A virtual environment with nothing but pflmpi and the named distributions; return its Python."""
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "pflmpi").symlink_to(ROOT / "pflmpi")
    for distribution in needed(names).values():
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def laptop(tmp_path_factory):
    return environment(tmp_path_factory.mktemp("laptop"), named())


@pytest.fixture(scope="module")
def fuller(tmp_path_factory):
    """The same with the optional libraries."""
    return environment(tmp_path_factory.mktemp("fuller"), [*named(), *OPTIONAL])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that keeps class means, for which a report needs scikit-learn."""
    folder = tmp_path_factory.mktemp("run") / "fedproto"
    quick_run.run(quick_run.settings(algorithm={"name": "fedproto", "predict_with": "head"}), folder, ranks=2)
    return folder


def call(python, *words, code=0):
    """What an isolated Python says; every warning is an error."""
    done = processes.call([str(python), "-I", "-W", "error", *map(str, words)])
    assert done.returncode == code, done.stdout + done.stderr
    assert code or not done.stderr
    return done.stdout + done.stderr


def pflmpi(python, *words, code=0):
    return call(python, "-m", "pflmpi", *words, code=code)


def present(python):
    """Which of the libraries can be found there."""
    find = "import sys; from importlib.util import find_spec; print(*filter(find_spec, sys.argv[1:]))"
    return set(call(python, "-c", find, *ABSENT, *OPTIONAL).split())


def test_the_environments_have_what_they_should(laptop, fuller):
    assert present(HERE) >= {"torch", "torchvision", *OPTIONAL}
    assert present(laptop) == set()
    assert present(fuller) == set(OPTIONAL)


def test_a_report_has_the_same_figures(laptop, run, tmp_path):
    tables, names = [], []
    for python, out in ((HERE, tmp_path / "here"), (laptop, tmp_path / "there")):
        stdout = pflmpi(python, "report", run, "--out", out)
        assert stdout == f"{out / 'report.html'}\n"
        names.append(sorted(path.relative_to(out) for path in out.rglob("*")))
        tables.append({path.relative_to(out): path.read_text() for path in out.rglob("*.csv")})
    assert names[0] == names[1] and len(tables[0]) > 10
    assert tables[0] == tables[1]
    assert any(path.name.startswith("diagnostic-class_means") for path in tables[0])


def test_a_table_is_the_same(laptop, tmp_path):
    words = ["table", ROOT / "configs/papers/digits.yaml", "--only", "FedGMH/*", "--out", tmp_path]
    assert pflmpi(laptop, *words) == pflmpi(HERE, *words)


@pytest.mark.parametrize("words", [["--digest"], ["--diff", "1", "3"], ["--verify"]], ids=" ".join)
def test_inspect_says_the_same(laptop, run, words):
    stdout = pflmpi(laptop, "inspect", run, *words)
    assert stdout == pflmpi(HERE, "inspect", run, *words)
    assert words != ["--digest"] or stdout.strip() == quick_run.digest(run)


def test_arrays_are_exported_alike(laptop, run, tmp_path):
    exported = []
    for python, file in ((HERE, tmp_path / "here.npz"), (laptop, tmp_path / "there.npz")):
        pflmpi(python, "export", run, "--client", "2", "-o", file)
        with np.load(file, allow_pickle=False) as arrays:
            exported.append({name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()})
    assert "head.weight" in exported[0] and exported[0] == exported[1]


def test_safetensors_are_exported_alike(fuller, run, tmp_path):
    files = [tmp_path / "here.safetensors", tmp_path / "there.safetensors"]
    for python, file in zip((HERE, fuller), files, strict=True):
        pflmpi(python, "export", run, "--client", "2", "-o", file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_file_of_torch_is_refused_with_what_to_do(laptop, run, tmp_path):
    printed = pflmpi(laptop, "export", run, "--client", "2", "-o", tmp_path / "m.pt", code=2)
    assert printed.count("\n") == 1 and "`pip install torch`, or choose .npz" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["run", "resume", "probe", "plan", "list"])
def test_what_computes_is_refused_with_what_is_missing(laptop, run, command):
    words = {"list": [], "resume": [run], "probe": [run]}.get(command, [ROOT / "configs/quickstart.yaml"])
    printed = pflmpi(laptop, command, *words, code=2)
    assert printed.count("\n") == 1 and f"{command} needs torch, which is not installed" in printed


def test_the_example_shows_the_same(laptop, fuller, run):
    words = [ROOT / "examples" / "read_a_run.py", run]
    expected = call(HERE, *words)
    assert call(fuller, *words) == expected
    after_the_metrics = expected[expected.index("best round") :]
    assert call(laptop, *words).endswith(after_the_metrics)


def test_a_run_is_opened_with_and_without_pandas(laptop, fuller, run):
    for python in (laptop, fuller):
        assert call(python, "-c", OPEN, run) == f"recarray 3 (7, 10, 12) {quick_run.digest(run)}\n"
