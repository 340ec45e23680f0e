"""LG-FedAvg: the head travels, the body stays."""

import numpy as np
import pytest

import comparisons
import numpy_network
import small_task
from pflmpi.algorithms.lgfedavg import LGFedAvg
from pflmpi.messages.kinds import Mean

LR = 0.1


def test_body_and_received_head_train_together_and_the_head_alone_travels():
    """A public implementation shares the first layer instead of the last."""
    task, batches = small_task.task(), [small_task.batch(0), small_task.batch(1)]
    client, head = {"body": comparisons.model(2)["body"]}, comparisons.model(1)["head"]
    state, up = LGFedAvg().client_update(task, client, {"head": head}, small_task.data(batches, LR))
    w = small_task.to_numpy({**client, "head": head})
    for batch in batches:
        slopes = numpy_network.gradients(w, *small_task.flat(batch))
        w = {name: w[name] - LR * slopes[name] for name in w}
    small_task.assert_close({**state, **up}, w)
    assert list(state) == ["body"] and list(up) == ["head"] and sorted(up["head"]) == ["bias", "weight"]


def test_a_client_is_tested_with_its_own_body_under_the_fresh_head():
    task, x = small_task.task(), small_task.batch(9).x
    client, fresh = {"body": comparisons.model(2)["body"]}, comparisons.model(5)["head"]
    expected = numpy_network.forward(small_task.to_numpy({**client, "head": fresh}), x.flatten(1).double().numpy())[1]
    np.testing.assert_allclose(LGFedAvg().predict(task, client, {"head": fresh}, x), expected, atol=1e-5)


@pytest.mark.parametrize("weighting", ["clients", "samples"])
def test_the_server_keeps_the_mean_of_the_heads(weighting):
    algorithm, head = LGFedAvg(weighting=weighting), comparisons.model(3)["head"]
    kind = algorithm.uplink(small_task.task())["head"]
    assert isinstance(kind, Mean) and kind.by == weighting
    server = algorithm.server_update(small_task.task(), {}, {"head": head}, None)
    assert algorithm.publish(small_task.task(), server, np.arange(1)) == {"head": head}
    assert LGFedAvg() == LGFedAvg(weighting="clients")


def test_a_step_of_padding_alone_changes_nothing():
    model = comparisons.model(2)
    comparisons.check_padding(LGFedAvg(), {"body": model["body"]}, {"head": model["head"]}, ("train",))
