"""The samples of a client of a run, and a torch module that predicts as the client does; needs torch and the data."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm
from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.model import read_client_states
from pflmpi.data.federation import Federation
from pflmpi.errors import CheckpointError
from pflmpi.experiment import build
from pflmpi.experiment.build import Experiment
from pflmpi.learning.local_training import OPTIMIZER
from pflmpi.learning.task import Task
from pflmpi.messages.downlink import send_down
from pflmpi.messages.kinds import as_messages
from pflmpi.messages.uplink_transforms import RESIDUAL
from pflmpi.runtime.contract import ANSWERED, RECEIVED
from pflmpi.runtime.executors.base import Loop
from pflmpi.transports.inprocess import InProcessTransport
from pflmpi.tree import Tree


class PersonalModule(nn.Module):
    """Predicts as a client of a run does after a round.

    Its parameters are the client's state ("client.model.head.weight") and the messages that it predicts with
    ("received.body..."). A name that every module has, such as "train", gets an underscore.

    Args:
        task: the client's task, on the CPU.
        client: its state, adapted if the algorithm adapts.
        received: the messages that it predicts with.
    """

    def __init__(self, algorithm: Algorithm, task: Task, client: Tree, received: Tree) -> None:
        super().__init__()
        self._algorithm, self._task = algorithm, task
        self._names: dict[str, str] = {}  # path -> name
        for path, value in tree.leaves({"client": client, "received": received}):
            *owners, last = (name + "_" * hasattr(nn.Module, name) for name in path.split("/"))
            module: nn.Module = self
            for owner in owners:
                if owner not in module._modules:
                    module.add_module(owner, nn.Module())
                module = module.get_submodule(owner)
            if value.is_floating_point() and "stats" not in owners:
                module.register_parameter(last, nn.Parameter(value.clone()))
            else:
                module.register_buffer(last, value.clone())
            self._names[path] = ".".join([*owners, last])

    def forward(self, x: Tensor) -> Tensor:
        """Scores [B, K] of samples [B, ...] as `Run.samples` returns them: bytes, or numbers before normalisation."""
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        both: Tree = tree.unflatten({path: tensors[name] for path, name in self._names.items()})
        state, received = (tree.part(both, part) if part in both else {} for part in ("client", "received"))
        task = self._task.replace(device=x.device)
        return self._algorithm.predict(task, state, as_messages(received), task.prepare(x))


def build_personal_module(checkpoint: Checkpoint, experiment: Experiment, client: int) -> PersonalModule:
    """Builds the module of a client, on the CPU and in evaluation mode.

    Raises:
        CheckpointError: there is no such client, or a file is damaged.
    """
    (stored,) = read_client_states(checkpoint, [client])
    setup, ids = build.setup(experiment, 1, 1), np.array([client])
    state = _to_tree(stored.kept)
    for part in (ANSWERED, RESIDUAL, OPTIMIZER):  # which no prediction uses
        state.pop(part, None)
    if RECEIVED in state:
        received = tree.part(state, RECEIVED)
        del state[RECEIVED]
    else:  # the client was tested with the newest reply, which the server's state determines
        published = setup.algorithm.publish(setup.task, _to_tree(checkpoint.server), ids)
        reply = send_down(InProcessTransport(), setup.declared, published, [[ids]])
        rows = reply.for_clients(ids, setup.algorithm.predicts_with)
        received = tree.map(lambda leaf: leaf[0], {**rows})
    state = build.executor_of(experiment, Loop).adapted(client, state, as_messages(received), checkpoint.number)
    return PersonalModule(setup.algorithm, experiment.tasks[int(experiment.cohort[client])], state, received).eval()


def _to_tree(flat: Mapping[str, np.ndarray]) -> Tree:
    return tree.unflatten({path: torch.tensor(array) for path, array in flat.items()})


class Samples(NamedTuple):
    """Samples [m, ...], bytes or numbers before normalisation, and their labels [m, ...]; classes count from 0."""

    x: np.ndarray
    y: np.ndarray


class ClientSamples(NamedTuple):
    """The training and test samples of a client."""

    train: Samples
    test: Samples


def copy_client_samples(run: Path, federation: Federation, client: int) -> ClientSamples:
    """Copies of a client's samples, in the order that batches count in.

    Raises:
        CheckpointError: the run has no such client.
    """
    if not 0 <= client < federation.num_clients:
        raise CheckpointError(f"{run} has clients 0 to {federation.num_clients - 1}; client {client} was requested")
    images, labels = federation.dataset.images, federation.dataset.labels
    train, test = federation.train[client], federation.test[client]
    return ClientSamples(Samples(images[train], labels[train]), Samples(images[test], labels[test]))
