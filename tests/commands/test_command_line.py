"""The command line: help, what each command prints, and a run from the command line alone."""

import argparse
import json
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import yaml

import pflmpi
import processes
import quick_run
from pflmpi.algorithms import ALGORITHMS
from pflmpi.cli import main, parser
from pflmpi.cluster import batch_script
from pflmpi.commands import described
from pflmpi.commands.progress import RunProgress
from pflmpi.config import load as configuration
from pflmpi.data.partitions import PARTITIONS
from pflmpi.experiment.build import load_federation
from pflmpi.experiment.outside_code import REGISTRIES
from pflmpi.models import MODELS
from pflmpi.runtime.progress import Progress
from pflmpi.store import run_folder
from project import ROOT

NAMES = {  # of the commands, and of the options of each (besides --help and --debug, and those of sbatch)
    "examples": "",
    "docs": "",
    "list": "--json --markdown",
    "data": "--client --force --json --label --layout --picture --save --set --task",
    "run": "--bar --changed-code --continue --out --quiet --ranks --restarts --set --take-over",
    "resume": "--bar --changed-code --quiet --ranks --restarts --set --take-over",
    "fork": "--allow-older --changed-code --out --round --set --without-client",
    "contribution": "--clients --from --out --ranks --set",
    "prune": "--dry-run --every --keep",
    "sweep": "--anew --budget --cell --changed-code --dry-run --failed --jobs --json --launcher --only --out --ranks "
    "--python --seeds --set",
    "search": "--budget --jobs --out --ranks --rungs --seed --set --submit",
    "inspect": "--allow-older --diff --digest --json --round --verify",
    "watch": "--every",
    "compare": "--json",
    "bisect": "--replay",
    "report": "--csv --out --pdf --png --target --to --watch",
    "table": "--only --out --seeds --set --write",
    "export": "--all --allow-older --client --compress --force --leaf --out --round --server --table",
    "evaluate": "--after-training --allow-older --changed-code --data --force --out --round --set --split --unseen "
    "--updates",
    "probe": "--allow-older --changed-code --clients --round --samples --set",
    "plan": "--delay --gpu-memory --gpus --json --memory --ranks --rate --set",
    "doctor": "--config --json --out",
    "submit": "--anew --array --changed-code --dry-run --failed --jobs --mpi --only --out --pack --requeue "
    "--restarts --seeds --set --setup --site --srun --test-only --trial --wait",
    "status": "--json --wait",
    "cancel": "",
    "scale": "--dry-run --json --mode --mpi --out --ranks --repeats --rounds --set --setup --submit --to",
}
SBATCH = {f"--{name}" for name in batch_script.KNOWN}
HEAVY = ("torch", "numpy", "pydantic", "rich", "yaml", "h5py", "sklearn")


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(quick_run.settings()))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of three rounds that keeps two checkpoints."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    quick_run.run(quick_run.settings(checkpoint={"keep": 2}), folder)
    return folder


def commands():
    return next(dict(action.choices) for action in parser()._actions if isinstance(action.choices, dict))


# --- help ---------------------------------------------------------------------------------------------------------


def test_the_names_of_commands_and_options_are_frozen():
    for name, command in commands().items():
        shown = [action for action in command._actions if action.option_strings and action.help != argparse.SUPPRESS]
        options = {action.option_strings[-1] for action in shown}
        assert options - {"--help", "--debug"} - SBATCH == set(NAMES[name].split()), name
    assert list(commands()) == list(NAMES)


def test_every_command_and_every_option_has_help(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line in ("run:", "look:", "cluster:")] == [
        "run:",
        "look:",
        "cluster:",
    ]
    for name, command in commands().items():
        assert re.search(rf"^  {name} +\S", shown, re.MULTILINE), name
        assert not [action.dest for action in command._actions if not action.help and action.metavar != "X"], name


def test_every_command_shows_an_example_that_it_takes():
    for name, command in commands().items():
        examples = re.findall(rf"^  (pflmpi {name}\b.*)$", command.format_help(), re.MULTILINE)
        assert examples, name
        for example in examples:
            options = parser().parse_args(shlex.split(example.partition(" -- ")[0])[1:])
            assert options.command == name


def test_help_cuts_no_option_at_its_hyphens(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    for name, command in commands().items():
        assert not re.search(r"[\w']-+\n", command.format_help()), name


def test_help_loads_nothing_heavy():
    command = [str(processes.BIN / "pflmpi"), "--help"]
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", *command], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in shown.stderr.splitlines() if "|" in line}
    assert "argparse" in loaded and not loaded & set(HEAVY)
    assert shown.stdout.startswith("usage: pflmpi")


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"pflmpi {pflmpi.__version__}\n"


def test_too_old_a_torch_is_refused_with_the_oldest_that_works(config):
    old = """
import sys, torch, torch._functorch.pyfunctorch
torch.__version__ = "2.9.1+cpu"
del torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack  # an old one may lack what is imported
from pflmpi.cli import main
sys.exit(main(sys.argv[1:]))"""
    done = processes.call([sys.executable, "-c", old, "run", str(config)], cwd=config.parent)
    (needed,) = re.findall(r"^    torch(>=.*)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert done.returncode == 2 and done.stdout == ""
    assert f"torch 2.9.1+cpu is too old, pflmpi needs {needed[2:]} or newer: pip install 'torch{needed}'" in done.stderr


# --- commands that show -------------------------------------------------------------------------------------------


def test_a_terminal_without_a_width_is_shown_tables_all_the_same(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    assert main(["list"]) == 0
    assert "fedgmh" in capsys.readouterr().out


def test_list_has_one_line_of_80_columns_for_everything_registered(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    names = [name for registry in REGISTRIES.values() for name in registry]
    assert [line.split()[0] for line in lines if line.startswith("  ")] == names
    assert max(map(len, lines)) <= 80 and "…" not in text, "no summary is cut"
    assert len(lines) <= len(names) + len(REGISTRIES) * 2 + 2
    assert "fedgmh" in text and ALGORITHMS["fedgmh"].summary in text


def test_list_describes_one_algorithm(capsys):
    assert main(["list", "fedgmh"]) == 0
    text = capsys.readouterr().out
    kind = ALGORITHMS["fedgmh"]
    assert kind.summary in text and kind.paper in text and "Label Interference Elimination" in text
    # Labels and means of 2 classes; 2 heads of 512 x 10 + 10.
    assert "4.01 KiB: means (class means)" in text and round(2 * (4 * 512 + 4) / 2**10, 2) == 4.01
    assert "40.08 KiB: heads (of its classes)" in text and round(2 * 4 * 5130 / 2**10, 2) == 40.08
    assert main(["list", "fedavg"]) == 0
    assert capsys.readouterr().out.count("2.22 MiB") == 2 and round(582026 * 4 / 2**20, 2) == 2.22


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mnist", ["data: {name: mnist}", "70000 handwritten digits"]),
        ("cnn", ["model: {name: cnn}", "kernel", "parameters"]),
        ("exdir", ["partition: {name: exdir}", "classes_per_client", "Dir(alpha)"]),
    ],
)
def test_list_describes_a_dataset_a_model_and_a_partition(name, words, capsys):
    assert main(["list", name]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in words), text


def test_list_shows_types_of_lists_as_they_are_written(capsys):
    for name, types in (
        ("output", ["list "]),
        ("pfedcfr", ["list[int] | null", "list[attention | mean | own] | null"]),
    ):
        assert main(["list", name]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert all(kind in text for kind in types) and "typing." not in text, text


@pytest.mark.parametrize("section", ["algorithm", "model", "partition", "measure"])
def test_list_of_a_section_whose_keys_depend_on_the_name_lists_its_names(section, capsys):
    assert main(["list", section]) == 0
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert lines == list(REGISTRIES[section])
    assert main(["list", section, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in shown["names"]] == lines and shown["sections"] == []


def test_list_describes_what_is_in_a_file_of_ones_own(tmp_path, capfd):
    own = tmp_path / "net.py"
    own.write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        '    """A net of my own."""\n'
        "    def __init__(self, num_classes, width: int = 8):\n"
        "        super().__init__()\n"
        "        self.fc = nn.Linear(width, num_classes)\n"
    )
    assert main(["list", f"{own}:Net"]) == 0
    shown = capfd.readouterr().out
    assert "A net of my own" in shown and "width" in shown and "model: {name:" in shown
    assert main(["list", str(ROOT / "examples/clipped.py:Clipped")]) == 0
    assert "algorithm: {name:" in capfd.readouterr().out
    assert main(["list", f"{own}:Not"]) == 2
    assert capfd.readouterr().err == f"pflmpi: {own} has no 'Not'; known: Net\n"


def test_list_of_a_section_has_every_key_with_type_range_default_and_meaning(capsys):
    resolved = configuration.parse(quick_run.settings()).resolved()
    for section, rows in described.sections().items():
        assert all(row[1] and row[2] and row[3] for row in rows), section
        assert {row[0].partition(".")[0] for row in rows} >= set(resolved[section] if section != "seed" else ["seed"])
    for kind, registry in (("algorithm", ALGORITHMS), ("model", MODELS), ("partition", PARTITIONS)):
        for name, registered in registry.items():
            assert all(all(row) for row in described.keys(kind, name, registered)), name
    for name, words in {
        "training": ["participation", "float, above 0, at most 1", "1.0", "share of the clients"],
        "seed": ["seed", "int, at least 0", "0"],
        "exdir": ["classes_per_client", "int, at least 1", "required"],
        "fedgmh": ["variant", "full | onehead | avghead | oneavg", "full"],
    }.items():
        assert main(["list", name]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any(all(word in line for word in words) for line in lines), words


def test_data_of_a_configuration_shows_who_holds_what_and_the_hash(config, tmp_path, capsys):
    federation = load_federation(configuration.load(config))
    assert main(["data", str(config), "--save", str(tmp_path / "who.npz")]) == 0
    text = capsys.readouterr().out
    assert federation.digest in text.replace("\n", "")
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*\d+\s+\d+\s+\d+\s+\d+\s", line)]
    sizes = zip(range(7), federation.num_train, federation.num_test, (federation.class_counts > 0).sum(1), strict=True)
    assert [row[:4] for row in rows] == [[str(value) for value in size] for size in sizes]
    reused = configuration.parse({**quick_run.settings(), "partition": {"path": str(tmp_path / "who.npz")}})
    assert load_federation(reused).digest == federation.digest
    assert main(["data", str(config), "--save", str(tmp_path / "who.csv")]) == 2
    assert not (tmp_path / "who.csv").exists()
    assert main(["data", str(config), "-s", "seed=4"]) == 0
    assert federation.digest not in capsys.readouterr().out.replace("\n", "")


def test_inspect_prints_the_digest_of_the_newest_round(finished, capsys):
    assert main(["inspect", str(finished), "--digest"]) == 0
    assert capsys.readouterr().out == run_folder.digest(finished, 3) + "\n"


def test_inspect_prints_the_digest_of_a_named_round(finished, capsys):
    assert main(["inspect", str(finished), "--digest", "--round", "2"]) == 0
    second = capsys.readouterr().out
    assert second == run_folder.digest(finished, 2) + "\n" != run_folder.digest(finished, 3) + "\n"


def test_inspect_shows_every_array_with_its_shape(finished, capsys):
    assert main(["inspect", str(finished), "--round", "2"]) == 0
    text = capsys.readouterr().out
    assert "round 2" in text and "checkpoints: 2, 3" in text
    assert f"digest: {run_folder.digest(finished, 2)}" in text
    for path, shape in (("server/heads/weight", "[10, 10, 12]"), ("clients/model/head/weight", "[7, 10, 12]")):
        assert any(path in line and shape in line for line in text.splitlines()), path
    assert "metrics/correct" in text and "bytes/up" in text


# --- runs ---------------------------------------------------------------------------------------------------------


def test_a_run_without_out_has_a_folder_of_its_name_and_time_and_goes_on_with_other_ranks(config, tmp_path):
    digest = quick_run.run(quick_run.settings(training={"rounds": 4}), tmp_path / "whole")
    words = ["run", str(config), "--ranks", "2", "-s", "training.rounds=2"]
    done = processes.call([*processes.PFLMPI, *words], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"small-\d{8}-\d{6}", folder.name)
    assert done.stdout.splitlines()[-1] == f"run: runs/{folder.name}"
    first, start, *rounds = done.stderr.splitlines()
    about = "fedgmh with mlp on digits, 7 clients"
    assert first == f"{about}, 2 rounds; 2 ranks, on CPU; writes runs/{folder.name}", "the ranks write where it said"
    assert start.startswith(f"pflmpi {pflmpi.__version__}, torch ")
    assert [line.split()[:2] for line in rounds] == [["round", f"{round}/2"] for round in (1, 2)]
    assert re.search(r"  left 0:00:\d\d$", rounds[0]) and "left" not in rounds[1]
    words = [*processes.PFLMPI, "resume", str(folder), "--ranks", "1", "-s", "training.rounds=4"]
    done = processes.call(words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first = done.stderr.splitlines()[0]
    assert first == f"{about}, 4 rounds, goes on after round 2; 1 rank, on CPU; writes {folder}"
    assert [run_folder.read_attributes(folder, round)["ranks"] for round in (2, 4)] == [2, 1]
    assert quick_run.digest(folder) == digest


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_run_that_is_refused_once_its_data_is_known_says_that_alone(ranks, config, tmp_path, capfd):
    words = ["run", str(config), "--ranks", ranks, "--out", str(tmp_path / "run"), "-s", "partition.clients=5000"]
    if ranks == "1":
        code, stderr = quick_run.command(words), capfd.readouterr().err
    else:
        done = processes.call([*processes.PFLMPI, *words])
        code, stderr = done.returncode, done.stderr
    assert code == 2 and "the data has 400" in stderr, stderr
    assert stderr.count("\n") == 1, "no line before says that it starts"


def test_a_quiet_run_says_nothing_and_one_that_is_there_is_one_error(config, tmp_path, capfd):
    words = ["run", str(config), "--ranks", "1", "--quiet", "--out", str(tmp_path / "run")]
    assert quick_run.command(words) == 0 and capfd.readouterr().err == ""
    assert quick_run.command(words) == 2
    printed = capfd.readouterr().err
    assert printed.count("\n") == 1 and "holds a run already" in printed
    assert quick_run.command([*words[:-1], str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder of runs (run), which it would hide; choose another --out" in capfd.readouterr().err
    assert quick_run.command(["run", words[-1]]) == 2
    assert f"{words[-1]} is the folder of a run; `pflmpi resume {words[-1]}` continues it" in capfd.readouterr().err
    assert quick_run.command(["resume", words[-1], "--ranks", "1"]) == 0
    printed = capfd.readouterr()
    assert "nothing is left to do" in printed.out and "goes on" not in printed.err


def test_the_time_left_is_that_of_the_last_rounds_without_the_first(capfd):
    empty, moved = np.empty(0, np.int64), {"up": np.zeros(1), "down": np.zeros(1)}
    show = RunProgress(configuration.parse(quick_run.settings(training={"rounds": 10})), quiet=False, bar=False, rank=0)
    for number, seconds in ((3, 9.0), (4, 1.0), (5, 3.0), (10, 2.0)):
        show(Progress(number, empty, empty, None, {"round": seconds, "compute": 1.0, "evaluation": 0.0}, moved))
    ends = [line.partition("left ")[2] for line in capfd.readouterr().err.splitlines()]
    assert ends == ["0:01:03", "0:00:06", "0:00:10", ""], "the first round of a process counts until there is another"


def test_a_round_says_how_long_it_tests_when_that_exceeds_training(capfd):
    empty, moved = np.empty(0, np.int64), {"up": np.zeros(1), "down": np.zeros(1)}
    show = RunProgress(configuration.parse(quick_run.settings(training={"rounds": 10})), quiet=False, bar=False, rank=0)
    for evaluation in (0.4, 0.6):
        seconds = {"round": 2.0, "compute": 1.0, "evaluation": evaluation}
        show(Progress(1, empty, empty, None, seconds, moved))
    first, second = capfd.readouterr().err.splitlines()
    assert "testing" not in first
    assert "accuracy -  testing 0.60 s  left" in second
