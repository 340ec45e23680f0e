"""APFL: every client mixes a personal model with the global one, in a learned proportion."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import TRAINED_PARTS, only
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.shared_parts import ClientWeighting
from pflmpi.learning.client import Batch, ClientData, model_loss
from pflmpi.learning.diagnostics import Diagnostic, PerClient
from pflmpi.learning.personal import Kept, Merge, Mix, Personal, Received
from pflmpi.learning.sgd import Phase, alternate
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree, leaf, part


@dataclass(frozen=True, kw_only=True)
class APFL(FedAvg):
    """Deng et al., Adaptive Personalized Federated Learning, 2020.

    Client i has a model of its own v_i beside its copy w_i of the global one; its personal model is the mix of their
    parameters m_i = alpha_i v_i + (1 - alpha_i) w_i. It takes one step on alpha_i in a round (eq. 10) and, on every
    minibatch, one on each model (algorithm 1; both from the values before the minibatch):

        alpha_i <- alpha_i - eta <v_i - w_i, grad f_i(m_i)>, clamped to [0, 1]
        v_i     <- v_i - eta grad_v f_i(m_i) = v_i - eta alpha_i grad f_i(m_i)
        w_i     <- w_i - eta grad f_i(w_i)

    Up: w_i (mean). Down: the global model w (shared). Persists: server: w; client: v_i with its batch-norm statistics,
    alpha_i, and the statistics of w_i with `training.bn: local`. Evaluated: alpha_i v_i + (1 - alpha_i) w with the
    fresh w, since the output of algorithm 1 has the mean of the participants there.

    With `adaptive: false`, alpha 0 is FedAvg of the same `weighting`, and with alpha 1 the personal model is Local.

    Readings. The mean over the participants is plain, as in algorithm 1. The step on alpha_i is a round's first, on
    its first minibatch, the one of the authors' code; theirs adds 0.02 alpha_i to the gradient, and mixes outputs
    instead of parameters: both are not in the paper. `alpha_lr` is a rate of its own for alpha_i, decayed as eta is.
    Batch-norm statistics are mixed as the parameters are; those of v_i follow the passes of m_i. v_i starts as the
    initial model, and a client that never took part is tested with that.

    Newcomers: v_i begins as the global model, is trained with alpha_i as a participant's, and mixed with the global
    model; this is ours, the paper has no clients that join later.
    """

    summary: ClassVar[str] = "own and global model mixed in a learned proportion"
    paper: ClassVar[str] = "Deng et al., 2020"
    search: ClassVar = {"alpha": (0.0, 1.0)}
    needs: ClassVar = {"alpha_lr": ("adaptive", True)}
    measured: ClassVar[tuple[str, ...]] = ("own",)

    alpha: Annotated[
        float, Field(ge=0, le=1, description="share of the own model in the mixture, at the start (alpha)")
    ] = 0.5
    adaptive: Annotated[bool, Field(description="learn alpha in each update; otherwise it stays")] = True
    alpha_lr: Annotated[float | None, Field(gt=0, description="learning rate of alpha; null: that of the model")] = None
    weighting: ClientWeighting = "clients"

    def init_client(self, task: Task) -> Tree:
        return {**super().init_client(task), "own": task.init(), "alpha": torch.tensor(self.alpha)}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        plain = model_loss(task)

        def personal(params: Tree, batch: Batch) -> Tensor:
            model = mixed(leaf(params, "alpha"), part(params, "own"), part(params, "shared"))
            return plain({**model, **part(params, "own_stats"), **only(params, ("noise",))}, batch)

        def shared(params: Tree, batch: Batch) -> Tensor:
            model = {**part(params, "shared"), **part(params, "shared_stats")}
            return plain({**model, **only(params, ("noise",))}, batch)

        params: Tree = {"alpha": leaf(client, "alpha")}
        for name, model in (("own", part(client, "own")), ("shared", {**down["model"], **client})):
            params[name], params[f"{name}_stats"] = only(model, TRAINED_PARTS), only(model, ("stats",))
        if self.adaptive:
            rate = data.learning_rate if self.alpha_lr is None else self.alpha_lr * data.decay
            phase = Phase(personal, ("alpha",), rate, plain=True, limits=(0.0, 1.0))
            # Only alpha: the batch-norm statistics follow this minibatch when the models train on it.
            params["alpha"] = alternate(task, params, islice(data.passes["train"], 1), [phase])["alpha"]
        # v before w: its gradient is at the w before the minibatch.
        lr = data.learning_rate
        phases = [Phase(personal, ("own",), lr, name="own"), Phase(shared, ("shared",), lr, name="shared")]
        params = alternate(task, params, data.passes["train"], phases)
        own, copy = ({**part(params, name), **part(params, f"{name}_stats")} for name in ("own", "shared"))
        state: Tree = {**self.to_keep(task, copy), "own": own, "alpha": params["alpha"]}
        return state, {"model": self.to_share(task, copy)}

    def begin_as_newcomer(self, task: Task, client: Tree, down: Messages) -> Tree:
        return {**client, "own": {**part(client, "own"), **down["model"]}}

    def trainings(self, task: Task) -> Mapping[str, Tree]:
        model = only(task.like(), TRAINED_PARTS)
        return {"own": {"own": model}, "shared": {"shared": model}}

    def personal(self, task: Task) -> Personal:
        return Mix(Kept("own"), Merge((Received("model"), Kept())), share="alpha")

    def diagnostics(self, task: Task) -> Mapping[str, Diagnostic]:
        return {
            "alpha": PerClient(
                title="Alpha of each client",
                caption="The share of its own model in a client's personal model: 0 only the global model, 1 only its "
                "own.",
                kept="alpha",
                limits=(0.0, 1.0),
            )
        }


def mixed(alpha: Tensor, own: Tree, shared: Tree) -> Tree:
    """alpha own + (1 - alpha) shared, leaf by leaf."""
    return tree.mix(lambda entry, shared_entry: alpha * entry + (1 - alpha) * shared_entry, own, shared)
