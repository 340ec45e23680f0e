"""An algorithm that breaks its contract is refused by name: class, method, client, and what is allowed."""

import copy
import dataclasses
import functools
import random
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._functorch import vmap
from torch.nn import functional as F

import quick_run
from comparisons import state_of
from pflmpi import open_run, tree
from pflmpi.algorithms import ALGORITHMS
from pflmpi.algorithms.base import Round
from pflmpi.algorithms.ditto import Ditto
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.fedbabu import FedBABU
from pflmpi.algorithms.fedper import FedPer
from pflmpi.algorithms.fedrod import FedRoD
from pflmpi.algorithms.pfedafe import PFedAFE
from pflmpi.config.load import parse
from pflmpi.errors import AlgorithmError, ConfigError, PflmpiError, RunError, UserError
from pflmpi.experiment.build import prepare
from pflmpi.learning.client import Batch, ClientData, average, cross_entropy, model_loss, uniform
from pflmpi.learning.diagnostics import PerClient
from pflmpi.learning.personal import Kept, Merge, Mix, NotAModel, Personal, Received
from pflmpi.learning.sgd import train
from pflmpi.learning.task import HOST, Task
from pflmpi.messages.kinds import Mean, Messages, Shared, Sum
from pflmpi.tree import Tree


def run(kind, folder, patch, executor="loop", training=None):
    """A quick run of an algorithm that the package does not have."""
    kind = dataclasses.dataclass(frozen=True, kw_only=True)(kind)
    patch.setitem(ALGORITHMS._objects, "mine", kind)
    runtime = {"executor": executor, "lanes": 3}
    raw = quick_run.settings(algorithm={"name": "mine"}, runtime=runtime, training=training or {})
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


def weighting(number):
    """FedAvg that multiplies what it sends by the number of training samples, in a way of counting them."""

    class Counting(FedAvg):
        def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
            state, up = super(type(self), self).client_update(task, client, down, data)
            count = sum(number(batch) for batch in data.train)
            return state, {"model": tree.map(lambda leaf: leaf * count, up["model"])}

    return Counting


def test_counting_the_places_of_a_batch_is_refused_in_lanes(tmp_path, monkeypatch):
    text = r"Counting.client_update depends on how much padding is in a batch: .*/bias, .*; count .* batch.count in"
    with pytest.raises(UserError, match=text):
        run(weighting(lambda batch: len(batch.y) * batch.active), tmp_path, monkeypatch, "lanes")


def test_its_real_samples_are_the_same_number_in_lanes(tmp_path, monkeypatch):
    loop, lanes = (
        state_of(run(weighting(lambda batch: batch.count), tmp_path / executor, monkeypatch, executor), 1)
        for executor in ("loop", "lanes")
    )
    for path, array in loop.items():
        np.testing.assert_allclose(array, lanes[path], rtol=1e-5, atol=1e-4, err_msg=path)


def distilling():
    """FedAvg that trains on three samples of its own first."""

    class Distilling(FedAvg):
        def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
            batch = Batch(torch.linspace(0, 1, 3 * 64).view(3, 1, 8, 8), torch.tensor([1, 2, 3]))
            model = train(task, down["model"], [batch] * 2, model_loss(task), data.learning_rate)
            return super(type(self), self).client_update(task, client, {"model": model}, data)

    return Distilling


def test_a_batch_that_an_algorithm_makes_has_real_samples_alone_in_lanes_too(tmp_path, monkeypatch):
    loop, lanes = (
        state_of(run(distilling(), tmp_path / executor, monkeypatch, executor)) for executor in ("loop", "lanes")
    )
    for path, array in loop.items():  # 1e-5: float32 sums in another order
        np.testing.assert_allclose(array, lanes[path], atol=1e-5, err_msg=path)


STATES = {
    "missing": (lambda state, up: ({}, up), r"head/bias: absent against \[.*10\] float32"),
    "misspelt": (lambda state, up: ({"haed": state["head"]}, up), r"haed/bias: \[.*10\] float32 against absent"),
    "another shape": (
        lambda state, up: ({"head": {**state["head"], "bias": state["head"]["bias"][:3]}}, up),
        r"head/bias: \[.*3\] float32 against \[.*10\] float32",
    ),
    "another type": (
        lambda state, up: ({"head": {**state["head"], "bias": state["head"]["bias"].double()}}, up),
        r"head/bias: .*float64 against .*float32; convert it, as by .to\(torch.float32\), or begin with float64",
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


def test_an_optimizer_that_is_kept_for_other_parameters_is_refused_with_what_to_do(tmp_path, monkeypatch):
    class Mine(FedAvg):
        def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
            passes, rate = data.passes["train"], data.learning_rate
            return {}, {"model": train(task, down["model"], passes, model_loss(task), rate, frozen=("head",))}

    monkeypatch.setitem(ALGORITHMS._objects, "mine", Mine)
    training = {"momentum": 0.5, "keep_optimizer": True}
    raw = quick_run.settings(algorithm={"name": "mine"}, training=training)
    with pytest.raises(
        AlgorithmError, match=r"trains other .*override `trainings`, as by return \{'train': task.like\('body'\)\}"
    ):
        quick_run.run(raw, tmp_path / "run")


def test_statistics_of_several_models_are_to_be_named_as_frozen(tmp_path, monkeypatch):
    class Mine(FedAvg):
        def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
            def loss(models: Tree, batch: Any) -> torch.Tensor:
                scores = [task.predict(models[name], batch.x, training=True) for name in ("fed", "own")]
                return cross_entropy(sum(scores), batch)

            start = {"fed": down["model"], "own": task.init()}
            return {}, {"model": train(task, start, data.passes["train"], loss, data.learning_rate)["fed"]}

    monkeypatch.setitem(ALGORITHMS._objects, "mine", Mine)
    raw = quick_run.settings(algorithm={"name": "mine"}, model={"name": "resnet18"}, runtime={"executor": "loop"})
    with pytest.raises(AlgorithmError, match=r"not trained: .*frozen=\('fed/stats', 'own/stats'\)"):
        quick_run.run(raw, tmp_path / "run")


OF_LANES: dict[str, tuple[Callable[[ClientData], object], str]] = {
    "a copy": (lambda data: copy.deepcopy(data.class_counts), "Cannot access storage.*tree.clone copies"),
    "an if": (lambda data: 1 if data.num_samples > 5 else 2, "data-dependent control flow.*torch.where chooses"),
    "a number": (lambda data: [round(batch.count) for batch in data.train], "TypeError"),
    "no such matrix": (lambda data: torch.linalg.cholesky(-torch.eye(2) * data.num_samples), "LinAlgError: .*many cl"),
}


@pytest.mark.parametrize("case", ["a copy", "an if", "no such matrix"])
def test_what_lanes_do_not_suit_is_said_with_what_to_do(case, tmp_path, monkeypatch):
    compute, text = OF_LANES[case]

    class Mine(FedAvg):
        def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
            compute(data)
            return super(type(self), self).client_update(task, client, down, data)

    with pytest.raises(AlgorithmError, match=rf"(?s){text}.*runtime.executor = 'loop'"):
        run(Mine, tmp_path, monkeypatch, "lanes")


@pytest.mark.parametrize("case", ["a copy", "an if", "a number", "padding"])
def test_the_loop_is_taken_for_it_unless_lanes_are_configured(case, tmp_path, monkeypatch, caplog):
    class Mine(FedAvg):
        def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
            if case != "padding":
                OF_LANES[case][0](data)
            return super(type(self), self).client_update(task, client, down, data)

        def loss(self, task: Any) -> Any:
            loss = plain if case == "padding" else cross_entropy
            return lambda model, batch: loss(task.predict(model, batch.x), batch)

    run(Mine, tmp_path, monkeypatch, "auto")
    (line,) = (record.message for record in caplog.records if "one after the other" in record.message)
    assert "(runtime.executor: loop): Mine.client_update" in line
    assert "executor: loop" in (tmp_path / "run" / "config.yaml").read_text()


def test_an_error_that_the_loop_has_too_ends_the_first_round(tmp_path, monkeypatch):
    class Mine(FedAvg):
        def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
            raise KeyError("covariance")

    with pytest.raises(AlgorithmError, match=r"Mine.client_update \(round 1, .*KeyError: 'covariance'"):
        run(Mine, tmp_path, monkeypatch, "auto")


@pytest.mark.parametrize("executor, stop", [("lanes", None), ("loop", {"metric": "train_loss", "patience": 2})])
def test_a_trial_receives_what_the_first_round_sends(executor, stop, tmp_path, monkeypatch):
    class Mine(FedAvg):
        def init_server(self, task: Any) -> Any:
            return {**super(type(self), self).init_server(task), "covariance": torch.eye(9)}

        def downlink(self, task: Any) -> Any:
            return {**super(type(self), self).downlink(task), "covariance": Shared({"c": torch.zeros(9, 9)})}

        def publish(self, task: Any, server: Any, receivers: Any) -> Any:
            return {"model": server["model"], "covariance": {"c": server["covariance"]}}

        def server_update(self, task: Any, server: Any, up: Any, round: Any) -> Any:
            return {**up, "covariance": server["covariance"]}

        def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
            torch.linalg.cholesky(down["covariance"]["c"])
            return super(type(self), self).client_update(task, client, down, data)

    run(Mine, tmp_path, monkeypatch, executor, {"stop": stop})


def test_an_interrupt_where_lanes_begin_stays_one(tmp_path, monkeypatch):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(vmap, "_vmap_increment_nesting", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(with_loss(plain), tmp_path, monkeypatch, "lanes")


DRAWS = {"torch": lambda: torch.rand(1), "numpy": lambda: np.random.rand(), "random": random.random}


@pytest.mark.parametrize("draw", DRAWS)
def test_global_random_numbers_are_refused(draw, tmp_path, monkeypatch):
    def drawn(state, up):
        DRAWS[draw]()
        return state, up

    with pytest.raises(RunError, match=r"Mine.client_update .* draws random numbers .*draws_noise"):
        run(updating(drawn), tmp_path, monkeypatch)


@pytest.mark.parametrize("method", ["client_update", "init_client", "init_server", "publish", "server_update"])
def test_a_method_that_returns_other_values_at_a_second_call_is_refused(method, tmp_path, monkeypatch):
    def shifted(values: Tree) -> Tree:
        return tree.map(lambda leaf: leaf + np.random.default_rng().normal(), values)

    def drawing(self: FedPer, *arguments: Any) -> Any:
        returned = getattr(FedPer, method)(self, *arguments)
        return (returned[0], shifted(returned[1])) if method == "client_update" else shifted(returned)

    monkeypatch.setitem(ALGORITHMS._objects, "drawing", type("Drawing", (FedPer,), {method: drawing}))
    with pytest.raises(RunError, match=rf"Drawing.{method} returns another .* when it is called again .*draws_noise"):
        quick_run.run(quick_run.settings(algorithm={"name": "drawing"}), tmp_path / "run")


def test_a_run_that_was_tried_is_not_tried_again(tmp_path, monkeypatch):
    """As one of before: what it has trained can be looked at, and it goes on."""
    draws = False

    class Drawing(FedPer):
        def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
            state, up = super().client_update(task, client, down, data)
            return state, tree.map(lambda leaf: leaf + np.random.default_rng().normal() * draws, up)

    monkeypatch.setitem(ALGORITHMS._objects, "drawing", Drawing)
    quick_run.run(quick_run.settings(algorithm={"name": "drawing"}), tmp_path / "run")
    draws = True
    open_run(tmp_path / "run").model(0)
    quick_run.resume(tmp_path / "run", ("training.rounds=4",))
    with pytest.raises(RunError, match=r"Drawing.client_update returns another up/.* when it is called again"):
        open_run(tmp_path / "run").fork(tmp_path / "fork")


def test_repeating_is_tried_with_one_thread_because_several_add_gradients_in_any_order(tmp_path, monkeypatch):
    threads = []

    class Noting(FedPer):
        def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
            threads.append(torch.get_num_threads())
            return super().client_update(task, client, down, data)

    monkeypatch.setitem(ALGORITHMS._objects, "noting", Noting)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        prepare(parse(quick_run.settings(algorithm={"name": "noting"}, runtime={"executor": "loop"})), HOST)
        assert threads == [1, 1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_diagnostic_may_be_a_time(tmp_path, monkeypatch):
    class Timed(FedPer):
        def diagnostics(self, task: Task) -> dict[str, Any]:
            return {"clock": PerClient(title="Clock", unit="s")}

        def diagnose(self, task: Task, server: Tree, up: Messages, round: Round) -> dict[str, torch.Tensor]:
            return {"clock": torch.full((len(round.participants),), time.perf_counter())}

    monkeypatch.setitem(ALGORITHMS._objects, "timed", Timed)
    quick_run.run(quick_run.settings(algorithm={"name": "timed"}), tmp_path / "run")


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("method", ["predict", "adapt"])
def test_so_they_are_where_the_first_round_is_not_tested(method, executor, tmp_path, monkeypatch):
    class Drawing(FedPer):
        def predict(self, task: Task, client: Tree, down: Messages, x: torch.Tensor) -> torch.Tensor:
            return super().predict(task, client, down, x) + (0 if method == "adapt" else np.random.rand())

        def adapt(self, task: Task, client: Tree, down: Messages, data: ClientData) -> Tree:
            return tree.map(lambda leaf: leaf * (1 if method == "predict" else np.random.rand()), client)

    monkeypatch.setitem(ALGORITHMS._objects, "drawing", Drawing)
    raw = quick_run.settings(algorithm={"name": "drawing"}, evaluation={"every": 2}, runtime={"executor": executor})
    with pytest.raises(RunError, match=rf"Drawing.{method} \(round 2, .* draws random numbers from a global generator"):
        quick_run.run(raw, tmp_path / "run")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldKept(FedPer):
    updates: list[int] = dataclasses.field(default_factory=list)

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        self.updates.append(round.number)
        return super().server_update(task, server, up, round)


class ClassKept(FedPer):
    times: ClassVar[dict[str, int]] = {}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        self.times["trained"] = self.times.get("trained", 0) + 1
        return super().client_update(task, client, down, data)


class Inheriting(ClassKept):
    pass


class AttributeKept(FedPer):
    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        object.__setattr__(self, "_last", data.round)
        return super().client_update(task, client, down, data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MadeAtFirst(FedPer):
    def __post_init__(self) -> None:
        object.__setattr__(self, "_velocity", {})

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        self._velocity["before"] = up  # type: ignore[attr-defined]
        return super().server_update(task, server, up, round)


KEPT = {
    AttributeKept: r"AttributeKept.client_update \(round [01], client.*\) changes _last; nothing is kept in",
    MadeAtFirst: r"MadeAtFirst.server_update \(round 1\) changes _velocity; nothing is kept in the algorithm itself",
    FieldKept: r"FieldKept.server_update \(round 1\) changes updates; nothing is kept in the algorithm itself",
    ClassKept: r"ClassKept.client_update \(round [01], client.*\) changes ClassKept.times; nothing is kept in",
    Inheriting: r"Inheriting.client_update \(round [01], client.*\) changes ClassKept.times; nothing is kept in",
}


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("kind", KEPT)
def test_nothing_is_kept_in_the_algorithm(kind, executor, tmp_path, monkeypatch):
    monkeypatch.setitem(ALGORITHMS._objects, "keeping", kind)
    raw = quick_run.settings(algorithm={"name": "keeping"}, runtime={"executor": executor})
    with pytest.raises(AlgorithmError, match=KEPT[kind]):
        quick_run.run(raw, tmp_path / "run")


def test_but_what_is_computed_from_its_fields_once(tmp_path, monkeypatch):
    class Mine(FedPer):
        @functools.cached_property
        def half(self) -> float:
            return 1 / 2

        def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
            return super(type(self), self).client_update(task, client, down, data) if self.half else ({}, {})

    run(Mine, tmp_path, monkeypatch)


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_scores_of_another_shape_are_refused(executor, tmp_path, monkeypatch):
    class Mine(FedAvg):
        def predict(self, task: Any, client: Any, down: Any, x: Any) -> Any:
            return super(type(self), self).predict(task, client, down, x)[:, :4]

    with pytest.raises(RunError, match=r"Mine.predict returned scores of shape \[\d+, 4\] .* \[\d+, 10\]"):
        run(Mine, tmp_path, monkeypatch, executor)


class Negated(Ditto):
    def predict(self, task: Any, client: Any, down: Any, x: Any) -> Any:
        return -super().predict(task, client, down, x)


class WithReceived(Ditto):
    predicts_with: ClassVar[tuple[str, ...]] = ("model",)

    def predict(self, task: Any, client: Any, down: Any, x: Any) -> Any:
        return (super().predict(task, client, down, x) + task.predict(down["model"], x)) / 2


class AsAdapted(FedBABU):
    def predict(self, task: Any, client: Any, down: Any, x: Any) -> Any:
        return task.predict({**down["body"], **client}, x)


class ByItself(Ditto):
    def predict(self, task: Any, client: Any, down: Any, x: Any) -> Any:
        return task.predict(client["personal"], x).log_softmax(-1)


class OfTwoHeads(FedRoD):
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedToAdapt(PFedAFE):
    adaptive: bool = False


def try_out(kind, monkeypatch, **sections):
    """Prepares a new run of an algorithm."""
    monkeypatch.setitem(ALGORITHMS._objects, "mine", kind)
    prepare(parse(quick_run.settings(sections, algorithm={"name": "mine"})), HOST)


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("kind", [Negated, WithReceived, AsAdapted])
def test_a_prediction_by_another_model_than_is_described_is_refused(kind, executor, monkeypatch):
    name = kind.__name__
    text = rf"{name}.predict scores samples otherwise .*\d in a trial.* that {name}.personal .*NotAModel\('WHAT A"
    with pytest.raises(ConfigError, match=text):
        try_out(kind, monkeypatch, runtime={"executor": executor})


@pytest.mark.parametrize("kind", [ByItself, OfTwoHeads, MixedToAdapt])
def test_an_own_prediction_by_the_model_that_is_described_is_permitted(kind, monkeypatch):
    try_out(kind, monkeypatch)


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


class Outside(FedAvg):
    def diagnostics(self, task: Any) -> Any:
        return {"../alpha": PerClient(title="Alpha", kept="alpha")}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Receiving, "Receiving.init_client has a part 'received', under which a client's last reply is kept in"),
        (Misnamed, "Misnamed.predicts_with names 'modl', which is no message of `downlink`; known: model"),
        (Unadapted, "Unadapted.adapts_with names 'tain', which is no pass of `passes`; known: train"),
        (Unreceived, "Unreceived.personal names 'body', which is no message in `predicts_with`; known: model"),
        (Outside, "Outside.diagnostics names '../alpha': use lower-case letters, digits and underscores"),
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


Change = Callable[[Tree, Messages, ClientData], None]


def change_batch(name):
    def change(client, down, data):
        for batch in data.passes["train"]:
            getattr(batch, name).add_(1).sub_(1)

    return change


def change_copies(client, down, data):
    for _, leaf in tree.leaves(tree.clone({**client, **down})):
        leaf.add_(1)
    counts = data.class_counts.clone()
    counts += 1


def leaf_of(down):
    return tree.at(down["body"], "body/fc1/bias")


CHANGES: dict[str, tuple[Change, str]] = {
    "its state": (lambda client, down, data: tree.at(client, "head/bias").add_(1), "client/head/bias"),
    "a message": (lambda client, down, data: leaf_of(down).mul_(0), "down/body/body/fc1/bias"),
    "class counts": (lambda client, down, data: data.class_counts.add_(1), "data.class_counts"),
}
LOOP: dict[str, tuple[Change, str]] = {  # of the loop alone: in lanes, torch itself refuses `.data`
    "samples": (change_batch("x"), "batch.x"),
    "labels": (change_batch("y"), "batch.y"),
    "data": (lambda client, down, data: leaf_of(down).data.mul_(0.5), "down/body/body/fc1/bias"),
}


def run_changing(change, executor, folder, monkeypatch, ranks=1):
    class Changing(FedPer):
        def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
            change(client, down, data)
            return super().client_update(task, client, down, data)

    monkeypatch.setitem(ALGORITHMS._objects, "changing", Changing)
    raw = quick_run.settings(algorithm={"name": "changing"}, runtime={"executor": executor, "lanes": 3})
    return quick_run.run(raw, folder, ranks)


@pytest.mark.parametrize("what", [*CHANGES, *LOOP])
def test_a_tensor_that_was_given_is_not_changed(what, tmp_path, monkeypatch):
    change, path = (CHANGES | LOOP)[what]
    with pytest.raises(AlgorithmError, match=rf"Changing.client_update \(round 1, client \d.* changes {path} in place"):
        run_changing(change, "loop", tmp_path / "run", monkeypatch)


def test_nor_on_the_server(tmp_path, monkeypatch):
    class Changing(FedPer):
        def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
            leaf_of(up).mul_(0.5)
            return super().server_update(task, server, up, round)

    monkeypatch.setitem(ALGORITHMS._objects, "changing", Changing)
    with pytest.raises(
        AlgorithmError, match=r"Changing.server_update \(round 1\) changes up/body/body/fc1/bias in place"
    ):
        quick_run.run(quick_run.settings(algorithm={"name": "changing"}), tmp_path / "run")


@pytest.mark.parametrize("what", CHANGES)
def test_nor_in_lanes(what, tmp_path, monkeypatch):
    with pytest.raises(AlgorithmError, match=r"Changing.client_update \(round.* in place") as caught:
        run_changing(CHANGES[what][0], "lanes", tmp_path / "run", monkeypatch)
    assert "runtime.executor" not in str(caught.value)  # no way out


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_nor_by_a_prediction(executor, tmp_path, monkeypatch):
    class Predicting(FedPer):
        def predict(self, task: Task, client: Tree, down: Messages, x: Tensor) -> Tensor:
            tree.at(client, "head/bias").add_(torch.arange(10.0))
            return super().predict(task, client, down, x)

    monkeypatch.setitem(ALGORITHMS._objects, "predicting", Predicting)
    raw = quick_run.settings(algorithm={"name": "predicting"}, runtime={"executor": executor, "lanes": 3})
    with pytest.raises(AlgorithmError, match=r"Predicting.predict .* changes client/head/bias in place"):
        quick_run.run(raw, tmp_path / "run")


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_nor_what_is_tested_after_training(executor, tmp_path, monkeypatch):
    class Testing(FedPer):
        def after_training(self, task: Task, down: Messages, up: Messages) -> Messages:
            leaf_of(up).mul_(0.9)
            return super().after_training(task, down, up)

    monkeypatch.setitem(ALGORITHMS._objects, "testing", Testing)
    runtime, evaluation = {"executor": executor, "lanes": 3}, {"when": "both"}
    raw = quick_run.settings(algorithm={"name": "testing"}, runtime=runtime, evaluation=evaluation)
    with pytest.raises(AlgorithmError, match=r"Testing.after_training .* changes up/body/body/fc1/bias in place"):
        quick_run.run(raw, tmp_path / "run")


def test_copies_may_be_changed(tmp_path, monkeypatch):
    digests = {run_changing(change_copies, "loop", tmp_path / str(ranks), monkeypatch, ranks) for ranks in (1, 2)}
    assert len(digests) == 1


def test_the_server_publishes_its_state_as_it_is(tmp_path, monkeypatch):
    class Publishing(FedPer):
        def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Any:
            tree.at(server, "shared/body/fc1/bias").add_(torch.ones(()))
            return super().publish(task, server, receivers)

    monkeypatch.setitem(ALGORITHMS._objects, "publishing", Publishing)
    with pytest.raises(AlgorithmError, match=r"Publishing.publish .* changes server/shared/body/fc1/bias in place"):
        quick_run.run(quick_run.settings(algorithm={"name": "publishing"}), tmp_path / "run")


class FloatState(FedPer):
    def init_client(self, task: Task) -> Tree:
        return {**super().init_client(task), "alpha": 0.5}


class PathState(FedPer):
    def init_client(self, task: Task) -> Tree:
        return {"all": dict(tree.leaves(super().init_client(task)))}


class FloatServer(FedPer):
    def init_server(self, task: Task) -> Tree:
        return {**super().init_server(task), "round": 1}


class FloatPublished(FedPer):
    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        return {**super().publish(task, server, receivers), "alpha": 0.5}


class FloatSent(FedPer):
    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        state, up = super().client_update(task, client, down, data)
        return state, {**up, "alpha": 0.5}


class FloatMeasured(FedPer):
    def diagnose(self, task: Task, server: Tree, up: Messages, round: Round) -> Any:
        return {"q": 1.0}


HALF = torch.zeros(3, dtype=torch.float16)


class HalfState(FedPer):
    def init_client(self, task: Task) -> Tree:
        return {**super().init_client(task), "deep": {"half": HALF}}


class HalfServer(FedPer):
    def init_server(self, task: Task) -> Tree:
        return {**super().init_server(task), "half": HALF}


class HalfMessage(FedPer):
    def uplink(self, task: Task) -> Any:
        return {**super().uplink(task), "more": Mean({"half": HALF})}


def adding_up(number):
    class Adding(FedPer):
        def uplink(self, task: Task) -> Any:
            return {**super().uplink(task), "more": Sum({"n": torch.zeros(3, dtype=number)})}

    return Adding


class CountsAveraged(FedPer):
    def uplink(self, task: Task) -> Any:
        return {**super().uplink(task), "n": Mean({"n": torch.zeros(3, dtype=torch.int64)})}


class NoDeclaredTree(FedPer):
    def downlink(self, task: Task) -> Any:
        return {**super().downlink(task), "more": Shared(torch.zeros(3))}  # type: ignore[arg-type]


class UnknownKept(FedPer):
    def personal(self, task: Task) -> Personal:
        return Merge((Received("body"), Kept("haed", at="head")))


class UnknownShare(FedPer):
    def personal(self, task: Task) -> Personal:
        return Mix(Received("body"), Kept(), share="beta")


class OneForTwo(FedPer):
    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> Any:
        return {**client, **super().client_update(task, client, down, data)[1]}


class OtherPass(FedPer):
    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        return client, {"body": data.passes["fine_tuning"]}


class AdaptsWithout(FedPer):
    def adapt(self, task: Task, client: Tree, down: Messages, data: ClientData) -> Tree:
        return {**client, "seen": torch.tensor(sum(1 for _ in data.passes["train"]))}


class KeylessNoise(FedAvg):
    def loss(self, task: Task) -> Any:
        return lambda model, batch: average(uniform(batch.key, (len(batch.y),)), batch)


class VectorLoss(FedPer):
    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        def loss(model, batch):
            return torch.nn.functional.cross_entropy(task.predict(model, batch.x), batch.y, reduction="none")

        model = train(task, {**down["body"], **client}, data.passes["train"], loss, data.learning_rate)
        return {name: model[name] for name in client}, {"body": {"body": model["body"]}}


class MatrixAverage(FedAvg):
    def loss(self, task: Task) -> Any:
        return lambda model, batch: average(task.predict(model, batch.x), batch)


OTHER_TYPE = "of type float16, which is neither sent nor stored; convert it to float32, float64, int32, int64, uint8, b"
ERRORS = {
    FloatState: r"FloatState.init_client returned alpha = 0.5, a float; expected are tensors .* torch.tensor\(0.5\)",
    PathState: r"PathState.init_client returned the key 'head/bias': in a path / separates keys; pflmpi.tree.unflatten",
    FloatServer: r"FloatServer.init_server returned round = 1, a int; expected are tensors .* torch.tensor\(1\)",
    FloatPublished: r"FloatPublished.publish returned alpha = 0.5, a float; expected are tensors",
    FloatSent: r"FloatSent.client_update returned alpha = 0.5, a float; expected are tensors",
    FloatMeasured: r"FloatMeasured.diagnose returned q = 1.0, a float; expected are tensors .* torch.tensor\(1.0\)",
    HalfState: rf"HalfState.init_client returned deep/half {OTHER_TYPE}",
    HalfServer: rf"HalfServer.init_server returned half {OTHER_TYPE}",
    HalfMessage: rf"HalfMessage.uplink: 'more' is declared with half {OTHER_TYPE}",
    CountsAveraged: r"CountsAveraged.uplink: 'n' is a Mean of int64 alone, .* send float32, or a Sum of int64",
    NoDeclaredTree: r"NoDeclaredTree.downlink: 'more' is declared with a Tensor; expected are tensors in nested dicts",
    UnknownKept: r"UnknownKept.personal names 'haed', which `init_client` does not return; known: head/bias, head",
    UnknownShare: r"UnknownShare.personal names 'beta', which `init_client` does not return",
    OneForTwo: r"OneForTwo.client_update returned a dict; expected the new state and the messages, two dicts",
    OtherPass: r"OtherPass.client_update .* there is no pass 'fine_tuning' here; known: train. Return it from",
    AdaptsWithout: r"AdaptsWithout.adapt .* no pass 'train' here; known: none. .* for `adapt` name it in `adapts_with`",
    KeylessNoise: r"ValueError: the batch has no key for `uniform`; set draws_noise: ClassVar\[bool\] = True",
    MatrixAverage: r"ValueError: average: the values have shape \[\d+, 10\]; expected is \[\d+\], one for each sample",
    VectorLoss: r"VectorLoss.client_update .* the loss has shape \[\d+\]; expected a scalar tensor",
}


@pytest.mark.parametrize("number", ["bool", "uint8", "int32"])
def test_sums_that_their_type_may_not_hold_are_refused(number, tmp_path, monkeypatch):
    text = rf"Adding.uplink: 'more' adds up n of type {number}, in which sums would be wrong; .* int64 or float32"
    with pytest.raises(ConfigError, match=text):
        run(adding_up(getattr(torch, number)), tmp_path, monkeypatch)


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("kind", ERRORS)
def test_it_says_what_is_expected(kind, executor, tmp_path, monkeypatch):
    monkeypatch.setitem(ALGORITHMS._objects, "first", kind)
    raw = quick_run.settings(algorithm={"name": "first"}, runtime={"executor": executor, "lanes": 3})
    with pytest.raises(PflmpiError, match=ERRORS[kind]):
        quick_run.run(raw, tmp_path / "run")
