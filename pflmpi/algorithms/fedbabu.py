"""FedBABU: a shared body with a fixed head, fine-tuned by each client before evaluation."""

from dataclasses import dataclass
from typing import ClassVar

from pflmpi.algorithms.fine_tuning import FineTuned
from pflmpi.learning.task import SERVER, Task
from pflmpi.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedBABU(FineTuned):
    """Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022.

    Algorithm 1: clients train the body by cross-entropy, theta_ext <- theta_ext - lr grad, and the head with learning
    rate 0, so that it keeps its initial weights, the same for all. The server averages the bodies with weights
    n_i / n. To be tested, a client fine-tunes the fresh body and that head on its own data for `fine_tuning_epochs`
    (tau_f, 5 in the paper).

    Up: the body (mean). Down: the body (shared). Persists: server: the body; client: the initial head, and its
    batch-norm statistics with `training.bn: local`. Evaluated: the fine-tuned model, which is not kept.

    Newcomers: the shared body under that head, fine-tuned as for everybody; this is what the paper tests.

    Readings. The abstract fine-tunes the head, the authors' code the whole model (the default). The learning rate is
    that of the round; the authors' code takes the last one of training, after its decay. The authors' code averages
    plainly, over clients with equally many samples; `weighting: clients` does that.
    """

    summary: ClassVar[str] = "a shared body under a fixed head, fine-tuned to be tested"
    paper: ClassVar[str] = "Oh et al., ICLR 2022"
    shared: ClassVar[tuple[str, ...]] = ("body",)
    message: ClassVar[str] = "body"
    state: ClassVar[str] = "body"
    untrained: ClassVar[tuple[str, ...]] = ("head",)
    predicts_with: ClassVar[tuple[str, ...]] = ("body",)

    def init_client(self, task: Task) -> Tree:
        return self.to_keep(task, self.init_model(task.of_client(SERVER)))  # the server's draw: one head for all
