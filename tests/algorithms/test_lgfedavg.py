"""LG-FedAvg: the head travels, the body stays."""

from pathlib import Path

import numpy as np
import pytest

import alike
import harness
import oracle
import small
from pflmpi import tree
from pflmpi.algorithms.lgfedavg import LGFedAvg
from pflmpi.messages.kinds import Mean
from pflmpi.store import run_folder

LR = 0.1


def test_body_and_received_head_train_together_and_the_head_alone_travels() -> None:
    """A public implementation shares the first layer instead of the last."""
    task, batches = small.task(), [small.batch(0), small.batch(1)]
    client, head = {"body": alike.model(2)["body"]}, alike.model(1)["head"]
    state, up = LGFedAvg().client_update(task, client, {"head": head}, small.data(batches, LR))
    w = small.to_numpy({**client, "head": head})
    for one in batches:
        slopes = oracle.gradients(w, *small.flat(one))
        w = {name: w[name] - LR * slopes[name] for name in w}
    small.assert_close({**state, **up}, w)
    assert list(state) == ["body"] and list(up) == ["head"] and sorted(up["head"]) == ["bias", "weight"]


def test_a_client_is_tested_with_its_own_body_under_the_fresh_head() -> None:
    task, x = small.task(), small.batch(9).x
    client, fresh = {"body": alike.model(2)["body"]}, alike.model(5)["head"]
    expected = oracle.forward(small.to_numpy({**client, "head": fresh}), x.flatten(1).double().numpy())[1]
    np.testing.assert_allclose(LGFedAvg().predict(task, client, {"head": fresh}, x), expected, atol=1e-5)


@pytest.mark.parametrize("weighting", ["clients", "samples"])
def test_the_server_keeps_the_mean_of_the_heads(weighting: str) -> None:
    algorithm, head = LGFedAvg(weighting=weighting), alike.model(3)["head"]  # type: ignore[arg-type]
    kind = algorithm.uplink(small.task())["head"]
    assert isinstance(kind, Mean) and kind.by == weighting
    server = algorithm.server_update(small.task(), {}, {"head": head}, None)  # type: ignore[arg-type]
    assert algorithm.publish(small.task(), server, np.arange(1)) == {"head": head}
    assert LGFedAvg() == LGFedAvg(weighting="clients")


@pytest.mark.parametrize("bn", ["average", "local"])
def test_batch_norm_statistics_stay_with_the_body(bn: str) -> None:
    task, batches = alike.with_batch_norm(bn=bn), [small.batch(0)]
    client = LGFedAvg().init_client(task, 0)
    down = LGFedAvg().publish(task, LGFedAvg().init_server(task), np.arange(1))
    state, up = LGFedAvg().client_update(task, client, down, alike.data_of({"train": batches}))
    assert sorted(state) == ["body", "stats"] and sorted(up["head"]) == ["bias", "weight"]
    assert tree.differences(state, client) == [] and not alike.same(state["stats"], client["stats"])
    assert LGFedAvg().predict(task, state, down, small.batch(9).x)[:2].shape == (2, small.CLASSES)


def test_with_one_client_it_is_local(tmp_path: Path) -> None:
    """The mean over one client is its own head."""
    alone = {"partition": {"name": "iid", "clients": 1}, "data": {"name": "digits", "limit": 100}}
    for name in ("lgfedavg", "local"):
        harness.run(harness.settings(alone, algorithm={"name": name}), tmp_path / name)
    head = run_folder.read_server(tmp_path / "lgfedavg", 3)
    (_, mine), (_, theirs) = (
        next(iter(run_folder.read_clients(tmp_path / name, 3, np.arange(1)).values())) for name in ("lgfedavg", "local")
    )
    found = {**mine, **{path: array[None] for path, array in head.items()}}
    for path, array in theirs.items():
        # 1e-7: the mean is exact but for the conversion to fixed point and back.
        np.testing.assert_allclose(found[path.removeprefix("model/")], array, rtol=0, atol=1e-7, err_msg=path)
    scores = [run_folder.read_metrics(tmp_path / name, 3)["correct"] for name in ("lgfedavg", "local")]
    assert np.array_equal(*scores)


def test_clients_may_have_unlike_bodies_of_one_width(tmp_path: Path) -> None:
    raw = harness.settings(
        data={"name": "digits", "limit": 200},
        algorithm={"name": "lgfedavg"},
        model=[{"name": "protocnn", "channels": channels, "kernel": 3, "padding": 1} for channels in (3, 4)],
    )
    assert harness.run(raw, tmp_path / "1") == harness.run(raw, tmp_path / "2", 2)


def test_a_step_of_padding_alone_changes_nothing() -> None:
    model = alike.model(2)
    alike.check_padding(LGFedAvg(), {"body": model["body"]}, {"head": model["head"]}, ("train",))
