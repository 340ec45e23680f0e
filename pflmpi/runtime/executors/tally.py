"""Counting what scores get right, on the host: a device has then nothing to do for it but one copy."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from pflmpi.runtime.evaluation.measures import Counts


def counts(scores: Sequence[Tensor], labels: Sequence[np.ndarray], num_classes: int) -> Counts:
    """The counts of some clients.

    Args:
        scores: [n, K] of each client, taken as logits, on the host.
        labels: int64 [n] of each.
        num_classes: K.
    """
    rows = [_row(mine, true, num_classes) for mine, true in zip(scores, labels, strict=True)]
    hits, predicted, total, loss = zip(*rows, strict=True)
    return Counts(np.stack(hits), np.stack(predicted), np.stack(total), np.array(loss, np.float64))


def _row(scores: Tensor, true: np.ndarray, num_classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    chosen = scores.argmax(1).numpy()
    loss = -scores.double().log_softmax(1).numpy()[np.arange(len(true)), true].sum()
    hits, predicted, total = (np.bincount(each, minlength=num_classes) for each in (true[chosen == true], chosen, true))
    return hits, predicted, total, float(loss)
