"""Lanes gather the samples of what an algorithm goes over, and no others."""

from unittest import mock

import pytest

import quick_run
from every_algorithm import every_algorithm
from pflmpi.runtime.executors import batches


@pytest.mark.parametrize(("case", "whole"), [("local", False), ("fedgmh-full", True)])
def test_the_whole_training_split_is_not_gathered_for_nothing(case, whole, tmp_path):
    training, runtime = {"steps": 1, "batch_size": 2, "rounds": 1}, {"executor": "lanes"}
    raw = quick_run.settings(every_algorithm()[case], training=training, runtime=runtime)
    with mock.patch.object(batches, "gather_samples", wraps=batches.gather_samples) as gathered:
        quick_run.run(raw, tmp_path / "run")
    shapes = [tuple(call.args[1].shape[1:]) for call in gathered.call_args_list]
    assert (1, 2) in shapes, "the pass"
    assert (len(set(shapes)) > 1) == whole, shapes
