"""Linear CKA between the layers of the clients' models on test samples (`pflmpi probe`); needs torch.

CKA measures how similar the outputs of two layers are for the same samples, whatever their widths and scales.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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

LEAST_SAMPLES = 4  # U-centring divides by n - 3
_ROUNDING = 1e-12  # relative rounding error of float64 products
_OUTPUT_ROUNDING = 1e-6  # relative rounding error of float32 outputs


def probe_samples(federation: Federation, most: int, seed: int) -> np.ndarray:
    """Draws at most `most` of the clients' test samples; ascending indices into the dataset.

    Raises:
        ConfigError: the clients have fewer than `LEAST_SAMPLES` together.
    """
    candidates = np.unique(np.concatenate(federation.test))
    if len(candidates) < LEAST_SAMPLES:
        raise ConfigError(f"the clients have {len(candidates)} test samples together; a probe needs {LEAST_SAMPLES}")
    return np.sort(stream(seed, 0, -1, "probe").permutation(candidates)[:most])


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
        update: called with the number of clients that are done, and of all.
    """
    grams: dict[str, dict[int, np.ndarray]] = {}  # layer -> client -> centred Gram matrix [n, n]
    description, states = get_comparable_model(checkpoint), read_client_states(checkpoint, clients.tolist())
    first = experiment.tasks[0]
    x = first.prepare(torch.from_numpy(experiment.federation.dataset.images[samples]).to(first.device))
    for done, state in enumerate(states, 1):
        task = experiment.tasks[int(experiment.cohort[state.client])]
        flat = assemble_model(checkpoint, description, state)
        model = tree.unflatten({path: torch.tensor(array) for path, array in flat.items()})

        def note(layer: str, output: Tensor, client: int = state.client) -> None:
            grams.setdefault(layer, {})[client] = u_center(_compute_gram_matrix(output)).astype(np.float32)

        record_activations(task.architecture, task.whole(tree.to(model, task.device)), x, note)
        update(done, len(states))
    similarities = {}
    for layer, by_client in grams.items():
        ids = sorted(by_client)
        cka = compute_cka(np.stack([by_client[client] for client in ids]))
        similarities[layer] = LayerSimilarity(np.array(ids, np.int64), cka)
    return similarities


def record_activations(architecture: Architecture, model: Tree, x: Tensor, see: Callable[[str, Tensor], None]) -> None:
    """Runs a model on a batch and passes each layer's output to `see`, in order of execution.

    Args:
        model: weights of the architecture, on the device of x.
        x: prepared images, [B, C, H, W].
        see: called with the name of each layer of `architecture.layers` that has a "weight", and its output [B, ...]
            before any nonlinearity; without layers that put the batch on another axis, as attention does inside.
    """
    leaves = dict(tree.leaves(model))
    weights = [(layer, leaves[path]) for layer in architecture.layers if (path := f"{layer}/weight") in leaves]
    with torch.no_grad(), _without_fast_path(), _LayerOutputs(weights, len(x), see):
        architecture.logits(part(model, "head"), architecture.features(model, x, training=False))


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Context in which encoders and attention of PyTorch call their layers instead of one function."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


class _LayerOutputs(TorchFunctionMode):
    """While active, passes on the results [B, ...] of torch functions that take a layer's weight after their input."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], batch: int, see: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self._layers = {id(weight): layer for layer, weight in weights}
        self._batch, self._see = batch, see

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = kwargs or {}
        result = function(*args, **others)
        if not isinstance(result, Tensor) or result.shape[:1] != (self._batch,):
            return result
        for argument in (*args[1:], *others.values()):
            if id(argument) in self._layers:
                self._see(self._layers[id(argument)], result)
        return result


def u_center(gram: np.ndarray) -> np.ndarray:
    """U-centres the Gram matrix of n samples, [n, n] float64, with zeros on the diagonal.

    <A, B> / (n (n - 3)) of two such matrices is the unbiased HSIC_1 of Song et al., Feature Selection via Dependence
    Maximization, JMLR 2012, eq. 5. The biased HSIC is near 1 for any two layers with more units than samples.

    Args:
        gram: [n, n] the inner products x_i . x_j of the activations, n >= 4; a constant may be subtracted from all x_i.
    """
    n = len(gram)
    assert n >= LEAST_SAMPLES
    centred = np.array(gram, np.float64)
    np.fill_diagonal(centred, 0.0)
    sums = centred.sum(0)
    centred -= (sums[:, np.newaxis] + sums) / (n - 2) - sums.sum() / ((n - 1) * (n - 2))
    np.fill_diagonal(centred, 0.0)
    return centred if np.abs(centred).max() > _ROUNDING * np.abs(gram).max() else np.zeros_like(centred)


def compute_cka(matrices: np.ndarray) -> np.ndarray:
    """CKA of every two layers, [m, m]: 1 if they are alike, near 0 if unrelated, NaN if the output of one is constant.

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
    """Inner products [B, B] of a layer's outputs, less their mean over samples."""
    flat = output.flatten(1).float()
    mean = flat.mean(0)
    centred = flat - mean
    # A unit with constant output must not contribute rounding errors.
    centred = centred.where(centred.abs() > _OUTPUT_ROUNDING * mean.abs(), 0)
    gram: np.ndarray = (centred @ centred.mT).cpu().numpy()
    return gram
