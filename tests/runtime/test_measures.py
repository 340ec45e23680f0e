"""Figures of an evaluation, against scikit-learn and by hand."""

import numpy as np
from sklearn.metrics import f1_score

from pflmpi.runtime.measures import Counts, figures


def counted(labels, predictions, classes):
    def of(chosen):
        return np.stack([np.bincount(each, minlength=classes) for each in chosen])

    hits = of([y[y == p] for y, p in zip(labels, predictions, strict=True)])
    return Counts(hits, of(predictions), of(labels), np.arange(len(labels), dtype=np.float64))


def test_macro_f1_is_that_of_scikit_learn_for_each_client():
    rng = np.random.default_rng(0)
    labels = [rng.integers(0, 3, size) for size in (1, 7, 40)]  # classes 3 and 4: never there, sometimes predicted
    predictions = [rng.integers(0, 4, len(each)) for each in labels]
    expected = [f1_score(y, p, average="macro") for y, p in zip(labels, predictions, strict=True)]
    found = counted(labels, predictions, 5)
    np.testing.assert_allclose(found.macro_f1, expected, rtol=1e-12)
    assert np.isclose(figures(found)["f1_macro"], np.mean(expected))


def test_figures_leave_out_clients_without_samples():
    hits = np.array([[1, 0], [2, 2], [0, 0], [0, 1]])
    counts = Counts(hits, hits, np.array([[2, 0], [2, 2], [0, 0], [3, 1]]), np.array([1.0, 2.0, 0.0, 6.0]))
    found = figures(counts)
    assert found["accuracy_mean"] == np.mean([0.5, 1, 0.25]) and found["accuracy_weighted"] == 6 / 10
    assert found["accuracy_bottom"] == 0.25 and found["accuracy_std"] == np.std([0.5, 1, 0.25])
    assert found["test_loss"] == np.mean([0.5, 0.5, 1.5]) and np.isnan(counts.accuracy[2])
    assert counts.class_accuracy.tolist() == [3 / 7, 1.0]


def test_the_bottom_tenth_is_the_mean_of_the_lowest_clients():
    total = np.full((30, 1), 100)
    hits = np.random.default_rng(0).permutation(30).reshape(30, 1)
    assert np.isclose(figures(Counts(hits, hits, total, np.zeros(30)))["accuracy_bottom"], 0.01)
