"""GPFL: one body for two routes, a global one led by class embeddings and a personal one to the client's head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from pflmpi import tree
from pflmpi.algorithms.base import only
from pflmpi.algorithms.conditional import init_valve, valve
from pflmpi.algorithms.shared_parts import WeightedSharedParts
from pflmpi.learning.client import Batch, ClientData, average, cross_entropy
from pflmpi.learning.diagnostics import ClassVectors, Diagnostic
from pflmpi.learning.personal import Kept, Merge, NotAModel, Personal, Received
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages, tensor
from pflmpi.rng import stream
from pflmpi.tree import Tree, leaf, part


@dataclass(frozen=True, kw_only=True)
class GPFL(WeightedSharedParts):
    """Zhang et al., GPFL: Simultaneously Learning Global and Personalized Feature Information, ICCV 2023.

    Shared: body f, conditional valve V (eqs. 3, 4; see `conditional.valve`) and class embeddings C [K, d]. From the
    embeddings E as received, which stay as they are during a round, come the conditions (eqs. 5 to 7)

        g = sum_j E_j / K,    p_i = sum_j (n_ij / n_i) E_j,

    and the client steps body, V, C and its head h_i at once along the gradient of (eqs. 8 to 11), with z = f(x),

        CE(h_i(V(z, p_i)), y) + CE(cos(V(z, g), C), y) + lambda ||V(z, g) - E_y||_2 + mu / 2 (||V||^2 + ||C||^2),

    where cos gives K similarities and the third term is the mean over samples. Server: means weighted by samples.

    Up: body, V and C (mean). Down: the same (shared). Persists: server: body, V, C; client: h_i, its label shares
    n_ij / n_i, and its batch-norm statistics with `training.bn: local`. Evaluated: h_i(V(z, p_i)) with the fresh body,
    V and p_i; a client that has not trained yet has no label shares and p_i = 0.

    Readings. Eq. 7 divides by K once more although its weights sum to one; here, as in the authors' code, it does not.
    Eq. 11 prints the norms of V and C themselves; their code is weight decay mu on V and C alone, which is the term
    above. It takes E one round late (zeros in the first round), counts labels in full minibatches only, and has the
    norm of the whole batch for the third term, which is about sqrt(B) times as much; here all three are as printed.
    C starts from N(0, 1). lambda = 0.01 and mu = 0.1 are theirs for small CNNs and MLPs; for ResNet-18 they have 1e-4
    and 0.

    Newcomers: a new h_i, trained as a participant's, which gives them their label shares and p_i; ours, the paper has
    no clients that join later.
    """

    summary: ClassVar[str] = "a shared body with a global and a personal route"
    paper: ClassVar[str] = "Zhang et al., ICCV 2023"
    search: ClassVar = {"magnitude_weight": (0.001, 1.0, "log"), "guidance_decay": (0.0001, 1.0, "log")}
    predicts_with: ClassVar[tuple[str, ...]] = ("shared",)
    shared: ClassVar[tuple[str, ...]] = ("body", "valve", "embeddings")
    message: ClassVar[str] = "shared"
    state: ClassVar[str] = "shared"

    magnitude_weight: Annotated[
        float, Field(ge=0, description="weight of the features' distance to the class embeddings (lambda)")
    ] = 0.01
    guidance_decay: Annotated[float, Field(ge=0, description="weight decay of what is shared (mu)")] = 0.1

    def init_model(self, task: Task) -> Tree:
        embeddings = stream(task.seed, 0, -1, "embeddings").standard_normal(
            (task.num_classes, task.num_features), np.float32
        )
        return {
            **task.init(),
            "valve": init_valve(stream(task.seed, 0, -1, "valve"), task.num_features),
            "embeddings": {"weight": torch.from_numpy(embeddings)},
        }

    def like_model(self, task: Task) -> Tree:
        return {
            **task.like(),
            "valve": tree.like(init_valve(stream(0, 0, -1, "template"), task.num_features)),
            "embeddings": {"weight": tensor(task.num_classes, task.num_features)},
        }

    def init_client(self, task: Task) -> Tree:
        return {**super().init_client(task), "label_shares": torch.zeros(task.num_classes)}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        received = embeddings(down["shared"])
        shares = data.class_counts / data.num_samples

        def loss(model: Tree, batch: Batch) -> Tensor:
            received, shared, own = (leaf(model, name) for name in ("received", "shared", "own"))
            z = task.features(model, batch.x, training=True)
            guided = valve(part(model, "valve"), z, shared)
            similarity = F.normalize(guided, dim=-1) @ F.normalize(embeddings(model), dim=-1).mT
            distance = torch.linalg.vector_norm(guided - received[batch.y], dim=-1)
            decay = sum(entry.square().sum() for _, entry in tree.leaves(only(model, ("valve", "embeddings"))))
            return (
                cross_entropy(self._personal(task, model, z, own), batch)
                + cross_entropy(similarity, batch)
                + self.magnitude_weight * average(distance, batch)
                + self.guidance_decay / 2 * decay
            )

        start = {**down["shared"], **only(client, ("head", *task.local_stats))}
        fixed: Tree = {"received": received, "shared": received.mean(0), "own": shares @ received}  # E, g, p_i
        model = train(task, start, data.passes["train"], loss, data.learning_rate, fixed=fixed)
        return {**self.to_keep(task, model), "label_shares": shares}, {"shared": self.to_share(task, model)}

    def personal(self, task: Task) -> Personal:
        return NotAModel("a valve on class embeddings between body and head", Merge((Received("shared"), Kept())))

    def diagnostics(self, task: Task) -> Mapping[str, Diagnostic]:
        return {
            "class_embeddings": ClassVectors(
                title="Class embeddings",
                caption="The class embeddings that all clients share.",
                server="shared/embeddings/weight",
            )
        }

    def predict(self, task: Task, client: Tree, down: Messages, x: Tensor) -> Tensor:
        model: Tree = {**down["shared"], **client}
        return self._personal(task, model, task.features(model, x), leaf(client, "label_shares") @ embeddings(model))

    def _personal(self, task: Task, model: Tree, z: Tensor, condition: Tensor) -> Tensor:
        """The logits [B, K] of the personal route for features z: [B, d]."""
        return task.logits(part(model, "head"), valve(part(model, "valve"), z, condition))


def embeddings(model: Tree) -> Tensor:
    """The class embeddings [K, d] of a model."""
    return leaf(part(model, "embeddings"), "weight")
