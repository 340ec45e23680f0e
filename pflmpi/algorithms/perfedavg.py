"""Per-FedAvg: a global model that adapts to a client in one step of SGD."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import TRAINED_PARTS, only
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.shared_parts import ClientWeighting
from pflmpi.learning.client import Batch, ClientData, model_loss
from pflmpi.learning.sgd import Direction, Phase, alternate, gradient, step, train
from pflmpi.learning.task import Task
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(FedAvg):
    """Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
    Approach, NeurIPS 2020.

    min_w 1/n sum_i f_i(w - alpha grad f_i(w)). Algorithm 1: a participant starts from the received w and takes, with
    three independent minibatches D, D', D'' at a time, the steps

        w' = w - alpha grad f(w; D),   v = grad f(w'; D'),   w <- w - beta (v - alpha H(w; D'') v),

    and the server takes the plain mean. `order` says what stands for the Hessian-vector product H v (section 5):
    `first` leaves it out (FO), `hessian_free` takes (grad f(w + delta v; D'') - grad f(w - delta v; D'')) / (2 delta)
    (HF).

    Up: the model (mean over clients). Down: the model (shared). Persists: server: the model; client: nothing, or its
    batch-norm statistics with `training.bn: local`. Evaluated: the global model after `adapt_steps` SGD steps with
    alpha on training samples of the client, which are not kept; test samples are never trained on.

    With `inner_lr: 0` it is FedAvg with `weighting: clients`, bit for bit.

    Readings. beta is `training.lr`, and decays; alpha does not, being part of the objective. The three minibatches are
    from three shuffles of the training samples, each as long as the configured pass, so a client takes as many steps
    as with FedAvg. The step on w is that of the configured optimizer, as printed without momentum and weight decay; the
    one to w', and those before a test, are plain. Batch norm: the statistics follow the passes through the adapted w',
    which is what is evaluated.

    Newcomers: the global model after `adapt_steps` steps on their own data, as for everybody; this is what the paper
    trains it for.
    """

    summary: ClassVar[str] = "a global model made to be adapted in one step, MAML"
    paper: ClassVar[str] = "Fallah et al., NeurIPS 2020"
    search: ClassVar = {"inner_lr": (0.001, 1.0, "log")}
    needs: ClassVar = {"difference": ("order", "hessian_free")}
    adapts_with: ClassVar[tuple[str, ...]] = ("adapt",)

    order: Annotated[
        Literal["first", "hessian_free"],
        Field(description="first-order steps, or hessian_free by a difference of gradients"),
    ] = "first"
    inner_lr: Annotated[float, Field(ge=0, description="learning rate of the step to a personal model (alpha)")] = 0.01
    adapt_steps: Annotated[int, Field(ge=1, description="steps by which a client adapts before it is tested")] = 1
    difference: Annotated[
        float, Field(gt=0, description="distance of the two gradients with order hessian_free (delta)")
    ] = 0.001
    weighting: ClientWeighting = "clients"

    def passes(self, task: Task, round: int) -> Mapping[str, Pass]:
        hessian = {"hessian": Pass()} if self.order == "hessian_free" else {}
        return {"inner": Pass(), "train": Pass(), **hessian, "adapt": Pass(steps=self.adapt_steps)}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        loss = model_loss(task)

        def direction(model: Tree, batches: tuple[Batch, ...]) -> tuple[Tree, Tensor]:
            inner, outer, *hessian = batches
            adapted = step(model, self._gradient(task, model, inner), self.inner_lr)
            grad, value = gradient(task, adapted, loss, outer, TRAINED_PARTS)
            for batch in hessian:
                product = self._hessian_vector_product(task, model, grad, batch)
                grad = tree.map(lambda v, hv: v - self.inner_lr * hv, grad, product)
            return grad, value

        names = [name for name in ("inner", "train", "hessian") if name in data.passes]
        batches = zip(*(data.passes[name] for name in names), strict=True)
        model = train(task, {**down["model"], **client}, batches, Direction(direction), data.learning_rate)
        return self.to_keep(task, model), {"model": self.to_share(task, model)}

    def _hessian_vector_product(self, task: Task, model: Tree, vector: Tree, batch: Batch) -> Tree:
        """H(model; batch) vector, by a central difference of gradients."""
        ahead = self._gradient(task, step(model, vector, -self.difference), batch)
        behind = self._gradient(task, step(model, vector, self.difference), batch)
        return tree.map(lambda a, b: (a - b) / (2 * self.difference), ahead, behind)

    def _gradient(self, task: Task, model: Tree, batch: Batch) -> Tree:
        """The gradient of the loss; batch-norm statistics stay as they are."""
        copy = {**model, **tree.clone(only(model, ("stats",)))}
        return gradient(task, copy, model_loss(task), batch, TRAINED_PARTS)[0]

    def adapt(self, task: Task, client: Tree, down: Messages, data: ClientData) -> Tree:
        phase = Phase(model_loss(task), TRAINED_PARTS, self.inner_lr, plain=True)
        return alternate(task, {**down["model"], **client}, data.passes["adapt"], [phase])
