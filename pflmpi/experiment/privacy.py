"""The (epsilon, delta) differential privacy of clients whose clipped changes have Gaussian noise (`uplink`).

Neighbours differ in the samples of one client, as many as before. Its clipped change then moves by at most 2 C: a
message is a Gaussian mechanism with noise z C, the plain mean of P messages one with sqrt(P) z C over that. Rounds
compose by Renyi differential privacy (Mironov, CSF 2017), which draws of P of N clients that nobody knows amplify (Wang
et al., AISTATS 2019). Error feedback and rounding come after the noise and cost nothing.
"""

import math
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from pflmpi.experiment.build import Experiment
from pflmpi.learning.participation import Participation, is_trace
from pflmpi.messages.kinds import Mean

_LEAST_NOISE = 1e-6  # over sensitivity: with less, epsilon is above 10^11, and the accountant divides by zero


def statement(experiment: Experiment, why_none: str = "") -> str:
    """What holds of the messages of all rounds, in words, or why no epsilon is stated; "" without noise.

    Args:
        why_none: why none may be, from `why_unstated`; "" asks for this experiment alone.
    """
    config, federation = experiment.config, experiment.federation
    rounds, clients = config.training.rounds, federation.num_clients
    if config.uplink.noise is None:
        return ""
    delta = config.uplink.delta or 1 / clients
    of = f"differential privacy of a client in the messages of {rounds} rounds (delta = {delta:.3g})"
    if why := "there are none" if not rounds else why_none or why_unstated(experiment, is_fork=False):
        return f"{of}: no epsilon is stated, because {why}"
    if find_spec("dp_accounting") is None:
        return f"{of}: epsilon is computed by dp-accounting, which is not installed: pip install 'pflmpi[privacy]'"
    participation = Participation(config.training, config.seed, federation.num_train)
    drawn = [participation.participants(round) for round in range(1, rounds + 1)]
    most, fewest = int(participation.counts(rounds).max()), min(map(len, drawn), default=clients)
    text = f"{of}: epsilon = {_epsilon(config.uplink.noise / 2, most, delta)} against whoever sees each message"
    means = [kind for kind in config.algorithm.uplink(experiment.tasks[0]).values() if isinstance(kind, Mean)]
    if len(np.unique(federation.num_train)) > 1 and any(kind.by == "samples" for kind in means):
        why = "the means weigh clients by their samples (algorithm.weighting)"
        return f"{text}; none is stated against whoever sees the means alone, because {why}"
    noise, whoever = config.uplink.noise * math.sqrt(fewest) / 2, "whoever sees the means alone"
    epsilon, training = _epsilon(noise, most, delta), config.training
    fixed = not (training.dropout or training.without_clients or training.deadline)
    if training.selection == "uniform" and fixed and fewest < clients:
        amplified = _epsilon(noise, rounds, delta, clients, fewest)
        if amplified < epsilon:
            epsilon, whoever = amplified, f"{whoever} and does not know who was drawn"
    return f"{text}, {epsilon} against {whoever}"


def why_unstated(experiment: Experiment, is_fork: bool) -> str:
    """What else than clipped and noisy messages depends on a client's samples; "" if nothing does."""
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


def _epsilon(noise: float, rounds: int, delta: float, clients: int = 1, drawn: int = 1) -> float:
    """Epsilon, rounded up, after so many rounds with noise over sensitivity, each of some clients drawn of all."""
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
