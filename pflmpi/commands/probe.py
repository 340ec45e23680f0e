"""`pflmpi probe`: a batch of test samples through the models of a checkpoint, to see how alike their layers are."""

import argparse

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.analysis.alignment import LEAST_SAMPLES, centred, cka
from pflmpi.analysis.personal import layered_model
from pflmpi.analysis.run import Round, Run, open_run
from pflmpi.analysis.series.selection import spread_over
from pflmpi.analysis.state_dict import kept
from pflmpi.commands.bars import bar
from pflmpi.data.federation import Federation
from pflmpi.errors import ConfigError
from pflmpi.machine import cores
from pflmpi.models.activations import activations
from pflmpi.rng import stream
from pflmpi.run.build import Experiment
from pflmpi.run.start import reopened
from pflmpi.store import probe_file
from pflmpi.store.probe_file import Alike, Probe

_ROUNDING = 1e-6  # of float32, relative


def probe(options: argparse.Namespace) -> None:
    """Make the probe of a checkpoint and print where it is.

    Raises:
        UserError: no such run or round, other data than the run had, too few samples, a file that cannot be written.
    """
    if options.samples < LEAST_SAMPLES or options.clients < 2:
        raise ConfigError(
            f"--samples {options.samples} --clients {options.clients}: a comparison needs {LEAST_SAMPLES} samples and "
            "2 clients at least"
        )
    run = open_run(options.run)
    round = run.round(options.round)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(len(cores()))
    experiment = reopened(run.path, options.overrides, device)
    samples = probe_samples(experiment.federation, options.samples, experiment.config.seed)
    clients = np.array(spread_over(range(experiment.federation.num_clients), options.clients))
    path = probe_file.path(run.path, round.number)
    found = Probe(round.number, len(samples), compared(run, round, experiment, clients, samples))
    try:
        probe_file.write(run.path, found)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; make room, or probe a copy of the run") from error
    print(path)


def probe_samples(federation: Federation, most: int, seed: int) -> np.ndarray:
    """Return the ascending indices of the samples of the probe: drawn from what the clients are tested with.

    Raises:
        ConfigError: they have too few.
    """
    tested = np.unique(np.concatenate(federation.test))
    if len(tested) < LEAST_SAMPLES:
        raise ConfigError(f"the clients have {len(tested)} test samples together; a probe needs {LEAST_SAMPLES}")
    return np.sort(stream(seed, 0, -1, "probe").permutation(tested)[:most])


def compared(
    run: Run, round: Round, experiment: Experiment, clients: np.ndarray, samples: np.ndarray
) -> dict[str, Alike]:
    """Return the CKA between the clients' models, layer by layer.

    Args:
        clients: ascending ids; all their models are in memory at once.
        samples: indices into the dataset.
    """
    seen: dict[str, dict[int, np.ndarray]] = {}
    states = kept(run, round, clients)
    first = experiment.tasks[0]
    x = first.prepare(torch.from_numpy(experiment.federation.dataset.images[samples]).to(first.device))
    with bar("clients") as show:
        for done, state in enumerate(states, 1):
            task = experiment.tasks[int(experiment.cohort[state.number])]
            model = tree.unflatten({path: torch.from_numpy(array) for path, array in layered_model(state).items()})

            def see(layer: str, output: Tensor, client: int = state.number) -> None:
                seen.setdefault(layer, {})[client] = centred(_products(output)).astype(np.float32)

            activations(task.architecture, tree.to(model, task.device), x, see)
            show(done, len(states))
    return {
        layer: Alike(np.array(sorted(found), np.int64), cka(np.stack([found[client] for client in sorted(found)])))
        for layer, found in seen.items()
    }


def _products(output: Tensor) -> np.ndarray:
    """Return the inner products [B, B] of what a layer puts out for each sample, less the mean of all."""
    flat = output.flatten(1).float()
    mean = flat.mean(0)
    apart = flat - mean
    apart = apart.where(apart.abs() > _ROUNDING * mean.abs(), 0)  # of a dead layer nothing else would be left
    products: np.ndarray = (apart @ apart.mT).cpu().numpy()
    return products
