"""Which samples a client trains on in which order: drawn from a stream of its own for each purpose."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pflmpi.learning.training import CONFIGURED, Pass, TrainingConfig, round_half_up


def batch_order(
    rng: np.random.Generator, samples: int, training: TrainingConfig, length: Pass = CONFIGURED, times: int = 1
) -> list[np.ndarray]:
    """The positions (into the samples of the pass) of every batch of one pass.

    Args:
        rng: the stream of this client, round and pass.
        samples: number of samples that the pass is over.
        training: gives batch size, `drop_last` and the configured length.
        length: says how long the pass is.
        times: the value of `length.times`.
    """
    wanted = training.num_steps(samples, length) * times
    batches: list[np.ndarray] = []
    for epoch in _epochs(rng, samples, training):
        if len(batches) >= wanted or not epoch:
            break
        batches.extend(epoch)
    return batches[:wanted]


def num_samples(samples: int, length: Pass) -> int:
    """How many of a client's training samples a pass is over."""
    if not length.held_out or samples < 2:
        return samples
    apart = min(max(1, round_half_up(length.held_out * samples)), samples - 1)
    return apart if length.side == "held_out" else samples - apart


def samples_of(samples: np.ndarray, length: Pass, rng: np.random.Generator) -> np.ndarray:
    """The samples that a pass is over, in stored order.

    Args:
        samples: [n] the client's training samples.
        length: says which share is held out, and which side the pass is over. Of two or more samples at least one
            is on each side; a single one is on both.
        rng: the client's stream for this, the same in all rounds.
    """
    if not length.held_out or len(samples) < 2:
        return samples
    apart = np.zeros(len(samples), bool)
    apart[rng.permutation(len(samples))[: num_samples(len(samples), replace(length, side="held_out"))]] = True
    return samples[apart if length.side == "held_out" else ~apart]


def share_of(samples: np.ndarray, length: Pass, rng: np.random.Generator) -> np.ndarray:
    """A random share of samples, at least one, in stored order; `rng` is the client's stream for this in a round."""
    count = max(1, round_half_up(length.share * len(samples)))
    return samples[np.sort(rng.permutation(len(samples))[:count])]


def _epochs(rng: np.random.Generator, samples: int, training: TrainingConfig) -> Iterator[list[np.ndarray]]:
    while True:
        order = rng.permutation(samples)
        batches = [order[i : i + training.batch_size] for i in range(0, samples, training.batch_size)]
        if training.drop_last and batches and len(batches[-1]) < training.batch_size:
            batches.pop()
        yield batches
