"""Classes in place of names: `model=Net`, also of a notebook or a script."""

import os
import sys
from functools import partial
from importlib import import_module, reload
from pathlib import Path
from types import ModuleType

import pytest

import pflmpi
import processes
from pflmpi import outside
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.config.keywords import Config
from pflmpi.config.main_source import reference
from pflmpi.errors import ConfigError
from pflmpi.store import run_folder

SMALL = {"data": "digits", "partition": {"name": "iid", "clients": 3}, "training": {"rounds": 1}}
CELLS = [
    "import torch.nn as nn\nfrom math import prod\n\nWIDTH = 9\nNOISE = __import__('torch').rand(3)",
    "def wide(shape):\n    return prod(shape) * 1\n",
    "class Net(nn.Module):\n    pass\n",
    """
class Net(nn.Module):
    '''The newer of the two.'''

    def __init__(self, num_classes: int, shape: tuple[int, ...], width: int = 0):
        super().__init__()
        width = width or WIDTH
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(wide(shape), width), nn.ReLU())
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.fc(self.body(x))
""",
    "this is no Python",
    "WIDTH += 2",
    "class Changed(Net):\n    grows = False\n\n    def forward(self, x):\n        return self.fc(self.body(x))\n",
    "class Noisy(Net):\n    noise = NOISE\n",
    "from dataclasses import dataclass\nfrom pflmpi.algorithms.fedavg import FedAvg\n",
    "x = __import__('torch').zeros(3)  # which no x of a function is\n",
    "LAYERS = [nn.ReLU]\nGAIN = 1\nHIGH, LOW = 3, 2\nif True:\n    import json\n",
    "def louder(x, gain=GAIN):\n    return gain * x\n",
    "class Loud(Net):\n    gain = louder\n",
    "class Layered(Net):\n    layer = LAYERS[0]\n",
    "class Inherits(Changed):\n    pass\n",
    "class Reads(Net):\n    form = json\n",
    "class Quiet(Net):\n    low = LOW\n",
    "GAIN = 100\nLAYERS[0] = nn.Tanh\n",
    "@dataclass(frozen=True, kw_only=True)\nclass Mine(FedAvg):\n    pass\n",
    "from pflmpi.data.task_kinds import Classification\n\nclass Focal(Classification):\n    summary = 'mine'\n",
    "def darker(x, key):\n    return x // HIGH\n",
    "def right(scores, labels):\n    return float((scores.argmax(-1) == labels).mean())\n",
    "def first(round, count, num_train, rng):\n    return range(count)\n",
]


@pytest.fixture
def notebook(monkeypatch, tmp_path):
    """The main module of a notebook whose cells have run."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.chdir(tmp_path)
    main.In = CELLS
    for cell in CELLS:
        if "no Python" not in cell:
            exec(cell, main.__dict__)
    return main


def test_a_class_of_a_notebook_is_written_into_a_file_with_all_that_it_uses(notebook, tmp_path):
    net = {"name": notebook.Net, "head": "fc"}
    config = Config(**SMALL, model=net, algorithm=FedAvg)
    (file,) = (tmp_path / "pflmpi_classes").iterdir()
    assert config.resolved()["model"]["name"] == f"{file}:Net" and config.resolved()["algorithm"]["name"] == "fedavg"
    text = file.read_text()
    assert "The newer of the two" in text and "WIDTH = 11" in text and "NOISE" not in text and "FedAvg" not in text
    assert (
        Config(**SMALL, model={"head": "fc", "name": notebook.Net}, algorithm="fedavg").resolved() == config.resolved()
    )
    wider = config.replace(model={**net, "width": 5}, algorithm=FedAvg(weighting="clients"))
    assert wider.resolved()["model"]["width"] == 5 and len(list(file.parent.iterdir())) == 1
    algorithm_name = config.replace(algorithm=notebook.Mine).resolved()["algorithm"]["name"]
    assert (
        algorithm_name == config.replace(algorithm=notebook.Mine(weighting="clients")).resolved()["algorithm"]["name"]
    )
    assert algorithm_name.endswith(":Mine") and "pflmpi_classes/Mine_" in algorithm_name
    quiet = config.replace(model={**net, "name": notebook.Quiet}).resolved()["model"]["name"]
    assert Path(quiet.removesuffix(":Quiet")).read_text().startswith("LOW = 2\n\n")
    run = pflmpi.run(config, out=tmp_path / "run", quiet=True, ranks=1)
    alike = pflmpi.run(config, out=tmp_path / "alike", quiet=True, in_process=True)
    assert run_folder.digest(run.path, 1) == run_folder.digest(alike.path, 1)


def test_functions_and_a_task_stand_where_their_names_do(notebook, tmp_path):
    from pflmpi.learning.transforms import horizontal_flip

    data = {"name": "digits", "transform": (horizontal_flip, notebook.darker), "task": notebook.Focal, "limit": 300}
    sections = {"evaluation": {"measures": ["accuracy", notebook.right]}, "training": {"selection": notebook.first}}
    config = Config(**{**SMALL, "data": data}, model="mlp", algorithm="fedavg").replace(**sections)
    raw = config.resolved()
    folder = tmp_path / "pflmpi_classes"
    assert raw["data"]["transform"][0] == "horizontal_flip" and raw["evaluation"]["measures"][0] == "accuracy"
    own = [raw["data"]["transform"][1], raw["data"]["task"], raw["evaluation"]["measures"][1]]
    for name, expected in zip([*own, raw["training"]["selection"]], ("darker", "Focal", "right", "first"), strict=True):
        assert name.startswith(f"{folder}/{expected}_") and name.endswith(f".py:{expected}")
    run = pflmpi.run(config.replace(training={"participation": 0.4}), out=tmp_path / "run", quiet=True, in_process=True)
    assert run.round().metrics["participants"].tolist() == [0] and 0 <= run.columns["right_mean"][0] <= 1


def test_modules_beside_a_notebook_are_hashed_and_found_without_it(notebook, tmp_path, monkeypatch):
    (tmp_path / "beside_notebook.py").write_text("WIDTH = 5\n")
    cell = "import beside_notebook\ndef near(scores, labels):\n    return beside_notebook.WIDTH * 1.0\n"
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        exec(cell, notebook.__dict__)
        notebook.In = [*CELLS, cell]
        config = Config(**SMALL, model="mlp", algorithm="fedavg", evaluation={"measures": [notebook.near]})
        del sys.modules["beside_notebook"]
    (name,) = config.resolved()["evaluation"]["measures"]
    before = outside.code_hash(name)
    assert outside.load(name)(0, 0) == 5.0
    (tmp_path / "beside_notebook.py").write_text("WIDTH = 6\n")
    assert outside.code_hash(name) != before and outside.load(name)(0, 0) == 6.0


@pytest.mark.parametrize(("writable", "root"), [(True, "scripts"), (False, ".")])
def test_a_script_in_a_read_only_folder_has_its_classes_elsewhere(writable, root, notebook, tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside_it.py").write_text("WIDTH = 5\n")
    monkeypatch.syspath_prepend(str(tmp_path / "scripts"))
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    cell = "import beside_it\ndef wide_here(scores, labels):\n    return beside_it.WIDTH * 1.0\n"
    exec(cell, notebook.__dict__)
    notebook.In, notebook.__file__ = [*CELLS, cell], str(tmp_path / "scripts" / "script.py")
    expected = (tmp_path / root / "pflmpi_classes").resolve()
    assert reference("evaluation.measures", notebook.wide_here).startswith(f"{expected}/wide_here_")


def test_a_class_of_a_script_is_one_in_a_process_that_multiprocessing_spawned(notebook, monkeypatch):
    own = Config(**SMALL, model={"name": notebook.Net, "head": "fc"}, algorithm="fedavg")
    monkeypatch.setitem(sys.modules, "__mp_main__", notebook)
    for value in vars(notebook).values():
        if getattr(value, "__module__", "") == "__main__":
            value.__module__ = "__mp_main__"
    assert Config(**SMALL, model={"name": notebook.Net, "head": "fc"}, algorithm="fedavg") == own


def test_a_constant_that_was_set_in_an_imported_module_is_refused(tmp_path, monkeypatch):
    text = "LAYERS, WIDTH = [], 4\nif True:\n    DEPTH = 1\nNAME: str = 'small'\nSHAPE = (3, 3)\n"
    (tmp_path / "widths.py").write_text(text + "def mine(scores, labels):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    widths = import_module("widths")
    config = Config(**SMALL, model="mlp", algorithm="fedavg", evaluation={"measures": [widths.mine]})
    widths.LAYERS, widths.DEPTH = [1], 2
    config.replace(seed=1)
    monkeypatch.setattr(widths, "SHAPE", (5, 5))
    message = r"widths.SHAPE = \(5, 5\), but its file says \(3, 3\), which every other process has; set it there"
    with pytest.raises(ConfigError, match=message):
        config.replace(seed=2)
    with pytest.raises(ConfigError, match=message):
        pflmpi.run(config, out=tmp_path / "run", in_process=True)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """A module of a measure, and the module beside it that it imports; both have been imported."""
    (tmp_path / "edited_beside.py").write_text("SCALE = 1.0\ndef scale():\n    return SCALE\n")
    text = "import edited_beside\ndef mine(scores, labels):\n    return edited_beside.scale() * 1.0\n"
    (tmp_path / "edited.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    yield import_module("edited"), import_module("edited_beside")
    del sys.modules["edited"], sys.modules["edited_beside"]


@pytest.mark.parametrize("is_used_before", [True, False])
@pytest.mark.parametrize("name", ["edited", "edited_beside"])
def test_a_module_that_was_edited_after_its_import_is_refused_until_it_is_reloaded(
    name, is_used_before, imported, tmp_path
):
    make = partial(Config, **SMALL, model="mlp", algorithm="fedavg")
    if is_used_before:
        make(evaluation={"measures": [imported[0].mine]})
    file = tmp_path / f"{name}.py"
    file.write_text(file.read_text().replace("1.0", "10.0"))
    reloads = "edited" if name == "edited" else r"edited_beside\), importlib.reload\(edited"
    message = rf"/{name}.py changed after edited was imported.* reload it, importlib.reload\({reloads}\), and take"
    with pytest.raises(ConfigError, match=message):
        make(evaluation={"measures": [imported[0].mine]})
    reload(sys.modules[name])
    reload(imported[0])
    make(evaluation={"measures": [imported[0].mine]})


def test_a_constant_that_was_set_in_a_module_beside_an_imported_one_is_refused(imported):
    imported[1].SCALE = 11.0
    with pytest.raises(ConfigError, match=r"edited_beside.SCALE = 11.0, but its file says 1.0, which every other"):
        Config(**SMALL, model="mlp", algorithm="fedavg", evaluation={"measures": [imported[0].mine]})


def test_a_class_whose_objects_were_taken_apart_is_as_its_source_makes_it(notebook):
    cell = "from dataclasses import dataclass\nimport functools, typing\n@dataclass(frozen=True)\n"
    cell += "class Size:\n    width: int = 16\nclass Sized(Net):\n    size = Size()\n    kind = typing.TypeVar('k')\n"
    cell += "    @functools.singledispatchmethod\n    def of(self, x):\n        return x\n"
    notebook.In = [*CELLS, cell]
    exec(cell, notebook.__dict__)
    for _ in range(2):
        Config(**SMALL, model={"name": notebook.Sized, "head": "fc"}, algorithm="fedavg")


def test_a_constant_that_was_set_in_a_module_beside_a_notebook_is_refused(notebook, tmp_path, monkeypatch):
    (tmp_path / "beside_a_notebook.py").write_text("SCALE = 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    cell = "import beside_a_notebook\ndef near(scores, labels):\n    return beside_a_notebook.SCALE\n"
    notebook.In = [*CELLS, cell]
    exec(cell, notebook.__dict__)
    sections = {**SMALL, "model": "mlp", "algorithm": "fedavg", "evaluation": {"measures": [notebook.near]}}
    Config(**sections)
    notebook.beside_a_notebook.SCALE = 0.0
    with pytest.raises(ConfigError, match=r"beside_a_notebook\.SCALE = 0.0, but its file says 1.0, which every other"):
        Config(**sections)
    del sys.modules["beside_a_notebook"]


@pytest.mark.parametrize(("section", "key"), [("evaluation", "measures"), ("data", "transform")])
def test_a_function_without_a_source_is_refused_by_the_name_of_the_key(section, key, notebook):
    sections = {**SMALL, "data": {"name": "digits"}, "algorithm": "fedavg"}
    with pytest.raises(
        ConfigError, match=rf"^{section}.{key}: the source of <lambda> cannot be found; put it in a file"
    ):
        Config(**{**sections, section: {**sections.get(section, {}), key: [eval("lambda x, key: x", vars(notebook))]}})


def test_configurations_that_are_equal_are_one_key_of_a_dictionary():
    config = Config(**SMALL, model="mlp", algorithm="fedavg")
    assert {config: 1, config.replace(seed=1): 2, config.replace(seed=0): 3} == {config: 3, config.replace(seed=1): 2}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Noisy", r"model: Noisy uses NOISE, a Tensor made by a call; .*'\./my_file.py:Noisy'"),
        (
            "Older",
            r"model: .*Net'> is not the Net in the source of this notebook or script any more; make it anew",
        ),
        ("Typed", r"model: the source of Typed cannot be found; "),
        ("Changed", r"model: Changed is not as its source makes it \(forward, grows\); put it in a file"),
        ("Inherits", r"model: Changed is not as its source makes it \(forward, grows\); put it in a file"),
        ("Loud", r"model: louder is not as its source makes it \(louder\); "),  # the default of `gain`
        ("Layered", r"model: LAYERS is not as its source makes it \(LAYERS\); "),
        ("Reads", r"model: Reads uses json, a module that no statement of its own makes at the top level; "),
    ],
)
def test_what_has_no_source_that_can_stand_alone_is_refused(name, said, notebook, tmp_path):
    notebook.Typed = type("Typed", (notebook.Net,), {"__module__": "__main__"})
    notebook.Older = type("Net", (notebook.Net,), {"__module__": "__main__"})
    notebook.Changed.forward, notebook.Changed.grows = lambda self, x: 2 * notebook.Net.forward(self, x), True
    with pytest.raises(ConfigError, match=said):
        Config(**SMALL, model=getattr(notebook, name), algorithm="fedavg")
    assert not (tmp_path / "pflmpi_classes").exists()


HONEST = """
import enum, functools, logging, re, typing
import numpy as np, torch
from collections import deque, namedtuple

ACT, DTYPE = torch.relu, torch.float32
GAIN = torch.relu

class Kind(enum.Enum):
    ONE = 1
    TWO = 2

@dataclass(frozen=True)
class Size:
    width: int = 3
    kind: Kind | None = Kind.TWO

class Honest(nn.Module):
    log, device, dtype = logging.getLogger("honest"), torch.device("cpu"), torch.float32
    half, pattern, size, kinds = functools.partial(torch.mul, 0.5), re.compile("a"), Size(4), {Kind.ONE: [GAIN]}
    typed: typing.ClassVar = typing.Optional[Size]
    mean, scale, head, queue = np.array([0.5, float("nan")]), torch.ones(2, dtype=torch.float16), nn.ReLU(), deque([1])
    step = staticmethod(lambda x, gain=GAIN: gain(x))

    @property
    def width(self):
        return np.mean([self.size.width]) if self.size else max(
            1,
            2,
        )

    @functools.cached_property
    def wide(self):
        return self.width * 2

    @functools.lru_cache
    def often(self, x):
        return x == 1

    @torch.no_grad()
    def forward(self, x):
        for _ in range(3):
            x = torch.relu(x)
        return super().forward(x)
"""


@pytest.fixture
def honest(notebook):
    notebook.In = [*CELLS, HONEST]
    exec(HONEST, notebook.__dict__)
    return notebook


def test_what_a_source_makes_anew_each_time_is_as_its_source_makes_it(honest):
    assert reference("model", honest.Honest).endswith(":Honest")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("GAIN = torch.zeros_like", "GAIN is not as its source makes it \\(GAIN\\)"),
        ("Honest.dtype = torch.float64", "Honest .* \\(dtype\\)"),
        ("Honest.device = torch.device('meta')", "Honest .* \\(device\\)"),
        ("Honest.half = functools.partial(torch.mul, 0.1)", "Honest .* \\(half\\)"),
        ("Honest.scale[0] = 2", "Honest .* \\(scale\\)"),
        ("Honest.head = nn.Tanh()", "Honest .* \\(head\\)"),
        ("Honest.size = Size(4, Kind.ONE)", "Honest .* \\(size\\)"),
        ("Honest.kinds[Kind.ONE][0] = torch.tanh", "Honest .* \\(kinds\\)"),
        ("Honest.step = staticmethod(lambda x, gain=torch.abs: gain(x))", "Honest .* \\(step\\)"),
        ("Size.__eq__ = lambda self, other: True", "Size .* \\(__eq__\\)"),
        (
            "class Other:\n    @functools.lru_cache\n    def often(self, x):\n        return x != 1\n"
            "Other.often.__wrapped__.__qualname__ = 'Honest.often'\nHonest.often = Other.often",
            "Honest .* \\(often\\)",
        ),
        (
            "class Honest(Honest):\n    @torch.no_grad()\n    def forward(self, x):\n        for _ in range(3):\n"
            "            x = x or torch.relu(x)\n        return super().forward(x)\n"
            "Kept.forward = Honest.forward\nHonest = Kept",
            "Honest .* \\(forward\\)",
        ),
    ],
)
def test_what_was_set_after_its_source_is_refused(change, said, honest):
    honest.Kept = honest.Honest
    exec(change, honest.__dict__)
    with pytest.raises(ConfigError, match=f"^model: {said}; put it in a file"):
        reference("model", honest.Honest)


def test_of_two_functions_of_one_name_the_one_in_memory_is_meant(notebook):
    exec("def right(scores, labels):\n    return float((scores.argmax(-1) != labels).mean())\n", vars(notebook))
    with pytest.raises(ConfigError, match=r"right is not as its source makes it \(right\); put it in a file"):
        reference("evaluation.measures", notebook.right)


def test_a_script_may_define_a_class_and_run_it_without_running_itself_again(tmp_path):
    script = f"{CELLS[0]}\n{CELLS[1]}\n{CELLS[3]}\nimport pflmpi\nprint('once')\nSMALL = {SMALL!r}\n"
    script += "config = pflmpi.Config(**SMALL, model={'name': Net, 'head': 'fc'}, algorithm='fedavg')\n"
    script += "pflmpi.run(config, out='run', ranks=1, quiet=True)\n"
    (tmp_path / "script.py").write_text(script)
    done = processes.call([sys.executable, "script.py"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr
    assert run_folder.rounds(tmp_path / "run") == [0, 1]


def test_a_script_whose_annotations_are_postponed_may_define_an_algorithm(tmp_path):
    script = "from __future__ import annotations\nfrom dataclasses import dataclass\nimport pflmpi\n"
    script += "from pflmpi.algorithms.fedavg import FedAvg\n"
    script += "@dataclass(frozen=True, kw_only=True)\nclass Mine(FedAvg):\n    factor: float = annotations and 2.0\n"
    script += f"config = pflmpi.Config(**{SMALL!r}, model='mlp', algorithm=Mine(factor=3))\n"
    script += "pflmpi.run(config, out='run', ranks=1, quiet=True)\n"
    (tmp_path / "script.py").write_text(script)
    done = processes.call([sys.executable, "script.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert run_folder.rounds(tmp_path / "run") == [0, 1]


@pytest.mark.parametrize("script_path", ["experiments/script.py", "experiments/../link.py"])
def test_modules_beside_a_script_are_found_without_it(script_path, tmp_path):
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "beside_script.py").write_text("WIDTH = 5\n")
    script = "import beside_script, pflmpi\ndef near(scores, labels):\n    return beside_script.WIDTH * 1.0\n"
    script += f"config = pflmpi.Config(**{SMALL!r}, model='mlp', algorithm='fedavg', "
    script += "evaluation={'measures': [near]})\npflmpi.run(config, out='run', ranks=1, quiet=True)\n"
    (folder / "script.py").write_text(script)
    (tmp_path / "link.py").symlink_to(folder / "script.py")
    done = processes.call([sys.executable, script_path], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    resume = [sys.executable, "-m", "pflmpi", "resume", "run", "-s", "training.rounds=2"]
    resumed = processes.call(resume, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    (folder / "beside_script.py").write_text("WIDTH = 6\n")
    assert "the code of" in processes.call([*resume[:-1], "training.rounds=3"], cwd=tmp_path).stderr
