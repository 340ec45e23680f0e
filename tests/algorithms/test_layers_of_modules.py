"""Layers are the modules that own parameters, whatever these are called: none of a module's is left out."""

import pytest
import torch
from torch import Tensor, nn

from pflmpi import tree
from pflmpi.algorithms.fedper import FedPer
from pflmpi.algorithms.pfedcfr import PFedCFR
from pflmpi.errors import ConfigError
from pflmpi.learning.parts import group_by_layer
from pflmpi.learning.task import Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.models.torch_module import module_model


class Body(nn.Module):
    """A body of several kinds with a head, for samples [B, 1, 4, 6]."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        if family in ("LSTM", "GRU"):
            self.middle: nn.Module = getattr(nn, family)(5, 5, batch_first=True)
        elif family == "weight_norm":
            self.middle = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))
        else:
            self.middle = nn.ParameterList([torch.randn(5, 5), torch.randn(5)])
        self.token = nn.Parameter(torch.randn(5)) if family == "token" else None
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x[:, 0])
        if isinstance(self.middle, nn.RNNBase):
            z, _ = self.middle(z)
        elif isinstance(self.middle, nn.ParameterList):
            z = z @ self.middle[0] + self.middle[1]
        else:
            z = self.middle(z)
        z = z.mean(1)
        return self.head(z if self.token is None else z * self.token)


RECURRENT = {f"body/middle/{name}_l0" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
NORMED = {f"body/middle/{name}" for name in ("parametrizations/weight/original0", "parametrizations/weight/original1")}
MIDDLE = {
    "LSTM": RECURRENT,
    "GRU": RECURRENT,
    "weight_norm": {*NORMED, "body/middle/bias"},
    "list": {"body/middle/0", "body/middle/1"},
    "token": {"body/middle/0", "body/middle/1"},
}


def task(kind):
    bound = module_model(Body)(family=kind, head="head").bind((1, 4, 6), 3)
    return Task(bound, TrainingConfig(), 4, 0, (0.5,), (0.5,))


@pytest.mark.parametrize("kind", MIDDLE)
def test_every_parameter_is_of_one_layer(kind):
    own = task(kind)
    layers = group_by_layer(own.architecture.layers, own.like("body", "head"))
    assert {*layers} == {"body/first", "body/middle", "head", *(["body"] if kind == "token" else [])}
    assert {*layers["body/middle"]} == MIDDLE[kind] and layers.get("body", ("body/token",)) == ("body/token",)


@pytest.mark.parametrize("kind", MIDDLE)
def test_a_personal_layer_stays_and_the_others_travel(kind):
    own, algorithm = task(kind), FedPer(personal_layers=2)
    sent = dict(tree.leaves(algorithm.init_server(own)["shared"]))
    kept = dict(tree.leaves(algorithm.init_client(own)))
    assert {*kept} == {*MIDDLE[kind], "head/weight", "head/bias"}
    assert {*sent} | {*kept} == {*dict(tree.leaves(own.like()))} and not {*sent} & {*kept}


@pytest.mark.parametrize("unit", ["module", "tensor"])
@pytest.mark.parametrize("kind", MIDDLE)
def test_pfedcfr_sends_every_parameter(kind, unit):
    own = task(kind)
    sent = [path for kind in PFedCFR(layer_unit=unit).uplink(own).values() for path, _ in tree.leaves(kind.like)]
    assert sorted(sent) == sorted(dict(tree.leaves(own.like())))


class Disordered(nn.Module):
    """Registers layers in another order than it calls them, and has two that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.fourth = nn.Linear(5, 5)
        self.third = nn.MultiheadAttention(5, 1, batch_first=True)
        self.second = nn.ParameterList([torch.randn(5)])
        self.first = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x[:, 0]) * self.second[0]
        return self.head(self.fourth(self.third(z, z, z)[0]).mean(1))


def test_layers_are_in_the_order_in_which_they_are_called():
    bound = module_model(Disordered)(head="head").bind((1, 4, 6), 3)
    own = Task(bound, TrainingConfig(), 4, 0, (0.5,), (0.5,))
    # Those that are never called, out_proj and second, follow the one that is registered before them.
    assert bound.layers == ("body/first", "body/third", "body/third/out_proj", "body/second", "body/fourth", "head")
    kept = dict(tree.leaves(FedPer(personal_layers=2).init_client(own)))
    assert {path.rpartition("/")[0] for path in kept} == {"body/fourth", "head"}


def test_a_parameter_of_no_layer_is_refused():
    with pytest.raises(ConfigError, match=r"body/fc2/weight .* none of its layers \(body/fc1\)"):
        group_by_layer(["body/fc1"], {"body": {"fc2": {"weight": torch.zeros(1)}}})
