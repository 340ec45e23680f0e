"""Options of the `training` section with every algorithm: followed or refused, with the same bits everywhere."""

import numpy as np
import pytest

import quick_run
from every_algorithm import every_algorithm
from pflmpi.errors import CheckpointError, UserError
from pflmpi.store import run_folder
from pflmpi.testing import conformance
from pflmpi.testing.conformance import Runs

CASES = every_algorithm()
ONE_OF_EACH = {case["algorithm"]["name"]: name for name, case in reversed(CASES.items())}.values()
REFUSES_STATE = {"pfedme", "fedfcd-full", "perfedavg"}
ADAM = {"optimizer": "adam", "keep_optimizer": True, "lr": 0.01}


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_adam_is_kept_between_rounds_or_refused(case, tmp_path):
    training = {**CASES[case]["training"], **ADAM, "rounds": 1, "clip_norm": 1.0}
    raw = quick_run.settings(CASES[case], training=training, evaluation={"every": 9})
    if case in REFUSES_STATE:
        with pytest.raises(UserError, match=r"training.(keep_optimizer|optimizer)"):
            quick_run.run(raw, tmp_path / "run")
        return
    quick_run.run(raw, tmp_path / "run")
    state = conformance.state_of(tmp_path / "run", 1)
    steps = [array for path, array in state.items() if "/optimizer/" in path and path.endswith("/steps")]
    trained = np.isin(np.arange(7), run_folder.read_metrics(tmp_path / "run", 1)["participants"])
    assert steps and all(((count > 0) == trained).all() for count in steps)


@pytest.mark.parametrize("name", ["fedrep", "ditto"])
def test_bits_and_continuation_with_state_that_is_kept(name, tmp_path):
    training = {**ADAM, "decay_by": "participations", "schedule": "cosine", "decay_rounds": 5, "label_smoothing": 0.1}
    runs = Runs({**CASES[name], "training": training}, tmp_path)
    for executor in conformance.EXECUTORS:
        conformance.same_bits(runs, executor, 3)
    conformance.loop_and_lanes_agree(runs, 1e-4)  # Adam divides by the root of a square: rounding grows
    conformance.exact_continuation(runs, "latest", "lanes")


@pytest.mark.parametrize(
    "training, message",
    [
        ({"optimizer": "adam", "momentum": 0.9}, "training.momentum = 0.9 has an effect with training.optimizer: sgd"),
        ({"beta1": 0.5}, "training.beta1 = 0.5 has an effect with training.optimizer: adam or adamw only"),
        ({"keep_optimizer": True}, "training.keep_optimizer = True has an effect with momentum, or"),
        ({"schedule": "cosine", "lr_decay": 0.9}, "training.lr_decay = 0.9 has an effect with .*exponential or step"),
        ({"schedule": "step"}, "needs training.decay_rounds"),
    ],
)
def test_options_without_effect_are_refused(training, message, tmp_path):
    with pytest.raises(UserError, match=message):
        quick_run.run(quick_run.settings(training=training), tmp_path / "run")


def test_more_rounds_would_change_a_cosine_over_all_rounds(tmp_path):
    quick_run.run(quick_run.settings(training={"rounds": 1, "schedule": "cosine"}), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"training.rounds = 1 in the run, 2 now"):
        quick_run.resume(tmp_path / "run", ("training.rounds=2",))
