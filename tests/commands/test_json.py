"""`--json`: one object on standard output, whose keys and types are those that docs/scripts.md lists."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

import fake_slurm
import quick_run
import scale_folder
import table_file
from pflmpi.cli import main
from pflmpi.commands import scale
from pflmpi.scaling.results import read_results
from pflmpi.store import job_file
from pflmpi.sweep.runs import SweepOutcome
from pflmpi.terminal import _plain
from project import ROOT

PAGE = (ROOT / "docs" / "scripts.md").read_text()
BY_NAME = {"ranks[].versions": "NAME", "runs[].options": "KEY"}  # objects whose keys are names
FITS = {
    "any": lambda value: True,
    "null": lambda value: value is None,
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
    "strings": lambda value: isinstance(value, list) and all(map(FITS["string"], value)),
    "integers": lambda value: isinstance(value, list) and all(map(FITS["integer"], value)),
    "numbers": lambda value: isinstance(value, list) and all(map(FITS["number"], value)),
    "rows": lambda value: isinstance(value, list) and all(map(FITS["integers"], value)),
}


def listed(section):
    """The keys of a section of the page, with their types."""
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    kinds = {}
    for names, kind in re.findall(r"^\| (`[^|]+`) \| ([a-z ]+) \|", text, re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", names)
        within = first[: first.rfind(".") + 1]
        kinds |= dict.fromkeys([first, *(within + name for name in others)], kind)
    return kinds


def flat(value, path=""):
    """Yield the path of each value as the page writes it, and the value."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flat(item, f"{path}.{BY_NAME.get(path, key)}".lstrip("."))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for item in value:
            yield from flat(item, f"{path}[]")
    else:
        yield path, value


def printed(words, capfd, code=0):
    """The object that a command prints; its errors are lines elsewhere."""
    capfd.readouterr()
    assert main([*words, "--json"]) == code
    out = capfd.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def check(section, *objects):
    """All objects have keys and types of the page, and together all of these."""
    kinds, seen = listed(section), set()
    for path, value in (pair for content in objects for pair in flat(content)):
        if value in ([], None) and any(key.startswith((f"{path}[].", f"{path}.")) for key in kinds):
            continue  # an empty array of objects, or none
        assert path in kinds, path
        assert any(FITS[kind](value) for kind in kinds[path].split(" or ")), (path, value)
        seen.add(path)
    assert seen == set(kinds)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, lr in (("a", 0.1), ("b", 0.2)):
        quick_run.run(quick_run.settings(training={"lr": lr}), folder / name)
    return folder


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(quick_run.settings()))
    return "c.yaml"


def test_a_number_that_json_has_not_is_null_and_a_path_a_string(tmp_path):
    content = {"a": math.nan, "b": (np.float32(math.inf), np.int64(3)), tmp_path: tmp_path, "c": np.array([[True]])}
    assert _plain(content) == {"a": None, "b": [None, 3], str(tmp_path): str(tmp_path), "c": [[True]]}
    assert type(_plain(np.int64(3))) is int and type(_plain(True)) is bool


def test_status(runs, tmp_path, monkeypatch, capfd):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    alone = printed(["status", str(runs / "a")], capfd)
    assert [run["run"] for run in printed(["status", str(runs)], capfd)["runs"]] == [str(runs / "a"), str(runs / "b")]
    assert alone["runs"][0]["done"] and alone["jobs"] == []
    job_file.append(Path(shutil.copytree(runs / "a", tmp_path / "mine")), "12")
    fake_slurm.queue(tmp_path / "bin", fake_slurm.line("12", State="FAILED", exit_code=256, WorkDir=tmp_path))
    of_job, queue = printed(["status", "12"], capfd), printed(["status"], capfd)
    assert of_job["jobs"] == queue["jobs"] and queue["jobs"][0]["exit_code"] == 1 and not queue["runs"][0]["running"]
    check("status", alone, of_job)
    fake_slurm.queue(tmp_path / "bin")
    monkeypatch.chdir(tmp_path)
    assert printed(["status", "12"], capfd)["runs"][0]["round"] == 3, "Slurm has forgotten the job"


def test_status_of_a_table_is_that_of_its_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    table = table_file.write(tmp_path)
    quick_run.run(quick_run.settings(), tmp_path / "sweeps" / "small" / "FedAvg" / "few" / "seed0")
    of_table, of_folder = (printed(["status", str(what)], capfd) for what in (table, "sweeps/small"))
    assert [run["round"] for run in of_table["runs"]] == [3]
    assert of_table["runs"][0].keys() == of_folder["runs"][0].keys()


def test_inspect(runs, tmp_path, capfd):
    run, exported = str(runs / "a"), str(tmp_path / "one.h5")
    assert main(["export", run, "--all", "-o", exported]) == 0
    of_run, file = printed(["inspect", run], capfd), printed(["inspect", exported], capfd)
    assert of_run == printed(["inspect", run, "--digest"], capfd) and of_run["digest"] == file["digest"]
    check("inspect", of_run, file)
    check("inspect --diff", printed(["inspect", run, "--diff", "1", "3"], capfd))
    check("inspect --verify", *(printed(["inspect", path, "--verify"], capfd) for path in (run, exported)))


def test_a_damaged_run_is_told_and_an_error(tmp_path, capfd):
    quick_run.run(quick_run.settings(), tmp_path / "run")
    with open(tmp_path / "run" / "round_00002.h5", "r+b") as file:
        file.truncate(100)
    checked = printed(["inspect", str(tmp_path / "run"), "--verify"], capfd, code=2)
    assert not checked["good"] and len(checked["problems"]) == 1


def test_compare(runs, capfd):
    compared = printed(["compare", str(runs / "a"), str(runs / "b")], capfd)
    assert [run["options"] for run in compared["runs"]] == [{"training.lr": 0.1}, {"training.lr": 0.2}]
    check("compare", compared)


def test_list(capfd):
    everything = printed(["list"], capfd)
    check("list", everything)
    (fedprox,) = printed(["list", "fedprox"], capfd)["names"]
    assert (
        fedprox in everything["names"]
        and {"prox_weight": 0.01}.items() <= {key["key"]: key["default"] for key in fedprox["keys"]}.items()
    )
    defaults = {key["key"]: key["default"] for key in printed(["list", "training"], capfd)["sections"][0]["keys"]}
    assert defaults["epsilon"] == 1e-8 and defaults["momentum"] == 0 and defaults["stop"] is None


def test_data(config, tmp_path, capfd):
    (tmp_path / "d.csv").write_text("a,b,client,label\n1,2,x,cat\n3,400,y,dog\n5,6,y,cat\n")
    np.savez(tmp_path / "d.npz", x=np.zeros((4, 8, 8), np.uint8), y=[0, 1, 0, 1])
    table = printed(["data", "d.csv"], capfd)
    assert (table["clients"], table["samples_by_client"]) == (["x", "y"], [1, 2])
    check("data", table, printed(["data", "d.npz"], capfd))
    partition = printed(["data", config], capfd)
    assert np.sum(partition["train_samples_by_class"], 1).tolist() == partition["train_samples"]
    check("data CONFIG", partition)


def test_plan(config, capfd):
    planned = printed(["plan", config, "--ranks", "2"], capfd)
    assert planned["fits"] and len(planned["ranks"]) == 2
    check("plan", planned)
    little = printed(["plan", config, "--memory", "0.001"], capfd, code=1)
    assert not little["fits"] and little["problems"]


def test_doctor(config, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    report = printed(["doctor", "--config", config], capfd, code=1)
    check("doctor", report)


def test_sweep(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    table = str(table_file.write(tmp_path))
    planned = printed(["sweep", table, "--dry-run", "--budget", "1"], capfd)
    assert planned["cells"][0]["cell"] == "FedAvg/few/seed0" and len(planned["cells"]) == 8
    check("sweep --dry-run", planned)
    assert main(["sweep", table, "--json"]) == 2 and "--json is for --dry-run" in capfd.readouterr().err


def test_scale(tmp_path, capfd):
    out = scale_folder.measured(tmp_path / "out", scale_folder.scaling((1, 2, 4)))
    assert scale._conclude(out, SweepOutcome({}, [], 0), True, 64, True) == 0
    measured = json.loads(capfd.readouterr().out)
    assert [point["speed_up"] for point in measured["points"]] == [1, 2, 4]
    assert [point["ranks"] for point in measured["points"]] == [point.ranks for point in read_results(out).points]
    check("scale", measured)


@pytest.mark.parametrize(
    "words", [["status", "nowhere"], ["inspect", "nowhere"], ["list", "fedgm"], ["plan", "x.yaml"]]
)
def test_an_error_is_a_line_and_code_2(words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--json"]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
