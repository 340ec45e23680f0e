"""Arguments of a wrong type are refused by name, with what is allowed, before anything is started."""

import numpy as np
import pytest

import pflmpi
import quick_run
from pflmpi.errors import ConfigError

CONFIG = pflmpi.Config(**quick_run.QUICK)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong") / "run"
    quick_run.run(quick_run.settings(training={"rounds": 1}), folder)
    return pflmpi.open_run(folder)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: pflmpi.run({"data": {}}, out="x"), r"config = .* is a dict; expected a pflmpi.Config.*Config\(\*\*"),
        (lambda: pflmpi.run(None), "config = None is a NoneType; expected a pflmpi.Config"),
        (lambda: pflmpi.run(CONFIG, out=3), "out = 3 is a int; expected a path"),
        (lambda: pflmpi.run(CONFIG, on_round=3), "on_round = 3 is a int; expected a function of one argument"),
        (lambda: pflmpi.Config.load(3), "path = 3 is a int; expected a path"),
        (lambda: pflmpi.open_run(None), "path = None is a NoneType; expected a path"),
        (lambda: pflmpi.open_runs(3), "paths = 3 is a int; expected a pattern"),
        (lambda: pflmpi.open_runs([None]), "path = None is a NoneType; expected a path"),
    ],
)
def test_a_wrong_type_is_refused(call, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=expected):
        call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda run: run.model(1.5), "client = 1.5: must be a whole number"),
        (lambda run: run.samples("1"), "client = '1': must be a whole number"),
        (lambda run: run.round(1.0), "round = 1.0: must be a whole number"),
        (lambda run: run.cost_to("a"), "target = 'a': must be a share above 0 and at most 1"),
        (lambda run: run.cost_to(90), "target = 90: must be a share above 0 and at most 1, such as 0.9 for 90 %"),
        (lambda run: run.cost_to(2.0, "f1_macro"), "target = 2.0: must be a share above 0"),
        (lambda run: run.cost_to(float("nan"), "test_loss"), "target = nan: must be a number"),
        (lambda run: pflmpi.open_runs([run.path]).summary(90), "target = 90: must be a share above 0"),
    ],
)
def test_a_wrong_argument_of_a_run_is_refused(call, expected, run):
    with pytest.raises(ConfigError, match=expected):
        call(run)


def test_numbers_of_numpy_are_numbers(run):
    assert run.round(np.int64(1)).number == 1
    assert run.cost_to(np.float32(0.001)) == run.cost_to(0.001)
    assert run.cost_to(90, "test_loss") is not None
    assert len(run.samples(np.int64(1)).test.y)
