"""What clients of a run predict with, as plain modules, and how often these are right."""

import re

import pytest
import torch

from pflmpi.analysis.model import read_client_state_dict
from pflmpi.analysis.run import open_run
from pflmpi.config import load as configuration
from pflmpi.errors import ConfigError
from pflmpi.experiment.build import prepare
from pflmpi.learning.personal import NotAModel
from pflmpi.models.module import ModelModule


def experiment(run):
    values = {key: value for key, value in open_run(run).config.items() if key != "recorded"}
    return prepare(configuration.parse(values), torch.device("cpu"))


def correct(module, made, client):
    """How many of a client's test samples a plain module gets right."""
    dataset, samples = made.federation.dataset, made.federation.test[client]
    images = made.tasks[0].prepare(torch.tensor(dataset.images[samples]))
    with torch.no_grad():
        return int((module.eval()(images).argmax(1) == torch.tensor(dataset.labels[samples])).sum())


def right_of_samples(run, client):
    """How many of a client's test samples its module gets right, both as an opened run gives them."""
    x, y = run.samples(client).test
    with torch.no_grad():
        return int((run.model(client)(torch.tensor(x)).argmax(1) == torch.tensor(y)).sum())


def module(made, state, client=0):
    """A client's module with a state, of which nothing may be missing or left."""
    model = ModelModule(made.tasks[made.cohort[client]].architecture)
    model.load_state_dict(tensors(state), strict=True)
    return model


def tensors(state):
    return {name: torch.tensor(array) for name, array in state.items()}


def check_models(run):
    """The models of an opened run and the exported ones are right as often as in the run."""
    opened, made = open_run(run), experiment(run)
    round = opened.round()
    expected = round.metrics["correct"].tolist()
    assert len(expected) == 7 and [right_of_samples(opened, client) for client in range(7)] == expected
    if isinstance(round.personal, NotAModel):
        with pytest.raises(ConfigError, match=re.escape(round.personal.why)):
            read_client_state_dict(round, 0)
        return
    modules = [module(made, read_client_state_dict(round, client)) for client in range(7)]
    assert [correct(model, made, client) for client, model in enumerate(modules)] == expected
    assert len(set(expected)) > 1, "the clients can be told apart"
