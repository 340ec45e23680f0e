"""Linear CKA: how similar the outputs of two layers are for the same samples, whatever their widths and scales."""

import numpy as np

LEAST_SAMPLES = 4  # with fewer, centring leaves nothing
_ROUNDING = 1e-12  # relative to the products


def centred(gram: np.ndarray) -> np.ndarray:
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


def cka(matrices: np.ndarray) -> np.ndarray:
    """CKA of every two layers, [m, m]: 1 alike, about 0 unrelated, NaN where one's output is constant.

    Kornblith et al., Similarity of Neural Network Representations Revisited, ICML 2019, with unbiased HSIC as in
    Nguyen et al., Do Wide and Deep Networks Learn the Same Things?, ICLR 2021, eq. 2: it may be slightly below 0.

    Args:
        matrices: [m, n, n] from `centred`, over the same samples.
    """
    flat = matrices.reshape(len(matrices), -1).astype(np.float64)
    products = flat @ flat.T
    norms = np.sqrt(np.diag(products))
    scale = norms[:, np.newaxis] * norms
    return np.asarray(np.divide(products, scale, out=np.full_like(products, np.nan), where=scale > 0))
