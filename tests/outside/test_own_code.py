"""Algorithms, models, datasets and partitions that are named from outside the package."""

import json
import os
import pickle
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest
import torch

import own_code
import pflmpi.errors
import quick_run
from pflmpi import open_run, outside
from pflmpi.cli import main
from pflmpi.config import load as configuration
from pflmpi.config import yaml_file
from pflmpi.errors import CheckpointError, ConfigError, PflmpiError
from pflmpi.experiment.stored_config import stored_config
from pflmpi.outside import code_hash


def run(config, folder, ranks=1, *overrides):
    return quick_run.run(configuration.load(config, overrides).resolved(), folder, ranks)


def test_all_four_run_and_resume_anywhere_with_the_same_bits(tmp_path, monkeypatch):
    config = own_code.write(tmp_path / "code")
    alone = run(config, tmp_path / "alone")
    monkeypatch.chdir(tmp_path)
    assert run(Path("code/own.yaml"), tmp_path / "three", 3) == alone
    run(config, tmp_path / "parts", 2, "training.rounds=1")
    monkeypatch.chdir("/")
    assert quick_run.resume(tmp_path / "parts", ("training.rounds=3",)) == alone
    stored = yaml_file.read(tmp_path / "parts" / "config.yaml")
    assert stored["algorithm"] == {"name": f"{tmp_path}/code/mine.py:Mine", "weighting": "samples", "factor": 2.0}
    assert stored["data"]["samples"] == 200 and stored["partition"]["step"] == 1 and stored["model"]["hidden"] == 9
    assert sorted(stored["recorded"]["code"]) == ["algorithm", "data", "model", "partition"]


def test_an_override_names_a_file_relative_to_the_working_directory(tmp_path, monkeypatch):
    config = own_code.write(tmp_path / "code")
    monkeypatch.chdir(tmp_path / "code")
    shutil.copy("mine.py", tmp_path / "other.py")
    loaded = configuration.load(config, ["algorithm.name=../other.py:Mine"])
    assert loaded.resolved()["algorithm"]["name"] == f"{tmp_path}/other.py:Mine"


def test_changed_code_is_said_and_asks_to_be_allowed(tmp_path, caplog):
    config = own_code.write(tmp_path / "code")
    run(config, tmp_path / "run", 1, "training.rounds=1")
    file = tmp_path / "code" / "mine.py"
    file.write_text(file.read_text() + "\n# a comment\n")
    with pytest.raises(PflmpiError, match=r"the code of algorithm has changed since .*--changed-code"):
        quick_run.resume(tmp_path / "run", ("training.rounds=2",))
    quick_run.resume(tmp_path / "run", ("training.rounds=2",), changed_code=True)
    assert "the code of algorithm has changed" in caplog.text and "going on with the changed code" in caplog.text
    quick_run.resume(tmp_path / "run", ("training.rounds=3",))  # what is recorded now is the changed code


def test_samples_need_no_code_of_the_algorithm_and_a_model_may_be_had_with_changed_code(tmp_path):
    run(own_code.write(tmp_path / "code"), tmp_path / "run", 1, "training.rounds=1")
    before = open_run(tmp_path / "run")
    samples, model = before.samples(1), before.model(1)
    for name in ("mine", "squares"):
        file = tmp_path / "code" / f"{name}.py"
        file.write_text(file.read_text() + "\n# a comment\n")
    now, x = open_run(tmp_path / "run"), torch.tensor(samples.test.x)
    assert (now.samples(1).test.x == samples.test.x).all()
    with pytest.raises(CheckpointError, match=r"the code of algorithm has changed .*in Python: changed_code=True"):
        now.model(1)
    assert torch.equal(now.model(1, changed_code=True)(x), model(x))
    file.write_text(file.read_text().replace("default_rng(5)", "default_rng(6)"))
    with pytest.raises(CheckpointError, match="the data has changed since"):
        open_run(tmp_path / "run").samples(1)


def test_a_file_that_was_moved_or_renamed_is_named_anew(tmp_path):
    config = own_code.write(tmp_path / "code")
    digest = run(config, tmp_path / "whole")
    run(config, tmp_path / "run", 1, "training.rounds=1")
    (tmp_path / "code").rename(tmp_path / "moved")
    with pytest.raises(
        ConfigError, match=r"squares.py.*cannot be read.*with the key that names it, such as -s algorithm.name="
    ):
        stored_config(tmp_path / "run", [])
    names = {"algorithm": "mine.py:Mine", "model": "narrow.py:Narrow", "data": "squares.py:Squares"}
    places = [f"{key}.name={tmp_path}/moved/{name}" for key, name in names.items()]
    places.append(f"partition.name={tmp_path}/moved/in_turn.py:in_turn")
    assert quick_run.resume(tmp_path / "run", ("training.rounds=3", *places)) == digest
    assert quick_run.resume(tmp_path / "run") == digest
    (tmp_path / "moved" / "mine.py").rename(tmp_path / "moved" / "ours.py")
    again = ("training.rounds=4", f"algorithm.name={tmp_path}/moved/ours.py:Mine")
    with pytest.raises(PflmpiError, match=r"the code of algorithm has changed since .*--changed-code"):
        quick_run.resume(tmp_path / "run", again)  # names of files are part of the hash
    quick_run.resume(tmp_path / "run", again, changed_code=True)


def test_reading_a_run_executes_nothing_of_it(tmp_path, capfd):
    config = own_code.write(tmp_path / "code")
    run(config, tmp_path / "run")
    for file in (tmp_path / "code").glob("*.py"):
        file.write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'executed')!r}).touch()\n" + file.read_text())
    here = str(tmp_path / "run")
    for words in (
        ["inspect", here],
        ["inspect", here, "--verify"],
        ["report", here, "--out", str(tmp_path / "page")],
        ["export", here, "--client", "1", "-o", str(tmp_path / "model.npz")],
        ["status", here],
    ):
        assert main(words) == 0, (words, capfd.readouterr())
    assert not (tmp_path / "executed").exists()
    assert "Mine" in capfd.readouterr().out or "Mine" in (tmp_path / "page" / "report.html").read_text()


BROKEN = {
    "no such file": ("./nothing.py:Mine", "", ["nothing.py cannot be read", "relative to the configuration"]),
    "no class": ("./mine.py", "", ["names no class", "known: Mine"]),
    "another class": ("./mine.py:Other", "", ["has no 'Other'", "known: Mine"]),
    "a syntax error": ("./mine.py:Mine", "def f(:\n", ["mine.py:1: syntax error"]),
    "an import error": ("./mine.py:Mine", "\nimport nothing_of_that_name\n", ["mine.py:2", "No module named 'nothing"]),
    "a relative import": (
        "./mine.py:Mine",
        "from .base import Base\n",
        ["belongs to a package", "write code.mine:CLASS"],
    ),
    "an exit": ("./mine.py:Mine", "raise SystemExit(3)\n", ["mine.py:1", "SystemExit"]),
    "no algorithm": ("./mine.py:Mine", "class Mine: pass\n", ["object", "expected a subclass of", "base.Algorithm"]),
    "a function": ("./mine.py:Mine", "def Mine(): pass\n", ["function", "expected a subclass"]),
    "a missing method": (
        "./mine.py:Mine",
        "from pflmpi.algorithms.base import Algorithm\nclass Mine(Algorithm):\n    summary = paper = 'x'\n",
        ["Mine.client_update is missing", "expected client_update(self, task", "ONE client"],
    ),
    "no summary": (
        "./mine.py:Mine",
        own_code.ALGORITHM.replace("    summary: ClassVar[str]", "    other: ClassVar[str]").replace(
            "shared_parts import WeightedSharedParts", "shared_parts import SharedParts as WeightedSharedParts"
        ),
        ["Mine.summary is missing"],
    ),
    "no dataclass": (
        "./mine.py:Mine",
        own_code.ALGORITHM.replace("@dataclass", "# @"),
        ["factor", "@dataclass(frozen"],
    ),
    "another signature": (
        "./mine.py:Mine",
        own_code.ALGORITHM + "\n    def client_update(self, task, client):\n        return client, {}\n",
        ["Mine.client_update takes (self, task, client)", "expected (self, task, client, down, data)"],
    ),
    "a start of two forms at once": (
        "./mine.py:Mine",
        own_code.ALGORITHM + "\n    def init_client(self, task, client=0):\n        return {}\n",
        ["Mine.init_client takes (self, task, client=0)", "expected (self, task) or (self, task, client)"],
    ),
    "a start of no form": (
        "./mine.py:Mine",
        own_code.ALGORITHM + "\n    def init_client(self, task, client, rng):\n        return {}\n",
        ["Mine.init_client takes (self, task, client, rng)", "expected (self, task) or (self, task, client)"],
    ),
    "a field of no type": (
        "./mine.py:Mine",
        own_code.ALGORITHM.replace("factor: float = 1.0", "factor: tuple[int, ...] = (1, 2)"),
        ["mine.py", "Mine.factor", "expected a number"],
    ),
    "a field of an unknown type": (
        "./mine.py:Mine",
        "from __future__ import annotations\n" + own_code.ALGORITHM.replace("factor: float", "factor: Flaot"),
        ["mine.py", "Mine", "Flaot"],
    ),
    "a value that is refused": (
        "./mine.py:Mine",
        own_code.ALGORITHM + "\n    def __post_init__(self):\n        raise ValueError('factor is too large')\n",
        ["mine.py:22", "Mine.__post_init__", "factor is too large"],
    ),
    "a wrong declaration": (
        "./mine.py:Mine",
        own_code.ALGORITHM + "\n    def uplink(self, task):\n        return {'body': task.nothing}\n",
        ["mine.py:22", "Mine.uplink", "has no attribute 'nothing'"],
    ),
    "a wrong initial state": (
        "./mine.py:Mine",
        own_code.ALGORITHM + "\n    def init_server(self, task):\n        return {}[1]\n",
        ["mine.py:22", "Mine.init_server", "KeyError"],
    ),
    "a file without its ending": ("./mine:Mine", "", ["./mine is no module", "ends in .py: ./mine.py:CLASS"]),
    "a module that is not there": ("nothing_there.mine:Mine", "", ["no module 'nothing_there'", "PYTHONPATH"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_error_in_a_file_names_file_class_and_what_was_expected(case, tmp_path):
    name, text, expected = BROKEN[case]
    config = own_code.write(tmp_path / "code", algorithm={"name": name})
    if text:
        (tmp_path / "code" / "mine.py").write_text(text)
    with pytest.raises(PflmpiError) as raised:
        run(config, tmp_path / "run")
    for words in expected:
        assert words in str(raised.value)


def test_errors_of_data_and_partitions_are_named_too(tmp_path):
    config = own_code.write(tmp_path / "code")
    for file, text, expected in (
        ("in_turn", own_code.PARTITION.replace("return [", "return [x * 0.5 for x in ["), "SyntaxError|syntax error"),
        ("in_turn", own_code.PARTITION.replace("client, len", "client, 3 * len"), "indices from 0 to .* from 0 to 199"),
        ("in_turn", own_code.PARTITION.replace("clients: int, rng", "rng"), "takes .labels, rng.*expected"),
        ("squares", own_code.DATA.replace("return assemble", "return str"), "Squares.read.*TypeError"),
        ("squares", own_code.DATA.replace("return assemble", "return len(labels) or"), "returned a int.*assemble"),
    ):
        (tmp_path / "code" / f"{file}.py").write_text(text)
        with pytest.raises(PflmpiError, match=f"(?s){file}.*{expected}"):
            run(config, tmp_path / "run")
        own_code.write(tmp_path / "code")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rng = np.random.default_rng()", "in_turn.py:in_turn' returns other samples at a second call; it must follow"),
        ("labels[:] = 0", r"in_turn.py:7, in in_turn: ValueError: .* read-only"),
    ],
)
def test_a_partition_that_is_no_function_of_its_arguments_is_refused(line, expected, tmp_path):
    config = own_code.write(tmp_path / "code")
    drawn = own_code.PARTITION.replace(
        "np.arange(client, len(labels), clients * step)", "rng.permutation(9) + 9 * client"
    )
    (tmp_path / "code" / "in_turn.py").write_text(drawn)
    run(config, tmp_path / "seeded", 1, "training.rounds=1")
    (tmp_path / "code" / "in_turn.py").write_text(drawn.replace("    return", f"    {line}\n    return"))
    with pytest.raises(PflmpiError, match=expected) as raised:
        run(config, tmp_path / "run")
    assert raised.value.exit_code == 2 and not (tmp_path / "run").exists()


def test_the_hash_covers_what_lies_beside_the_file_and_executes_nothing(tmp_path):
    (tmp_path / "mine.py").write_text("import beside\nraise SystemExit\n")
    (tmp_path / "beside.py").write_text("import json\n")
    first = code_hash(f"{tmp_path}/mine.py:Mine")
    (tmp_path / "other.py").write_text("")
    assert code_hash(f"{tmp_path}/mine.py:Mine") == first
    (tmp_path / "beside.py").write_text("import json  # changed\n")
    assert code_hash(f"{tmp_path}/mine.py:Mine") != first


def test_the_hash_of_a_module_is_that_of_its_files_as_they_are_now(tmp_path, monkeypatch):
    package = tmp_path / "hashed_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "mine.py").write_text("from . import beside\n")
    (package / "beside.py").write_text("FACTOR = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = code_hash("hashed_package.mine:Mine")
    (package / "beside.py").write_text("FACTOR = 2\n")
    assert code_hash("hashed_package.mine:Mine") != before


@pytest.mark.parametrize(("folder", "is_covered"), [("own", True), ("site-packages", False)])
def test_the_hash_of_a_module_without_a_package_covers_its_own_files_beside_it(
    folder, is_covered, tmp_path, monkeypatch
):
    (tmp_path / folder).mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / folder))
    name = f"hashed_alone_{is_covered}"
    (tmp_path / folder / f"{name}.py").write_text("import beside\n")
    (tmp_path / folder / "beside.py").write_text("FACTOR = 1\n")
    before = code_hash(f"{name}:Mine")
    (tmp_path / folder / "beside.py").write_text("FACTOR = 2\n")
    outside._installed_digest.cache_clear()
    assert (code_hash(f"{name}:Mine") != before) == is_covered


def test_a_module_in_an_archive_is_refused_in_one_line(tmp_path, monkeypatch):
    with ZipFile(tmp_path / "own.zip", "w") as archive:
        archive.writestr("zipped_module.py", "class Mine:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path / "own.zip"))
    for read in (outside.load, code_hash):
        with pytest.raises(ConfigError, match=r"own.zip/zipped_module.py, of module .*, is in an archive; unpack it"):
            read("zipped_module:Mine")


def test_a_module_without_a_specification_has_no_hash(monkeypatch):
    monkeypatch.setitem(sys.modules, "made_by_hand", ModuleType("made_by_hand"))
    with pytest.raises(ConfigError, match="module made_by_hand has no source file; give the file"):
        code_hash("made_by_hand:Mine")


def write_helper(
    folder, number, text="from layers import Layer\n\n\ndef value(scores, labels):\n    return Layer().size\n"
):
    """Two files with the same text and the module beside them that both import; returns what names the first."""
    folder.mkdir(exist_ok=True)
    (folder / "layers.py").write_text(
        f"from dataclasses import dataclass\n\n@dataclass\nclass Layer:\n    size: float = {number}\n"
    )
    for name in ("mine.py", "other.py"):
        (folder / name).write_text(text)
    return f"{folder}/mine.py:value"


LATE = "def value(scores, labels):\n    import layers\n    return layers.Layer().size\n"


@pytest.mark.parametrize("late", [False, True])
def test_a_file_gets_the_modules_beside_it_whatever_was_imported_before(late, tmp_path, monkeypatch):
    texts = [LATE] if late else []
    write_helper(tmp_path / "elsewhere", 9)
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))  # as the working directory with `python -m`
    monkeypatch.setitem(sys.modules, "layers", import_module("layers"))
    before = [*sys.path]
    first, second = (outside.load(write_helper(tmp_path / name, n, *texts)) for name, n in (("A", 1), ("B", 2)))
    assert (first(0, 0), second(0, 0), sys.modules["layers"].Layer().size) == (1, 2, 9) and sys.path == before


@pytest.mark.parametrize("late", [False, True])
def test_a_module_beside_a_file_is_imported_anew_once_it_has_changed(late, tmp_path):
    texts = [LATE] if late else []
    first = outside.load(write_helper(tmp_path, 1, *texts))
    assert first(0, 0) == 1 and outside.load(f"{tmp_path}/mine.py:value") is first
    assert outside.load(write_helper(tmp_path, 2, *texts))(0, 0) == 2  # of the same size, in the same second
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers.py").rename(tmp_path / "layers" / "__init__.py")
    (tmp_path / "layers" / "__init__.py").write_text("from layers.size import Layer\n")
    (tmp_path / "layers" / "size.py").write_text("from . import sizes\nclass Layer:\n    size = sizes.SIZE\n")
    (tmp_path / "layers" / "sizes.py").write_text("SIZE = 3\n")
    assert outside.load(f"{tmp_path}/mine.py:value")(0, 0) == 3


def test_the_files_of_a_folder_share_the_modules_beside_them(tmp_path):
    write_helper(tmp_path, 1)
    (tmp_path / "third.py").write_text("import mine, layers\nvalue, Layer = mine.value, layers.Layer\n")
    names = [f"{tmp_path}/{name}" for name in ("mine.py:Layer", "other.py:Layer", "third.py:Layer")]
    layer, *others = map(outside.load, names)
    assert all(other is layer for other in others) and pickle.loads(pickle.dumps(layer(3))) == layer(3)
    assert outside.load(f"{tmp_path}/third.py:value") is outside.load(f"{tmp_path}/mine.py:value")


def test_threads_that_load_one_file_at_once_get_the_whole_of_it(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(0.2)\ndef value(scores, labels):\n    return 1\n")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(outside.load, [f"{tmp_path}/slow.py:value"] * 2)
    assert first is second


def test_a_file_hides_nothing_that_is_installed_from_those_beside_it(tmp_path):
    (tmp_path / "mine.py").write_text(
        "exec('import json', {})\nimport json, torch, pflmpi.errors\nvalue = json, torch, pflmpi.errors\n"
    )
    for name in ("json", "numpy", "pflmpi"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit\n")
    assert outside.load(f"{tmp_path}/mine.py:value") == (json, torch, pflmpi.errors)


def test_a_module_beside_a_file_that_has_the_name_of_an_installed_one_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("import numpy\n")
    (tmp_path / "numpy.py").write_text("pi = 3\n")
    with pytest.raises(ConfigError, match=r"mine.py:1, .*/numpy has the name of an installed module, .*; rename it"):
        outside.load(f"{tmp_path}/mine.py:numpy")


def test_an_error_in_a_module_beside_a_file_is_named_where_it_stands(tmp_path):
    (tmp_path / "mine.py").write_text("from layers import Layer\n")
    for text, expected in (("1 / 0", "1, in <module>: ZeroDivisionError"), ("def", "1: syntax error")):
        (tmp_path / "layers.py").write_text(text)
        with pytest.raises(ConfigError, match=f"{tmp_path}/layers.py:{expected}"):
            outside.load(f"{tmp_path}/mine.py:value")


def installed(folder, name, lines):
    """A package that is installed as far as Python can see, with entry points."""
    folder.joinpath(f"{name}-1.0.dist-info").mkdir(parents=True)
    folder.joinpath(f"{name}-1.0.dist-info", "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    )
    folder.joinpath(f"{name}-1.0.dist-info", "entry_points.txt").write_text(lines)
    folder.joinpath(f"{name}_module.py").write_text(own_code.ALGORITHM)


def test_installed_packages_add_names(tmp_path, monkeypatch):
    from pflmpi.algorithms import ALGORITHMS

    installed(tmp_path / "site", "fedmine", "[pflmpi.algorithms]\nfedmine = fedmine_module:Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(ALGORITHMS.__dict__, "installed", raising=False)
    raw = quick_run.settings(algorithm={"name": "fedmine", "factor": 3.0})
    quick_run.run(raw, tmp_path / "run")
    stored = yaml_file.read(tmp_path / "run" / "config.yaml")
    assert stored["algorithm"]["name"] == "fedmine" and list(stored["recorded"]["code"]) == ["algorithm"]
    assert "fedmine" in list(ALGORITHMS)
    installed(tmp_path / "site", "fedyours", "[pflmpi.algorithms]\nfedmine = fedyours_module:Mine\n")
    monkeypatch.delitem(ALGORITHMS.__dict__, "installed")
    with pytest.raises(
        ConfigError, match=r"'fedmine' is registered twice: by the package fed.* and by the package fed"
    ):
        configuration.parse(raw)
    monkeypatch.delitem(ALGORITHMS.__dict__, "installed", raising=False)


def test_other_commands_know_them(tmp_path, capsys):
    config = own_code.write(tmp_path / "code")
    assert main(["list", f"{tmp_path}/code/mine.py:Mine"]) == 0 and "factor" in capsys.readouterr().out
    assert main(["list", f"{tmp_path}/code/squares.py:Squares"]) == 0 and "samples" in capsys.readouterr().out
    assert main(["list", f"{tmp_path}/code/in_turn.py:in_turn"]) == 0 and "step" in capsys.readouterr().out
    assert main(["data", str(config)]) == 0
    assert main(["submit", str(config), "--dry-run", "--out", str(tmp_path / "job")]) == 0
    table = {
        "title": "t",
        "source": "s",
        "seeds": [0],
        "base": yaml_file.read(config) | {"algorithm": {"name": "fedavg"}},
        "columns": {"all": {}},
        "rows": {"Mine": {"algorithm": {"name": "./mine.py:Mine"}}},
    }
    del table["base"]["seed"]
    (tmp_path / "code" / "table.yaml").write_text(yaml_file.dump(table))
    os.makedirs(tmp_path / "elsewhere")
    assert main(["sweep", str(tmp_path / "code" / "table.yaml"), "--dry-run", "--out", str(tmp_path / "sweep")]) == 0
    assert "Mine" in capsys.readouterr().out


IMPORTS = "from dataclasses import field\nfrom typing import Annotated\nfrom pydantic import Field\n"


def with_field(folder, line):
    """A configuration with an own algorithm of one more field, and what names the algorithm."""
    config = own_code.write(folder, algorithm={"name": "./mine.py:Mine"})
    (folder / "mine.py").write_text(IMPORTS + own_code.ALGORITHM + f"    {line}\n")
    return config, f"{folder}/mine.py:Mine"


def refused(config, expected):
    with pytest.raises(ConfigError) as raised:
        configuration.load(config)
    assert expected in str(raised.value) and "\n" not in str(raised.value)


def refused_everywhere(config, name, expected, capfd):
    """`run` and `list` refuse it with the same line."""
    refused(config, expected)
    assert main(["list", name]) == 2
    output, error = capfd.readouterr()
    assert not output and expected in " ".join(error.split())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lam: Annotated[float, Field(ge=0)] = -1.0", "algorithm.lam = -1.0: must be greater than or equal to 0"),
        ("lam: float = Field(-1.0, ge=0)", "algorithm.lam = -1.0: must be greater than or equal to 0"),
        ('lam: int = "a"', "algorithm.lam = 'a': must be a valid integer"),
        ("lam: float = None", "algorithm.lam = None: must be a valid number"),
        ('lam: float = float("inf")', "algorithm.lam = inf: no option takes such a number; must be at most 3.4e+38"),
        ("lam: list[int] = field(default_factory=lambda: [0.5])", "algorithm.lam.0 = 0.5: must be a valid integer"),
        (
            "lam: tuple[int, ...] = (1, 2)",
            "Mine.lam = (1, 2) is a tuple, which algorithm.lam cannot be; expected a",
        ),
    ],
)
def test_a_default_that_no_configuration_could_set_is_refused(line, expected, tmp_path):
    config, _ = with_field(tmp_path, line)
    refused(config, expected)


def test_a_default_of_a_partition_is_checked_too(tmp_path):
    config = own_code.write(tmp_path)
    (tmp_path / "in_turn.py").write_text(own_code.PARTITION.replace("step: int = 1", 'step: int = "a"'))
    refused(config, "partition.step = 'a': must be a valid integer")


def test_a_default_that_a_function_makes_is_shown(tmp_path, capfd):
    config, name = with_field(tmp_path, "lam: list[float] = field(default_factory=list)")
    assert configuration.load(config).resolved()["algorithm"]["lam"] == []
    assert main(["list", name]) == 0
    output = capfd.readouterr().out
    assert "[]" in output and "Undefined" not in output and "list[float]" in output


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_an_assignment_to_self_is_named_where_it_stands(executor, tmp_path):
    config = own_code.write(tmp_path, algorithm={"name": "./mine.py:Mine"}, runtime={"executor": executor})
    method = "def client_update(self, task, client, down, data):\n        self.seen = 1\n"
    (tmp_path / "mine.py").write_text(own_code.ALGORITHM + f"\n    {method}")
    with pytest.raises(PflmpiError) as raised:
        quick_run.run(configuration.load(config).resolved(), tmp_path / "run")
    line = (tmp_path / "mine.py").read_text().split("\n").index("        self.seen = 1") + 1
    assert f"at {tmp_path}/mine.py:{line}, in Mine.client_update" in str(raised.value)
    assert "what a client keeps belongs in its state (`init_client`)" in str(raised.value)


@pytest.mark.parametrize("first", ["labels", "writers"])
def test_only_the_keys_of_a_partition_need_types(first, tmp_path, capfd):
    config = own_code.write(tmp_path)
    file, name = tmp_path / "in_turn.py", f"{tmp_path}/in_turn.py:in_turn"
    body = "\n    return [np.arange(client, 100, clients * step) for client in range(clients)]\n"
    file.write_text(f"import numpy as np\ndef in_turn({first}, clients, rng, *, step: int = 1):" + body)
    assert configuration.load(config).resolved()["partition"] == {"name": name, "clients": 5, "step": 1}
    assert main(["list", name]) == 0 and "clients" in capfd.readouterr().out
    file.write_text(f"import numpy as np\ndef in_turn({first}, clients, rng, *, step=1):" + body)
    refused_everywhere(config, name, "in_turn: step has no type; expected step: int, or float, bool, str,", capfd)
    unusable = ": Unable to generate pydantic-core schema for <class 'numpy.ndarray'>"
    for kind, expected in (("'Steps'", ": the type of a field is unknown"), ("np.ndarray", unusable)):
        file.write_text(f"import numpy as np\ndef in_turn({first}, clients, rng, *, step: {kind} = 1):" + body)
        refused_everywhere(config, name, f"in_turn{expected}", capfd)
