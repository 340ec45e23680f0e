"""The (epsilon, delta) differential privacy of clients whose clipped changes have Gaussian noise (`uplink`).

Neighbouring data sets differ in the samples of one client, but not in their number. Its clipped change then differs by
at most 2 C: a message is a Gaussian mechanism with noise z C, and the plain mean of P messages is one with noise
sqrt(P) z C relative to it. Rounds compose by Renyi differential privacy (Mironov, CSF 2017), amplified by secret
sampling of P of N clients (Wang et al., AISTATS 2019). `top_k` and `quantise` follow the noise: they cost a message
nothing, but the mean is then no function of the sum of noisy changes, and has no epsilon of its own.
"""

import math
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from pflmpi.experiment.build import Experiment
from pflmpi.learning.participation import Participation, is_trace
from pflmpi.messages.kinds import Mean

_LEAST_NOISE = 1e-6  # relative to the sensitivity: with less, epsilon > 10^11, and the accountant divides by zero


def statement(experiment: Experiment, why_none: str = "") -> str:
    """States epsilon for the messages of all rounds, or why there is none; "" without noise.

    Args:
        why_none: why none may be stated, from `why_unstated`; "" to find out for this experiment.
    """
    config, training, federation = experiment.config, experiment.config.training, experiment.federation
    rounds, clients = training.rounds, federation.num_clients
    if config.uplink.noise is None:
        return ""
    delta = config.uplink.delta or 1 / clients
    subject = f"differential privacy of a client in the messages of {rounds} rounds (delta = {delta:.3g})"
    why_none = why_none or why_unstated(experiment, is_fork=False)
    if not rounds:
        why_none = "there are none"
    if why_none:
        return f"{subject}: no epsilon is stated, because {why_none}"
    if find_spec("dp_accounting") is None:
        return f"{subject}: epsilon is computed by dp-accounting, which is not installed: pip install 'pflmpi[privacy]'"
    participation = Participation(training, config.seed, federation.num_train)
    fewest = min(len(participation.participants(round)) for round in range(1, rounds + 1))
    most_rounds = int(participation.counts(rounds).max())  # in which one client takes part
    epsilon = _epsilon(config.uplink.noise / 2, most_rounds, delta)
    text = f"{subject}: epsilon = {epsilon} against whoever sees each message"
    if why_none := _why_none_of_means(experiment):
        return f"{text}; none is stated against whoever sees the means alone, because {why_none}"
    noise = config.uplink.noise * math.sqrt(fewest) / 2
    epsilon = _epsilon(noise, most_rounds, delta)
    num_participants_is_fixed = not (training.dropout or training.without_clients or training.deadline)
    if training.selection == "uniform" and num_participants_is_fixed and fewest < clients:
        amplified = _epsilon(noise, rounds, delta, clients, fewest)
        if amplified < epsilon:
            return f"{text}, {amplified} against whoever sees the means alone and does not know who was drawn"
    return f"{text}, {epsilon} against whoever sees the means alone"


def why_unstated(experiment: Experiment, is_fork: bool) -> str:
    """Returns what depends on a client's samples besides its clipped and noisy messages; "" if nothing does."""
    config = experiment.config
    selection = config.training.selection
    reasons = {
        "the run is a fork, whose earlier rounds may have sent other messages": is_fork,
        "model.weights are those of a run": experiment.tasks[0].first is not None,
        "data.normalize computes with the samples of all clients": config.data.normalize != "fixed",
        "training.stop ends the run by tests of clients": config.training.stop is not None,
        "runtime.client_errors: skip shows whose update failed": config.runtime.client_errors == "skip",
        f"training.selection = {selection} may draw clients by what they have": not (
            selection in ("uniform", "round_robin") or is_trace(selection)
        ),
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _why_none_of_means(experiment: Experiment) -> str:
    """Returns why the noise of the participants does not add up in the means; "" if it does."""
    config, num_train = experiment.config, experiment.federation.num_train
    if after := [f"uplink.{key}" for key in ("top_k", "quantise") if getattr(config.uplink, key) is not None]:
        return f"{' and '.join(after)} {'follow' if len(after) > 1 else 'follows'} the noise of each client"
    means = [kind for kind in config.algorithm.uplink(experiment.tasks[0]).values() if isinstance(kind, Mean)]
    if len(np.unique(num_train)) > 1 and any(kind.by == "samples" for kind in means):
        return "the means weigh clients by their samples (algorithm.weighting)"
    return ""


def _epsilon(noise: float, rounds: int, delta: float, clients: int = 1, drawn: int = 1) -> float:
    """Computes epsilon, rounded up, after so many rounds.

    Args:
        noise: standard deviation relative to the sensitivity.
        drawn: participants of a round, of so many clients.
    """
    if noise < _LEAST_NOISE:
        return math.inf
    dp: Any = import_module("dp_accounting")
    rdp: Any = import_module("dp_accounting.rdp")
    accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    event = dp.GaussianDpEvent(noise)
    if drawn < clients:
        event = dp.SampledWithoutReplacementDpEvent(clients, drawn, event)
    accountant.compose(event, rounds)
    epsilon: float = accountant.get_epsilon(delta)
    return math.ceil(100 * epsilon) / 100
