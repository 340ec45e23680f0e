"""Probe of a checkpoint: linear CKA between the layers of the clients' models on test samples; needs torch.

CKA says how similar the outputs of two layers are for the same samples, whatever their widths and scales.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pflmpi import tree
from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.model import assemble_model, get_comparable_model, read_client_states
from pflmpi.data.federation import Federation
from pflmpi.errors import ConfigError
from pflmpi.experiment.build import Experiment
from pflmpi.models.base import Architecture
from pflmpi.rng import stream
from pflmpi.store.probe_file import LayerSimilarity
from pflmpi.tree import Tree, part

LEAST_SAMPLES = 4  # with fewer, centring leaves nothing
_ROUNDING = 1e-12  # of float64 products, relative
_OUTPUT_ROUNDING = 1e-6  # of float32 outputs, relative


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
) -> dict[str, LayerSimilarity]:
    """CKA between the clients' models, layer by layer.

    Args:
        clients: ascending ids; all their models are in memory at once.
        samples: indices into the dataset.
        update: called with how many clients are done, of how many.
    """
    products: dict[str, dict[int, np.ndarray]] = {}  # layer -> client -> [n, n]
    description, states = get_comparable_model(checkpoint), read_client_states(checkpoint, clients.tolist())
    first = experiment.tasks[0]
    x = first.prepare(torch.from_numpy(experiment.federation.dataset.images[samples]).to(first.device))
    for done, state in enumerate(states, 1):
        task = experiment.tasks[int(experiment.cohort[state.client])]
        flat = assemble_model(checkpoint, description, state)
        model = tree.unflatten({path: torch.tensor(array) for path, array in flat.items()})

        def note(layer: str, output: Tensor, client: int = state.client) -> None:
            products.setdefault(layer, {})[client] = u_center(_compute_gram_matrix(output)).astype(np.float32)

        record_activations(task.architecture, task.whole(tree.to(model, task.device)), x, note)
        update(done, len(states))
    return {
        layer: LayerSimilarity(
            np.array(sorted(of_layer), np.int64),
            compute_cka(np.stack([of_layer[client] for client in sorted(of_layer)])),
        )
        for layer, of_layer in products.items()
    }


def record_activations(architecture: Architecture, model: Tree, x: Tensor, see: Callable[[str, Tensor], None]) -> None:
    """Run a model's prediction on a batch and pass each layer's output to `see`, in order.

    Args:
        model: weights of the architecture, on the device of x.
        x: prepared images, [B, C, H, W].
        see: called with a layer of `architecture.layers` that has a "weight" and its output [B, ...], before any
            nonlinearity.
    """
    leaves = dict(tree.leaves(model))
    weights = [(layer, leaves[path]) for layer in architecture.layers if (path := f"{layer}/weight") in leaves]
    with torch.no_grad(), _LayerOutputs(weights, see):
        architecture.logits(part(model, "head"), architecture.features(model, x, training=False))


class _LayerOutputs(TorchFunctionMode):
    """While active, reports the results of calls that take a layer's weight as an argument after the input."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], see: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self._layers = {id(weight): layer for layer, weight in weights}
        self._see = see

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = kwargs or {}
        result = function(*args, **others)
        for argument in (*args[1:], *others.values()):
            if id(argument) in self._layers:
                self._see(self._layers[id(argument)], result)
        return result


def u_center(gram: np.ndarray) -> np.ndarray:
    """The U-centred matrix of the products of n samples, [n, n] float64, with 0 on the diagonal.

    With it <A, B> / (n (n - 3)) is the unbiased HSIC_1 of Song et al., Feature Selection via Dependence Maximization,
    JMLR 2012, eq. 5. The biased one would call any two wide layers alike where the samples are fewer than the units.

    Args:
        gram: [n, n] the inner products x_i . x_j of the activations, n >= 4; what all x_i share may be left out of it.
    """
    n = len(gram)
    assert n >= LEAST_SAMPLES
    apart = np.array(gram, np.float64)
    np.fill_diagonal(apart, 0.0)
    sums = apart.sum(0)
    apart -= (sums[:, np.newaxis] + sums) / (n - 2) - sums.sum() / ((n - 1) * (n - 2))
    np.fill_diagonal(apart, 0.0)
    return apart if np.abs(apart).max() > _ROUNDING * np.abs(gram).max() else np.zeros_like(apart)


def compute_cka(matrices: np.ndarray) -> np.ndarray:
    """CKA of every two layers, [m, m]: 1 alike, about 0 unrelated, NaN where one's output is constant.

    Kornblith et al., Similarity of Neural Network Representations Revisited, ICML 2019, with unbiased HSIC as in
    Nguyen et al., Do Wide and Deep Networks Learn the Same Things?, ICLR 2021, eq. 2: it may be slightly below 0.

    Args:
        matrices: [m, n, n] from `u_center`, over the same samples.
    """
    flat = matrices.reshape(len(matrices), -1).astype(np.float64)
    products = flat @ flat.T
    norms = np.sqrt(np.diag(products))
    scale = norms[:, np.newaxis] * norms
    return np.asarray(np.divide(products, scale, out=np.full_like(products, np.nan), where=scale > 0))


def _compute_gram_matrix(output: Tensor) -> np.ndarray:
    """Inner products [B, B] of a layer's outputs for each sample, less their mean."""
    flat = output.flatten(1).float()
    mean = flat.mean(0)
    apart = flat - mean
    apart = apart.where(apart.abs() > _OUTPUT_ROUNDING * mean.abs(), 0)  # of a dead layer nothing else would be left
    products: np.ndarray = (apart @ apart.mT).cpu().numpy()
    return products
