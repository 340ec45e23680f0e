"""An algorithm of one's own, on the server's side: FedAvg with a mean that a few wild clients cannot move."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from pflmpi import tree
from pflmpi.algorithms.base import Round
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.errors import ConfigError
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages, Rows, Uplink
from pflmpi.tree import Tree


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(FedAvg):
    """Yin et al., Byzantine-Robust Distributed Learning, ICML 2018: entry by entry, the mean without the extremes.

    Up: the model, each client's for itself (`Rows`), since the server sorts them. The rest is FedAvg.
    """

    summary: ClassVar[str] = "FedAvg with a trimmed mean"
    paper: ClassVar[str] = "Yin et al., ICML 2018"

    trimmed: Annotated[int, Field(ge=0, description="largest and smallest values of an entry that are left out")] = 1

    def check(self, task: Task, participants: int) -> None:
        if participants <= 2 * self.trimmed:
            raise ConfigError(
                f"algorithm.trimmed = {self.trimmed} leaves nothing of {participants} participants; lower it, or raise "
                "training.participation"
            )

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        return {"model": Rows(self.to_share(task, self.like_model(task)))}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        kept = slice(self.trimmed, len(round.participants) - self.trimmed)
        return {"model": tree.map(lambda rows: torch.sort(rows, 0).values[kept].mean(0), up["model"])}
