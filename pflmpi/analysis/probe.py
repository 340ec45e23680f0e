"""Probe of a checkpoint: test samples through the clients' models, to see how alike their layers are; needs torch."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.analysis.alignment import LEAST_SAMPLES, centred, cka
from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.model import assembled, client_states, comparable_model
from pflmpi.data.federation import Federation
from pflmpi.errors import ConfigError
from pflmpi.models.activations import activations
from pflmpi.rng import stream
from pflmpi.run.build import Experiment
from pflmpi.store.probe_file import Alike

_ROUNDING = 1e-6  # of float32, relative


def probe_samples(federation: Federation, most: int, seed: int) -> np.ndarray:
    """Indices of the samples of the probe, ascending, drawn from the clients' test samples.

    Raises:
        ConfigError: they have too few.
    """
    tested = np.unique(np.concatenate(federation.test))
    if len(tested) < LEAST_SAMPLES:
        raise ConfigError(f"the clients have {len(tested)} test samples together; a probe needs {LEAST_SAMPLES}")
    return np.sort(stream(seed, 0, -1, "probe").permutation(tested)[:most])


def compare_layers(
    checkpoint: Checkpoint,
    experiment: Experiment,
    clients: np.ndarray,
    samples: np.ndarray,
    update: Callable[[int, int], None],
) -> dict[str, Alike]:
    """CKA between the clients' models, layer by layer.

    Args:
        clients: ascending ids; all their models are in memory at once.
        samples: indices into the dataset.
        update: called with how many clients are done, of how many.
    """
    seen: dict[str, dict[int, np.ndarray]] = {}
    description, states = comparable_model(checkpoint), client_states(checkpoint, clients.tolist())
    first = experiment.tasks[0]
    x = first.prepare(torch.from_numpy(experiment.federation.dataset.images[samples]).to(first.device))
    for done, state in enumerate(states, 1):
        task = experiment.tasks[int(experiment.cohort[state.client])]
        flat = assembled(checkpoint, description, state)
        model = tree.unflatten({path: torch.tensor(array) for path, array in flat.items()})

        def see(layer: str, output: Tensor, client: int = state.client) -> None:
            seen.setdefault(layer, {})[client] = centred(_products(output)).astype(np.float32)

        activations(task.architecture, tree.to(model, task.device), x, see)
        update(done, len(states))
    return {
        layer: Alike(np.array(sorted(found), np.int64), cka(np.stack([found[client] for client in sorted(found)])))
        for layer, found in seen.items()
    }


def _products(output: Tensor) -> np.ndarray:
    """Inner products [B, B] of a layer's outputs for each sample, less their mean."""
    flat = output.flatten(1).float()
    mean = flat.mean(0)
    apart = flat - mean
    apart = apart.where(apart.abs() > _ROUNDING * mean.abs(), 0)  # of a dead layer nothing else would be left
    products: np.ndarray = (apart @ apart.mT).cpu().numpy()
    return products
