"""Clients are assigned to ranks by their groups."""

import numpy as np
import pytest

from pflmpi.runtime.placement import Placement, cut_groups, place_clients


@pytest.mark.parametrize("lives_somewhere", [True, False])
def test_every_client_is_assigned_once_with_those_of_its_group(lives_somewhere: bool) -> None:
    rng = np.random.default_rng(0)
    steps = rng.integers(1, 9, 50)
    groups = cut_groups(rng.integers(0, 2, 50), steps, 4)
    home = place_clients(groups, rng.random((3, 50)), range(5)) if lives_somewhere else None
    placement = Placement(5, groups, home, (1, 2, 3, 4) if home is None else tuple(range(5)), 3.0 * steps)
    for count in (0, 1, 20, 50):
        clients = np.sort(rng.choice(50, count, replace=False))
        assigned = placement.assign(clients)
        expected = sorted(group[np.isin(group, clients)].tolist() for group in groups)
        assert sorted(part.tolist() for parts in assigned for part in parts) == [part for part in expected if part]
        for rank, parts in enumerate(assigned):
            assert home is None or all((home[part] == rank).all() for part in parts)
    if home is None:
        loads = [sum(float(placement.work[part].sum()) for part in parts) for parts in placement.assign(np.arange(50))]
        assert loads[0] == 0 and max(loads[1:]) < 1.3 * min(loads[1:]), "rank 0 serves; the others share evenly"
