"""Numbers that each client keeps, over rounds: beta of pFedAFE, alpha of APFL, the cluster in FeSEM."""

from collections.abc import Callable, Sequence

import numpy as np

from pflmpi.analysis.plots import Matrices, Panel
from pflmpi.analysis.run import Round
from pflmpi.analysis.series.selection import client_leaf
from pflmpi.analysis.server_leaves import server_leaf, server_shapes

Values = Callable[[Round], np.ndarray]


def mixing_ratio(states: Sequence[Round]) -> Matrices:
    """Return beta of pFedAFE (eq. 7), the share of its own body that each client mixed in at its last update."""
    return Matrices(
        name="beta",
        title="Beta of each client",
        caption="The share of its own body that a client mixed into the shared one at its last update: 0 only the "
        "shared body, 1 only its own. An empty cell: the client has not trained yet.",
        row_label="client",
        column_label="round",
        value_label="beta",
        panels=(_over_rounds(states, _beta),),
        limits=(0.0, 1.0),
    )


def own_share(states: Sequence[Round]) -> Matrices:
    """Return alpha of APFL (eq. 10), the share of its own model in the personal one of each client."""
    return Matrices(
        name="alpha",
        title="Alpha of each client",
        caption="The share of its own model in a client's personal model: 0 only the global model, 1 only its own.",
        row_label="client",
        column_label="round",
        value_label="alpha",
        panels=(_over_rounds(states, lambda state: _leaf(state, "alpha")),),
        limits=(0.0, 1.0),
    )


def clusters(states: Sequence[Round]) -> Matrices:
    """Return the cluster of each client in FeSEM (the E-step's r_i)."""
    panel = _over_rounds(states, _cluster)
    count = next(shape[0] for path, shape in server_shapes(states[-1]).items() if path.startswith("centres/"))
    return Matrices(
        name="clusters",
        title="Cluster of each client",
        caption="The cluster whose centre was nearest to the client's model when it last took part. An empty cell: it "
        "has not taken part yet.",
        row_label="client",
        column_label="round",
        value_label="cluster",
        panels=(panel,),
        categories=tuple(str(number) for number in range(count)),
    )


def _over_rounds(states: Sequence[Round], values: Values) -> Panel:
    matrix = np.stack([values(state) for state in states], axis=1).astype(np.float64)
    return Panel("", matrix, range(len(matrix)), [state.number for state in states])


def _leaf(state: Round, name: str) -> np.ndarray:
    found = client_leaf(state, name)
    assert found is not None, f"no client keeps {name}"
    return found[1]


def _beta(state: Round) -> np.ndarray:
    return np.where(_leaf(state, "trained"), _leaf(state, "beta"), np.nan)


def _cluster(state: Round) -> np.ndarray:
    cluster = server_leaf(state, "cluster")
    assert cluster is not None, "the server keeps no clusters"
    return np.where(cluster < 0, np.nan, cluster)
