"""Counting what scores get right, on the host: a device has then nothing to do for it but one copy."""

import numpy as np
from torch import Tensor

from pflmpi.data.federation import Federation
from pflmpi.runtime.evaluation.measures import Counts


def counts(federation: Federation, clients: np.ndarray, scores: Tensor) -> Counts:
    """What scores of test samples get right, for each client.

    Args:
        clients: [m] ids.
        scores: [n, K] of the test samples of one client after another, in stored order, taken as logits, on the host.
    """
    tests, num_classes = [federation.test[client] for client in clients], federation.dataset.num_classes
    labels, sizes = federation.dataset.labels[np.concatenate(tests)], list(map(len, tests))
    whose = np.repeat(np.arange(len(clients)), sizes)
    chosen = scores.argmax(1).numpy()
    right = chosen == labels

    def by_class(whose: np.ndarray, classes: np.ndarray) -> np.ndarray:
        found = np.bincount(whose * num_classes + classes, minlength=len(clients) * num_classes)
        return found.reshape(len(clients), num_classes)

    likely = scores.double().log_softmax(1).numpy()[np.arange(len(labels)), labels]
    loss = np.array([-mine.sum() for mine in np.split(likely, np.cumsum(sizes)[:-1])], np.float64)
    return Counts(by_class(whose[right], labels[right]), by_class(whose, chosen), by_class(whose, labels), loss)
