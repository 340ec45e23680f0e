"""Messages and states whose leaves are single numbers, such as a loss or a count, of every kind that holds trees."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

import quick_run
from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, Round
from pflmpi.algorithms.distances import cosines, inner_products, weighted_sums
from pflmpi.learning.client import ClientData
from pflmpi.learning.personal import Personal, Received
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Downlink, Mean, Messages, Own, Rows, Shared, Sum, Uplink, tensor
from pflmpi.store import partition_file, run_folder
from pflmpi.tree import Tree, leaf


@dataclass(frozen=True, kw_only=True)
class Counts(Algorithm):
    """Nobody trains; the server hears how many samples there are, in four ways."""

    summary: ClassVar[str] = "counts"
    paper: ClassVar[str] = "-"
    predicts_with: ClassVar[tuple[str, ...]] = ("model",)

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        like: Tree = {"number": tensor()}
        return {"sum": Sum(like), "mean": Mean(like), "plain": Mean(like, by="clients"), "each": Rows(like)}

    def downlink(self, task: Task) -> Mapping[str, Downlink]:
        return {"model": Shared(task.like()), "own": Own({"number": tensor()}), "all": Shared({"number": tensor()})}

    def init_server(self, task: Task) -> Tree:
        return {name: torch.zeros(()) for name in ("sum", "mean", "plain", "largest")}

    def init_client(self, task: Task) -> Tree:
        return {"heard": torch.zeros(())}

    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        own: Tree = {"number": torch.from_numpy(receivers).float()}
        return {"model": task.init(), "own": own, "all": {"number": leaf(server, "sum")}}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        heard = leaf(down["own"], "number") + leaf(down["all"], "number")
        return {"heard": heard}, {name: {"number": data.num_samples} for name in self.uplink(task)}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        found = {name: leaf(up[name], "number") for name in up}
        return {**{name: found[name] for name in ("sum", "mean", "plain")}, "largest": found["each"].max()}

    def personal(self, task: Task) -> Personal:
        return Received("model")


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_single_numbers_travel_in_every_kind_of_tree(executor, ranks, tmp_path):
    raw = quick_run.settings(algorithm={"name": f"{__file__}:Counts"}, runtime={"executor": executor})
    quick_run.run(raw, tmp_path / "run", ranks)
    chosen = run_folder.read_metrics(tmp_path / "run", 3)["participants"]
    samples = partition_file.read(tmp_path / "run").train.sum(1)[chosen].astype(np.float64)
    server = run_folder.read_server(tmp_path / "run", 3)
    expected = {
        "sum": samples.sum(),
        "mean": (samples**2).sum() / samples.sum(),
        "plain": samples.mean(),
        "largest": samples.max(),
    }
    assert {name: float(value) for name, value in server.items()} == pytest.approx(expected, rel=1e-7)


def test_models_with_single_numbers_are_compared_and_mixed():
    models: Tree = {"weight": torch.tensor([[3.0, 0.0], [0.0, 3.0]]), "number": torch.tensor([4.0, 4.0])}
    assert cosines(tree.map(inner_products, models)).tolist() == [[1.0, 0.64], [0.64, 1.0]]
    half = torch.full((2, 2), 0.5, dtype=torch.float64)
    assert weighted_sums(half, leaf(models, "number")).tolist() == [4.0, 4.0]
