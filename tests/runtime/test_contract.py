"""An algorithm that breaks its contract is refused by name: class, method, client, and what is allowed."""

import dataclasses
import random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import quick_run
from comparisons import state_of
from pflmpi.algorithms import ALGORITHMS
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.fedper import FedPer
from pflmpi.errors import RunError, UserError
from pflmpi.learning.client import average
from pflmpi.learning.personal import Kept, NotAModel, Received
from pflmpi.learning.sgd import train


def run(kind, folder, patch, executor="loop"):
    """A quick run of an algorithm that the package does not have."""
    kind = dataclasses.dataclass(frozen=True, kw_only=True)(kind)
    patch.setitem(ALGORITHMS._objects, "mine", kind)
    raw = quick_run.settings(algorithm={"name": "mine"}, runtime={"executor": executor, "lanes": 3})
    quick_run.run(raw, folder / "run")
    return folder / "run"


def with_loss(loss):
    class Mine(FedAvg):
        def loss(self, task: Any) -> Any:
            return lambda model, batch: loss(task.predict(model, batch.x, training=True), batch)

    return Mine


def updating(change, base=FedPer):
    """FedPer whose `client_update` returns something else."""

    class Mine(base):
        def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
            return change(*super(type(self), self).client_update(task, client, down, data))

    return Mine


def plain(scores, batch):
    return F.cross_entropy(scores, batch.y)


def over_real_samples(scores, batch):
    return average(F.cross_entropy(scores, batch.y, reduction="none"), batch)


def test_a_loss_that_counts_padding_is_refused_in_lanes(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"Mine.client_update depends on images and labels in the padding.*average"):
        run(with_loss(plain), tmp_path, monkeypatch, "lanes")
    assert not (tmp_path / "run").exists()
    run(with_loss(plain), tmp_path, monkeypatch, "loop")


def test_a_loss_over_real_samples_is_the_same_in_lanes(tmp_path, monkeypatch):
    loop, lanes = (
        state_of(run(with_loss(over_real_samples), tmp_path / executor, monkeypatch, executor))
        for executor in ("loop", "lanes")
    )
    assert loop.keys() == lanes.keys()
    for path, array in loop.items():  # 1e-5: float32 sums in another order
        np.testing.assert_allclose(array, lanes[path], atol=1e-5, err_msg=path)


def test_a_step_on_padding_alone_is_refused(tmp_path, monkeypatch):
    class Mine(FedAvg):
        def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
            state, up = super(type(self), self).client_update(task, client, down, data)
            steps = sum(1 for _ in data.passes["train"])
            up["model"]["head"]["bias"] = up["model"]["head"]["bias"] + steps
            return state, up

    with pytest.raises(UserError, match=r"Mine.client_update depends on a batch that is padding alone: .*head/bias"):
        run(Mine, tmp_path, monkeypatch, "lanes")


STATES = {
    "missing": (lambda state, up: ({}, up), r"head/bias: absent against \[.*10\] float32"),
    "misspelt": (lambda state, up: ({"haed": state["head"]}, up), r"haed/bias: \[.*10\] float32 against absent"),
    "another shape": (
        lambda state, up: ({"head": {**state["head"], "bias": state["head"]["bias"][:3]}}, up),
        r"head/bias: \[.*3\] float32 against \[.*10\] float32",
    ),
    "another type": (
        lambda state, up: ({"head": {**state["head"], "bias": state["head"]["bias"].double()}}, up),
        r"head/bias: .*float64 against .*float32",
    ),
    "no dict": (lambda state, up: (state["head"]["bias"], up), "a Tensor as state"),
}


@pytest.mark.parametrize("case", STATES)
@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_a_client_state_of_another_form_is_refused(case, executor, tmp_path, monkeypatch):
    change, text = STATES[case]
    with pytest.raises(RunError, match=r"Mine.client_update returned .*" + text):
        run(updating(change), tmp_path, monkeypatch, executor)


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_an_error_names_class_method_client_and_line(executor, tmp_path, monkeypatch):
    class Mine(FedAvg):
        def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
            return {}, {"model": down["model"]["bdy"]}

    with pytest.raises(
        RunError, match=r"Mine.client_update \(round \d, clients? [\d, -]+\): KeyError: 'bdy'; at test_contract"
    ):
        run(Mine, tmp_path, monkeypatch, executor)


DRAWS = {"torch": lambda: torch.rand(1), "numpy": lambda: np.random.rand(), "random": random.random}


@pytest.mark.parametrize("draw", DRAWS)
def test_global_random_numbers_are_refused(draw, tmp_path, monkeypatch):
    def drawn(state, up):
        DRAWS[draw]()
        return state, up

    with pytest.raises(RunError, match=r"Mine.client_update .* draws random numbers .*draws_noise"):
        run(updating(drawn), tmp_path, monkeypatch)


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_scores_of_another_shape_are_refused(executor, tmp_path, monkeypatch):
    class Mine(FedAvg):
        def predict(self, task: Any, client: Any, down: Any, x: Any) -> Any:
            return super(type(self), self).predict(task, client, down, x)[:, :4]

    with pytest.raises(RunError, match=r"Mine.predict returned scores of shape \[\d+, 4\] .* \[\d+, 10\]"):
        run(Mine, tmp_path, monkeypatch, executor)


class Misnamed(FedAvg):
    predicts_with: ClassVar[tuple[str, ...]] = ("modl",)


class Unadapted(FedAvg):
    adapts_with: ClassVar[tuple[str, ...]] = ("tain",)


class Unreceived(FedAvg):
    def personal(self, task: Any) -> Any:
        return Received("body")


class Refusing(FedAvg):
    def personal(self, task: Any) -> Any:
        return NotAModel("tea leaves", nearest=Kept())


class Receiving(FedAvg):
    def init_client(self, task: Any) -> Any:
        return {"received": torch.zeros(3)}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Receiving, "Receiving.init_client has a part 'received', under which a client's last reply is kept in"),
        (Misnamed, "Misnamed.predicts_with names 'modl', which is no message of `downlink`; known: model"),
        (Unadapted, "Unadapted.adapts_with names 'tain', which is no pass of `passes`; known: train"),
        (Unreceived, "Unreceived.personal names 'body', which is no message in `predicts_with`; known: model"),
        (Refusing, "Refusing.personal says that clients predict with tea leaves; then it needs `predict`"),
    ],
)
def test_names_that_do_not_exist_are_refused_before_the_start(kind, text, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=text):
        run(kind, tmp_path, monkeypatch)
    assert not (tmp_path / "run").exists()


def test_a_part_to_freeze_that_the_model_lacks_is_refused(tmp_path, monkeypatch):
    class Mine(FedAvg):
        def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
            loss = self.loss(task)
            model = train(task, down["model"], data.passes["train"], loss, data.learning_rate, frozen=("bdy",))
            return {}, {"model": model}

    with pytest.raises(RunError, match=r"Mine.client_update .*frozen names 'bdy'.*body, head"):
        run(Mine, tmp_path, monkeypatch)


def test_a_draw_from_the_generator_of_a_gpu_is_refused(tmp_path, monkeypatch):
    state = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", state.clone)

    def drawing(client, up):
        state.add_(1)
        return client, up

    with pytest.raises(RunError, match=r"Mine.client_update .* draws random numbers .*draws_noise"):
        run(updating(drawing), tmp_path, monkeypatch)


def test_an_operation_that_cannot_be_repeated_on_a_gpu_is_said_with_what_to_do(tmp_path, monkeypatch):
    def pooling(client, up):
        raise RuntimeError("adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but")

    with pytest.raises(RunError, match=r"adaptive_avg_pool2d_backward_cuda .*choose another one .*device = 'cpu'"):
        run(updating(pooling), tmp_path, monkeypatch)
