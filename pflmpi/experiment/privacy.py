"""The (epsilon, delta) differential privacy of clients whose clipped changes have Gaussian noise (`uplink`).

Neighbours are two federations in which one client has other samples, as many as before. Its clipped change then
moves by at most 2 C, so that each message is a Gaussian mechanism with noise z C, and the plain mean of P messages one
with noise sqrt(P) z C over that. Rounds compose by Renyi differential privacy (Mironov, CSF 2017); where the rounds
draw P of N clients uniformly, and who was drawn is not known, by its amplification for draws without replacement (Wang
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


def statement(experiment: Experiment, is_fork: bool = False) -> str:
    """What holds of the messages of all rounds, in words, or why no epsilon is stated; "" without noise."""
    config, federation = experiment.config, experiment.federation
    if config.uplink.noise is None:
        return ""
    rounds, clients = config.training.rounds, federation.num_clients
    delta = config.uplink.delta or 1 / clients
    of = f"differential privacy of a client in the messages of {rounds} rounds (delta = {delta:.3g})"
    if why := _unstated(experiment, is_fork):
        return f"{of}: no epsilon is stated, because {why}"
    if find_spec("dp_accounting") is None:
        return f"{of}: epsilon is computed by dp-accounting, which is not installed: pip install 'pflmpi[privacy]'"
    participation = Participation(config.training, config.seed, federation.num_train)
    drawn = [participation.participants(round) for round in range(1, rounds + 1)]
    most, fewest = int(participation.counts(rounds).max()), min(map(len, drawn), default=clients)
    text = f"{of}: epsilon = {_epsilon(config.uplink.noise / 2, most, delta)} against whoever sees each message"
    if not _plain_mean(experiment):
        why = "the means weigh clients by their samples (algorithm.weighting)"
        return f"{text}; none is stated against whoever sees the means alone, because {why}"
    noise, whoever = config.uplink.noise * math.sqrt(fewest) / 2, "whoever sees the means alone"
    epsilon, sizes = _epsilon(noise, most, delta), {len(one) for one in drawn}
    if config.training.selection == "uniform" and sizes == {config.training.num_drawn(clients)} and fewest < clients:
        amplified = _epsilon(noise, rounds, delta, clients, fewest)
        if amplified < epsilon:
            epsilon, whoever = amplified, f"{whoever} and does not know who was drawn"
    return f"{text}, {epsilon} against {whoever}"


def _unstated(experiment: Experiment, is_fork: bool) -> str:
    """What else than clipped and noisy messages depends on a client's samples; "" if nothing does."""
    config = experiment.config
    selection = config.training.selection
    reasons = {
        "the run is a fork, whose earlier rounds may have sent other messages": is_fork,
        "model.weights are those of a run": experiment.tasks[0].first is not None,
        "data.normalize: standard computes with the samples of all": config.data.normalize == "standard",
        "training.stop ends the run by tests of clients": config.training.stop is not None,
        "runtime.client_errors: skip shows whose update failed": config.runtime.client_errors == "skip",
        f"training.selection = {selection} may draw clients by what they have": not (
            selection in ("uniform", "round_robin") or is_trace(selection)
        ),
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _plain_mean(experiment: Experiment) -> bool:
    """Whether all clients count alike in every mean."""
    up = experiment.config.algorithm.uplink(experiment.tasks[0]).values()
    alike = len(np.unique(experiment.federation.num_train)) == 1
    return alike or all(kind.by == "clients" for kind in up if isinstance(kind, Mean))


def _epsilon(noise: float, rounds: int, delta: float, clients: int = 1, drawn: int = 1) -> float:
    """Epsilon, rounded up, after so many rounds with noise over sensitivity, each of some clients drawn of all."""
    dp: Any = import_module("dp_accounting")
    rdp: Any = import_module("dp_accounting.rdp")
    accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    event = dp.GaussianDpEvent(noise)
    if drawn < clients:
        event = dp.SampledWithoutReplacementDpEvent(clients, drawn, event)
    accountant.compose(event, rounds)
    epsilon: float = accountant.get_epsilon(delta)
    return math.ceil(100 * epsilon) / 100
