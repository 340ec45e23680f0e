"""What README.md and docs/ say is what the product does: their commands are run as written."""

import os
import pydoc
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml

import pflmpi
import processes
import quick_run
import testbed
from pflmpi.algorithms import ALGORITHMS
from pflmpi.cli import main, parser
from pflmpi.config import load as configuration
from pflmpi.errors import RunError, Stopped, UserError
from pflmpi.store import run_folder
from pflmpi.sweep import table
from project import ROOT

README = ROOT / "README.md"
FIRST_HOUR = ROOT / "docs" / "first-hour.md"  # whose commands test_first_hour.py runs
CLUSTERS = ROOT / "docs" / "clusters.md"
PAGES = [README, *sorted({*(ROOT / "docs").glob("*.md")} - {FIRST_HOUR})]


def blocks(language: str, pages: list[Path] = PAGES) -> list[str]:
    """The contents of the code blocks in a language."""
    by_page = [re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL) for page in pages]
    return [text.strip() for texts in by_page for text in texts]


def section(title: str) -> str:
    """The text under a heading of the README, up to the next one of the same level."""
    match = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README.read_text(), re.MULTILINE | re.DOTALL)
    assert match, f"README has no section {title!r}"
    return match[1]


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]
SCRIPTS = COMMANDS[:2]
RUNS = [line for line in COMMANDS if re.match(r"(pflmpi|launch/mpirun -n|torchrun|srun)\b.* run ", line)]
WRAPPED = [line for line in COMMANDS if re.match(r"launch/.* run ", line) and line not in RUNS]
LOCAL = [line for line in [*RUNS, *WRAPPED] if not line.startswith("srun")]
TABLES = [line for line in COMMANDS if re.match(r"pflmpi (sweep|table) configs/papers/", line)]
JOBS = [line for line in COMMANDS if re.match(r"(pflmpi submit|sbatch)\b(?!.*--(test-only|failed))", line)]
CANCELLED = [line for line in COMMANDS if re.match(r"pflmpi cancel\b", line)]  # in test_slurm_jobs.py
READERS = "inspect|export|probe|evaluate|compare|watch|(report|status) runs/|fork|resume|prune|bisect|contribution"
READ = rf"(pflmpi ({READERS})|(launch/mpirun -n \d )?python examples/)"
READING = [line for line in COMMANDS if re.match(READ, line)]
SCALED = [line for line in COMMANDS if re.match(r"pflmpi (scale|report scaling/)", line)]  # jobs: test_slurm_jobs.py
ADVICE = [line for line in COMMANDS if re.search(r"pflmpi (plan|doctor|status)\b(?! runs/)|--test-only|--failed", line)]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """An active virtual environment in which pip can fetch nothing, so that only what is there is used."""
    path = f"{processes.BIN}{os.pathsep}{os.environ['PATH']}"
    return {**processes.ENVIRONMENT, "PATH": path, "VIRTUAL_ENV": sys.prefix, "PIP_NO_INDEX": "1"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> tuple[Path, str]:
    """A folder where the commands run, with a copy of configs/ that has 5 of the quickstart's 30 rounds; and the digest
    that launch/quickstart gives with these.
    """
    folder = tmp_path_factory.mktemp("readme")
    for name in ("configs", "launch", "slurm"):
        shutil.copytree(ROOT / name, folder / name)
    config = folder / "configs" / "quickstart.yaml"
    config.write_text(config.read_text().replace("rounds: 30,", "rounds: 5,"))
    before = packages(environment)
    start = [str(ROOT / SCRIPTS[0]), "--out", str(folder / "quickstart"), "-s", "training.rounds=5"]
    done = processes.call(start, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert packages(environment) == before, "the script has left an active environment as it is"
    return folder, quick_run.digest(folder / "quickstart")


def packages(environment: dict[str, str]) -> tuple[str, bool]:
    """What is installed, and whether the checkout has a virtual environment of its own."""
    listing = "import importlib.metadata as m; print(sorted((d.name, d.version) for d in m.distributions()))"
    done = processes.call([sys.executable, "-c", listing], env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, (ROOT / ".venv").exists()


# --- commands -----------------------------------------------------------------------------------------------------


def test_the_readme_begins_with_the_scripts_and_shows_every_start_way():
    assert len(README.read_text().splitlines()) <= 200
    assert COMMANDS[:2] == ["launch/quickstart", "launch/test"] == SCRIPTS
    assert [line.split()[0] for line in RUNS] == ["pflmpi", "launch/mpirun", "torchrun", "srun"]
    folders = [re.search(r"--out (\S+)", line)[1] for line in [*RUNS, *WRAPPED]]
    assert len(set(folders)) == len(folders), "each run has a folder of its own"
    assert [line.split()[1] for line in TABLES] == ["sweep", "table"]
    tested = [*SCRIPTS, *RUNS, *WRAPPED, *TABLES, *JOBS, *ADVICE, *CANCELLED, *READING, *SCALED]
    assert sorted(COMMANDS) == sorted(tested), "a command that no test runs"


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("command", LOCAL)
def test_a_start_way_gives_the_digest_of_the_quickstart(command, alone, environment):
    folder, expected = alone
    words = shlex.split(command)
    done = processes.call(words, timeout=240, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    run = folder / words[words.index("--out") + 1]
    assert quick_run.digest(run) == expected
    shown = processes.call(["pflmpi", "inspect", str(run), "--digest"], env=environment)
    assert shown.stdout.strip() == expected


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.timeout(280)
def test_srun_gives_the_digest_of_the_quickstart(request, environment):
    request.getfixturevalue("slurm")
    folder, expected = request.getfixturevalue("alone")
    words = shlex.split(next(line for line in RUNS if line.startswith("srun")))
    done = processes.call(words, timeout=240, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert quick_run.digest(folder / words[words.index("--out") + 1]) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [pytest.param(line, marks=[pytest.mark.slurm] * bool(re.match("pflmpi (status|submit)", line))) for line in ADVICE],
)
def test_advice_is_given(command, request, environment, tmp_path):
    for name in ("configs", "launch"):
        shutil.copytree(ROOT / name, tmp_path / name)
    if request.node.get_closest_marker("slurm"):
        request.getfixturevalue("slurm")
    done = processes.call(shlex.split(command), env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_scaling_experiment_is_made_and_reported(environment, tmp_path):
    """With one short run of each point."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for command in (line for line in SCALED if "--submit" not in line):
        command = command.replace("--repeats 3 --rounds 6", "--repeats 1 --rounds 2")
        done = processes.call(shlex.split(command, comments=True), timeout=240, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "scaling" / "quickstart-strong" / "scale.html").exists()


@pytest.mark.slow
def test_a_run_is_read_as_it_says(environment, tmp_path, monkeypatch, capfd):
    """The commands in this process, for which no rank is started: each start of Python and PyTorch takes seconds."""
    monkeypatch.chdir(tmp_path)
    quick_run.run(configuration.read(ROOT / "configs" / "quickstart.yaml"), tmp_path / "runs" / "alone")
    shutil.copytree(tmp_path / "runs" / "alone", tmp_path / "runs" / "mpi")
    for name in ("configs", "examples", "launch"):
        shutil.copytree(ROOT / name, tmp_path / name)
    assert READING
    for command in READING:
        words = shlex.split(command)
        if words[0] == "pflmpi" and words[1] != "resume":
            assert quick_run.command(words[1:]) == 0, f"{command}\n{capfd.readouterr()}"
            continue
        done = processes.call(words, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    for block in blocks("python", [page for page in PAGES if page != CLUSTERS]):
        done = processes.call([sys.executable, "-c", block], env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.timeout(290)
@pytest.mark.parametrize("command", JOBS)
def test_a_job_ends_well(command, slurm, request, environment):
    """With two ranks where the scripts have eight, which this machine has no cores for."""
    folder, expected = request.getfixturevalue("alone")
    words = shlex.split(command)
    smaller = ["--nodes=1", "--ntasks-per-node=2"] if words[0] == "sbatch" else ["--ntasks=2", "--nodes=1"]
    smaller += ["--array=0"] * ("slurm/array.sbatch" in words) + ["--seeds=1"] * ("--array" in words)
    array = "slurm/array.sbatch" in words or "--array" in words
    words = [word for word in words if not word.startswith(("--ntasks", "--array="))]
    at = 1 if words[0] == "sbatch" else 2  # after `pflmpi submit`
    done = processes.call([*words[:at], *smaller, *words[at:]], env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    number = re.search(r"job (\d+)", done.stdout)
    assert number, done.stdout
    job = f"{number[1]}_0" if array else number[1]
    log = Path(testbed.fields(job)["StdOut"])
    assert testbed.wait_until(job, timeout=280) == "COMPLETED", log.read_text()
    if array:
        assert run_folder.rounds(folder / "sweeps" / "digits" / "FedGMH" / "digits" / "seed0")[-1] == 30
        return
    runs = [folder / word for word in words if word.startswith("runs/")] or [folder / "runs" / "quickstart"]
    for run in runs:
        assert quick_run.digest(run) == expected


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.timeout(290)
def test_a_notebook_on_a_cluster_gives_the_digest_of_the_quickstart(slurm, request, environment):
    folder, expected = request.getfixturevalue("alone")
    (block,) = blocks("python", [CLUSTERS])
    shown = f"{block}\nprint(run.round().digest())"
    done = processes.call([sys.executable, "-c", shown], timeout=280, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == expected


@pytest.mark.slow
def test_the_quickstart_can_be_started_again_and_passes_arguments_on(alone, environment, tmp_path):
    start = [str(ROOT / SCRIPTS[0]), "--out", str(tmp_path / "again"), "-s", "training.rounds=1", "--quiet"]
    done = processes.call(start, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert quick_run.digest(tmp_path / "again") != alone[1]
    assert f"run: {tmp_path / 'again'}" in done.stdout
    again = processes.call(start, env=environment, cwd=tmp_path)
    assert again.returncode == 2 and "holds a run already" in again.stderr


@pytest.mark.slow
def test_a_table_is_run_and_reported(environment, tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for command in TABLES:
        done = processes.call(shlex.split(command), timeout=240, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "FedGMH" in done.stdout and "a part of the table, which is not written" in done.stdout
    assert not [*tmp_path.rglob("digits.md")]


@pytest.mark.slow
def test_the_test_script_collects_the_tests(environment, tmp_path):
    before = packages(environment)
    quiet = ["--collect-only", "-q", "-p", "no:cacheprovider"]
    done = processes.call([str(ROOT / SCRIPTS[1]), *quiet], env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{Path(__file__).relative_to(ROOT)}::" in done.stdout
    assert packages(environment) == before


# --- what it says -------------------------------------------------------------------------------------------------


def test_the_configuration_block_is_the_quickstart(tmp_path):
    (block,) = blocks("yaml", [README])
    path = tmp_path / "readme.yaml"
    path.write_text(block)
    written = configuration.read(path)
    assert set(written) == {"seed", "data", "partition", "model", "algorithm", "training"}
    quickstart = configuration.load(ROOT / "configs" / "quickstart.yaml")
    assert configuration.parse(written).resolved() == quickstart.resolved()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_beside_it_is_valid(path):
    resolved = configuration.load(path).resolved()
    assert configuration.parse(resolved).resolved() == resolved


def test_the_table_file_in_the_documentation_is_valid(tmp_path):
    (block,) = blocks("yaml", [ROOT / "docs" / "tables.md"])
    path = tmp_path / "table.yaml"
    path.write_text(block)
    cells = table.list_cells(table.load(path), (), None)
    assert len(cells) == 8
    for cell in cells:
        configuration.parse(cell.raw)


def test_the_algorithm_table_is_what_the_command_prints(capsys):
    assert main(["list", "--markdown"]) == 0
    assert capsys.readouterr().out in (ROOT / "docs" / "algorithms.md").read_text()


def test_the_readmes_algorithms_are_those_of_the_five_papers():
    rows = [line.strip("| ").split(" | ") for line in section("Algorithms").splitlines() if line.startswith("| `")]
    assert len(rows) == 5
    for name, _, paper in rows:
        assert ALGORITHMS[name.strip("`")].paper == paper


def test_the_command_table_has_every_command_with_options_that_exist():
    texts = re.findall(r"`(pflmpi [a-z]+[^`]*)`", section("Commands"))
    top = parser()
    commands = next(action.choices for action in top._actions if isinstance(action.choices, dict))
    documented: dict[str, set[str]] = {}
    for text in texts:
        words = re.findall(r"--?[a-z-]+|[a-z]+", text.removeprefix("pflmpi "))
        documented.setdefault(words[0], set()).update(word for word in words if word.startswith("-"))
    assert documented.keys() == commands.keys()
    for name, options in documented.items():
        assert options - {"--"} <= set(commands[name]._option_string_actions), name


def test_the_exit_codes_are_those_of_the_errors():
    assert (UserError.exit_code, RunError.exit_code, Stopped.exit_code) == (2, 3, 75)
    documented = dict(re.findall(r"^\| (\d+) \| (.*) \|$", section("Commands"), re.MULTILINE))
    begin = {"0": "done", "1": "a run of a sweep failed", "2": "wrong input", "3": "a fault during the run"}
    begin |= {"75": "stopped after a complete round", "130": "interrupted (Ctrl-C)"}
    assert documented.keys() == begin.keys()
    assert all(documented[code].startswith(text) for code, text in begin.items())


# --- what lies beside it ------------------------------------------------------------------------------------------


def test_links_and_pictures_lead_to_files():
    pages = [
        *PAGES,
        FIRST_HOUR,
        *ROOT.glob("*.md"),
        *(ROOT / "results").glob("*.md"),
        *(ROOT / "configs").rglob("*.md"),
    ]
    for page in pages:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        links = re.findall(r"\]\(([^)]+)\)", text)
        lost = [link for link in links if "://" not in link and not (page.parent / link.partition("#")[0]).exists()]
        assert not lost, f"{page.relative_to(ROOT)}: {lost}"


def test_the_pages_are_in_the_readmes_list_and_what_the_page_of_the_python_interface_names_is_there():
    named = re.findall(r"\((docs/[\w-]+\.md)\)", section("Read on"))
    assert sorted(named) == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
    names = re.findall(r"^\.\. auto\w+:: (\S+)", (ROOT / "docs" / "api.rst").read_text(), re.MULTILINE)
    assert len(names) > 20 and not [name for name in names if pydoc.locate(name) is None]


@pytest.mark.slow
def test_the_pictures_are_small_and_can_be_drawn(environment, tmp_path):
    pictures = [ROOT / path for path in re.findall(r"^!\[.*\]\((.*)\)$", README.read_text(), re.MULTILINE)]
    assert len(pictures) == 2 and sum(path.stat().st_size for path in pictures) < 150_000
    done = processes.call([str(ROOT / "docs/images/draw"), str(tmp_path), "FedGMH"], timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {path.name for path in pictures}
    assert (tmp_path / "accuracy_against_bytes.png").exists()


def test_scripts_that_contributors_are_told_to_run_exist():
    lines = [line for block in blocks("bash", [ROOT / "CONTRIBUTING.md"]) for line in block.splitlines()]
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    lines += [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    lines += [hook["entry"] for repository in hooks["repos"] for hook in repository["hooks"]]
    ours = {line.split()[0] for line in lines}
    assert ours == {"launch/test", ".ci/lint", ".ci/docs", ".ci/run"}
    assert all(os.access(ROOT / path, os.X_OK) for path in ours)
    commands = (ROOT / ".ci/run").read_text().splitlines()
    assert {line.split()[0] for line in commands if line.startswith(("launch/", ".ci/"))} == ours - {".ci/run"}


def test_the_citation_has_this_version_and_the_five_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (pflmpi.__version__, "Apache-2.0")
    named = [reference["notes"].removeprefix("algorithm ").partition(";")[0] for reference in citation["references"]]
    assert sorted(named) == sorted(re.findall(r"^\| `(\w+)`", section("Algorithms"), re.MULTILINE))
