"""The `training` section of a configuration, and what follows from it: participants, learning rates, batch order."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, field_validator

from pflmpi.learning.early_stop import EarlyStopConfig


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A shuffled pass of a client over its training samples, in minibatches.

    Attributes:
        epochs: length in epochs; None for the configured length (`training.epochs` or `training.steps`).
        steps: length in minibatches, instead of epochs; the samples are reshuffled as often as needed.
        held_out: share of the samples, drawn once per client, that is held out for the whole run.
        side: whether the pass is over the held-out samples or the rest.
        share: of these samples, drawn anew every round; the same for all passes of the round with this share.
        times: path of an integer in the client's state that multiplies the length; with 0 the pass is empty. So a pass
            may depend on the client and its history.
    """

    epochs: int | None = None
    steps: int | None = None
    held_out: float = 0.0
    side: Literal["rest", "held_out"] = "rest"
    share: float = 1.0
    times: str = ""


CONFIGURED = Pass()


class TrainingConfig(BaseModel):
    """Local training of the clients."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rounds: int = Field(30, ge=0, description="communication rounds")
    stop: EarlyStopConfig | None = Field(None, description="end before the last round once a metric no longer improves")
    participation: float = Field(1.0, gt=0, le=1, description="share of the clients that train in a round")
    selection: str = Field(
        "uniform",
        description="who takes part: uniform, by_samples, round_robin, ./my_file.py:function, or a .csv file with "
        "the columns round and client",
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="probability that a client which was drawn does not take part after all"
    )
    step_seconds: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="simulated seconds of a local step, their median over clients"
    )
    step_spread: float = Field(
        0.0, ge=0, le=10, description="of step_seconds over clients, whose logarithm has this standard deviation"
    )
    deadline: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="simulated seconds of a round: a slower client takes fewer steps, or no part; null: any number",
    )
    without_clients: Annotated[
        tuple[int, ...],
        PlainSerializer(list),  # as in YAML
        Field(description="ids of clients that never train: a round that draws one goes on without it"),
    ] = ()
    epochs: int = Field(1, ge=0, le=1_000_000, description="local epochs per round")
    steps: int | None = Field(None, ge=1, le=1_000_000, description="local steps per round, instead of epochs")
    batch_size: int = Field(10, ge=1, description="samples per step")
    micro_batch: int | None = Field(
        None, ge=1, description="samples at once of a larger batch, whose gradients are accumulated; null: all"
    )
    drop_last: bool = Field(False, description="leave out the last batch of an epoch when it is not full")
    lr: float = Field(0.01, gt=0, allow_inf_nan=False, description="learning rate of the first round")
    schedule: Literal["exponential", "constant", "cosine", "step"] = Field(
        "exponential", description="how learning rates fall over rounds"
    )
    lr_decay: float = Field(
        1.0, gt=0, le=1, description="factor on learning rates after every round, or (step) every `decay_rounds`"
    )
    decay_rounds: int | None = Field(
        None, ge=1, description="step: rounds from one fall to the next; cosine: rounds of the fall, null for all"
    )
    decay_floor: float = Field(0.0, ge=0, le=1, description="cosine: the factor on learning rates at its end")
    decay_by: Literal["rounds", "participations"] = Field(
        "rounds", description="what the schedule counts: rounds, or those in which the client itself took part"
    )
    warmup: int = Field(0, ge=0, description="rounds of linear rise before the schedule begins")
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="what takes the local steps")
    momentum: float = Field(
        0.0, ge=0, lt=1, description="of sgd; the buffer starts at zero every round, unless keep_optimizer"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="of adam and adamw: decay of the mean of gradients")
    beta2: float = Field(0.999, ge=0, lt=1, description="of adam and adamw: decay of the mean of their squares")
    epsilon: float = Field(
        1e-8, gt=0, allow_inf_nan=False, description="of adam and adamw: added to the root of that mean"
    )
    keep_optimizer: bool = Field(
        False, description="clients keep momentum or moments between rounds, instead of starting at zero"
    )
    weight_decay: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="L2 weight decay; apart from the gradient with adamw"
    )
    clip_norm: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="largest norm of a client's gradient; null: any"
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="share of each training label that is spread over all classes"
    )
    precision: Literal["fp32", "bf16", "tf32"] = Field(
        "fp32", description="arithmetic of forward and backward passes; parameters stay float32 (tf32: CUDA only)"
    )
    init: Literal["shared", "per_client"] = Field(
        "shared", description="initial weights of what clients keep: the same for all, or one draw each"
    )
    bn: Literal["average", "local"] = Field(
        "average", description="batch-norm statistics: averaged with the weights, or kept local"
    )

    @field_validator("without_clients", mode="before")
    @classmethod
    def _are_ids(cls, clients: Any) -> Any:
        whole = isinstance(clients, list | tuple) and all(type(client) is int and client >= 0 for client in clients)
        if not whole:
            raise ValueError("must be a list of the ids of clients, such as [7, 9]")
        return tuple(sorted(set(clients)))  # hashable

    def decay(self, round: int) -> float:
        """The schedule's factor on learning rates in a round, or in a client's participation; both count from 1."""
        if round <= self.warmup:
            return max(round, 1) / (self.warmup + 1)
        elapsed = max(round - 1, 0) - self.warmup
        match self.schedule:
            case "step":
                return float(self.lr_decay ** (elapsed // (self.decay_rounds or 1)))
            case "cosine":
                share = min(elapsed / (self.decay_rounds or max(self.rounds - self.warmup, 1)), 1.0)
                return self.decay_floor + (1 - self.decay_floor) * (1 + math.cos(math.pi * share)) / 2
        return float(self.lr_decay**elapsed)

    def learning_rate(self, round: int) -> float:
        return self.lr * self.decay(round)

    def num_drawn(self, num_clients: int) -> int:
        """Number of clients drawn in a round, P = max(1, round(participation N))."""
        return max(1, round_half_up(self.participation * num_clients))

    def num_steps(self, samples: int, length: Pass = CONFIGURED) -> int:
        """Number of minibatches of one pass over that many samples."""
        if length.steps is not None:
            return length.steps
        if length.epochs is None and self.steps is not None:
            return self.steps
        per_epoch = samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)
        return per_epoch * (self.epochs if length.epochs is None else length.epochs)


def round_half_up(value: float) -> int:
    """The nearest integer, halves up (Python rounds halves to even).

    >>> round_half_up(2.5), round_half_up(0.3 * 10)
    (3, 3)
    """
    return int(np.floor(value + 0.5))


def draw_batches(
    rng: np.random.Generator, samples: int, training: TrainingConfig, length: Pass = CONFIGURED, times: int = 1
) -> list[np.ndarray]:
    """Indices, into the samples of the pass, of every minibatch of one pass.

    Args:
        rng: the stream of this client, round and pass.
        samples: their number in the pass.
        times: the value of `length.times`.
    """
    num_steps = training.num_steps(samples, length) * times
    batches: list[np.ndarray] = []
    while len(batches) < num_steps:
        epoch = _draw_epoch(rng, samples, training)
        if not epoch:
            break
        batches.extend(epoch)
    return batches[:num_steps]


def count_samples(samples: int, length: Pass) -> int:
    """Number of a client's training samples that a pass uses."""
    if not length.held_out or samples < 2:
        return samples
    num_held_out = min(max(1, round_half_up(length.held_out * samples)), samples - 1)
    return num_held_out if length.side == "held_out" else samples - num_held_out


def select_samples(samples: np.ndarray, length: Pass, rng: np.random.Generator) -> np.ndarray:
    """The samples that a pass uses, in stored order.

    Args:
        samples: [n] the client's training samples.
        length: has the held-out share, and the side that the pass uses. Two or more samples leave at least one on each
            side; a single one is on both.
        rng: the client's stream for held-out samples, the same in all rounds.
    """
    if not length.held_out or len(samples) < 2:
        return samples
    held_out = np.zeros(len(samples), bool)
    held_out[rng.permutation(len(samples))[: count_samples(len(samples), replace(length, side="held_out"))]] = True
    return samples[held_out if length.side == "held_out" else ~held_out]


def draw_share(samples: np.ndarray, length: Pass, rng: np.random.Generator) -> np.ndarray:
    """A random share of samples, at least one, in stored order; `rng` is the client's stream for this round's share."""
    count = max(1, round_half_up(length.share * len(samples)))
    return samples[np.sort(rng.permutation(len(samples))[:count])]


def _draw_epoch(rng: np.random.Generator, samples: int, training: TrainingConfig) -> list[np.ndarray]:
    """The minibatches of one epoch."""
    order = rng.permutation(samples)
    batches = [order[start : start + training.batch_size] for start in range(0, samples, training.batch_size)]
    if training.drop_last and batches and len(batches[-1]) < training.batch_size:
        batches.pop()
    return batches
