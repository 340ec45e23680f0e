"""FedAvg: one global model, averaged from the participants' local training."""

from dataclasses import dataclass
from typing import ClassVar

from pflmpi.algorithms.shared_parts import WeightedSharedParts


@dataclass(frozen=True, kw_only=True)
class FedAvg(WeightedSharedParts):
    """McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

    Algorithm 1: w_{t+1} = sum_k (n_k / n) w^k_{t+1} over the participants of the round.

    Up: the model (mean). Down: the model (shared). Persists: server: the model; client: nothing, or its
    batch-norm statistics with `training.bn: local`. Evaluated: the global model on every client's test split.
    Newcomers: the global model; the paper has no other model.
    Batch norm: the statistics are averaged with the weights (`bn: average`); the paper has no batch norm.
    """

    summary: ClassVar[str] = "one global model, the sample-weighted mean"
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    any_task: ClassVar[bool] = True
    frozen_head: ClassVar[bool] = True
    predicts_with: ClassVar[tuple[str, ...]] = ("model",)
