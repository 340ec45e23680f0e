"""Algorithms that do not keep to what they declare are refused, before anything is sent."""

from typing import Any

import pytest
import torch

import quick_run
from pflmpi import tree
from pflmpi.algorithms import ALGORITHMS
from pflmpi.algorithms.base import only
from pflmpi.algorithms.fedamp import FedAMP
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.fedfomo import FedFomo
from pflmpi.algorithms.fedgmh import FedGMH
from pflmpi.algorithms.fesem import FeSEM
from pflmpi.errors import RunError
from pflmpi.messages.kinds import Own
from pflmpi.store import run_folder


def up_with(change):
    """Return a `client_update` whose messages are changed."""

    def client_update(self, task, client, down, data):
        state, up = super(type(self), self).client_update(task, client, down, data)
        return state, change(up, state, data)

    return {"client_update": client_update}


def down_with(change):
    """Return a `publish` whose messages are changed."""

    def publish(self, task, server, receivers):
        return change(super(type(self), self).publish(task, server, receivers))

    return {"publish": publish}


ROGUES: dict[str, tuple[type, dict[str, Any], list[str]]] = {
    "gathered: one more": (
        FedGMH,
        up_with(lambda up, state, data: {**up, "head": state["model"]["head"]}),
        ["uplink", "head/weight", "against absent"],
    ),
    "gathered: more inside": (
        FedGMH,
        up_with(lambda up, state, data: {"means": {**up["means"], "totals": data.class_counts}}),
        ["uplink", "means/totals"],
    ),
    "gathered: another shape of as many bytes": (
        FedGMH,
        up_with(lambda up, state, data: {"means": {**up["means"], "means": up["means"]["means"].mT}}),
        ["uplink", "means/means", ", 12, 10] float32 against", ", 10, 12]"],
    ),
    "gathered: another type of as many bytes": (
        FedAMP,
        up_with(lambda up, state, data: {"model": tree.map(lambda leaf: leaf.int(), up["model"])}),
        ["uplink", "model/body", "int32", "float32"],
    ),
    "gathered: missing": (FedGMH, up_with(lambda up, state, data: {}), ["uplink", "means/means", "absent"]),
    "folded: one more": (
        FedAvg,
        up_with(lambda up, state, data: {**up, "losses": {"last": data.class_counts}}),
        ["uplink", "losses/last"],
    ),
    "folded: more inside": (
        FedAvg,
        up_with(lambda up, state, data: {"model": {**up["model"], "counts": data.class_counts}}),
        ["uplink", "model/counts"],
    ),
    "folded: part missing": (
        FedAvg,
        up_with(lambda up, state, data: {"model": {"body": up["model"]["body"]}}),
        ["uplink", "model/head/weight", "absent"],
    ),
    "folded: missing": (FedAvg, up_with(lambda up, state, data: {}), ["uplink", "model/body", "absent"]),
    "shared: one more": (
        FedAvg,
        down_with(lambda down: {**down, "note": {"text": torch.zeros(3)}}),
        ["downlink", "note/text"],
    ),
    "shared: another shape": (
        FedAvg,
        down_with(lambda down: {"model": tree.map(lambda leaf: leaf.flatten(), down["model"])}),
        ["downlink", "model/head/weight", "[120]", "[10, 12]"],
    ),
    "shared: missing": (FedAvg, down_with(lambda down: {}), ["downlink", "model/body", "absent"]),
    "own: one row too many": (
        FedAvg,
        {
            "downlink": lambda self, task: {"model": Own(task.like("body", "head"))},
            "publish": lambda self, task, server, receivers: {
                "model": tree.stack([only(server["model"], ("body", "head"))] * (len(receivers) + 1))
            },
        },
        ["downlink", "model/body", "[8, ", "[7, "],
    ),
    "own: one row too few, of cluster centres": (
        FeSEM,
        down_with(lambda down: {"centre": tree.map(lambda leaf: leaf[1:], down["centre"])}),
        ["downlink", "centre/body", "[6, ", "[7, "],
    ),
    "of clients: one row too many": (
        FedFomo,
        down_with(lambda down: {"candidates": tree.map(lambda leaf: torch.cat([leaf, leaf[:1]]), down["candidates"])}),
        ["downlink", "candidates/clients", "[4, 5] int64", "[3, 5] int64"],
    ),
    "of clients: with models": (
        FedFomo,
        down_with(lambda down: {"candidates": {**down["candidates"], "model": {"bias": torch.zeros(3, 5, 10)}}}),
        ["downlink", "candidates/model/bias", "absent"],
    ),
    "kept rows: sent as well": (
        FedFomo,
        up_with(lambda up, state, data: {**up, "model": state["model"]}),
        ["uplink", "model/body", "absent"],
    ),
    "kept: one leaf alone": (
        FedAMP,
        {"answer": lambda self, task, server, up, round: {"cloud": {"head": up["model"]["head"]}}},
        ["downlink", "cloud/body", "absent against [3, "],
    ),
    "kept: a row too few": (
        FedAMP,
        {"answer": lambda self, task, server, up, round: {"cloud": tree.map(lambda leaf: leaf[1:], up["model"])}},
        ["downlink", "cloud/body", "[2, ", "[3, "],
    ),
    "by class: one more": (
        FedGMH,
        down_with(lambda down: {**down, "all": down["heads"]}),
        ["downlink", "all/weight", "absent"],
    ),
    "by class: some missing": (
        FedGMH,
        down_with(lambda down: {"heads": tree.map(lambda leaf: leaf[:9], down["heads"])}),
        ["downlink", "heads/weight", "[9, 10, 12]", "[10, 10, 12]"],
    ),
}


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("name", ROGUES)
def test_what_was_not_declared_is_refused(name, executor, tmp_path, monkeypatch):
    parent, methods, words = ROGUES[name]
    registered = next(key for key, kind in ALGORITHMS.items() if kind is parent)
    monkeypatch.setitem(ALGORITHMS._objects, registered, type("Rogue", (parent,), methods))
    raw = quick_run.settings(algorithm={"name": registered}, runtime={"executor": executor, "lanes": 3})
    with pytest.raises(RunError) as caught:
        quick_run.run(raw, tmp_path / "run")
    text = str(caught.value)
    assert all(word in text for word in [*words, "not what it declares"]) and "\n" not in text, text
    assert not [number for number in run_folder.rounds(tmp_path / "run") if number > 0]
