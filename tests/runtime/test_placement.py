"""Clients are assigned to ranks by their groups."""

from dataclasses import replace

import numpy as np
import pytest

import quick_run
from every_algorithm import every_algorithm
from pflmpi.config import load as configuration
from pflmpi.experiment.build import load_federation, prepare, setup
from pflmpi.learning.task import HOST
from pflmpi.runtime.placement import Placement, cut_groups, place_clients


@pytest.mark.parametrize("lives_somewhere", [True, False])
def test_every_client_is_assigned_once_with_those_of_its_group(lives_somewhere):
    rng = np.random.default_rng(0)
    steps = rng.integers(1, 9, 50)
    groups = cut_groups(rng.integers(0, 2, 50), steps, 4)
    home = place_clients(groups, rng.integers(0, 9, (len(groups), 3)), range(5)) if lives_somewhere else None
    placement = Placement(5, groups, 32, home, (1, 2, 3, 4) if home is None else tuple(range(5)), steps, steps)
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


@pytest.mark.parametrize("lives_somewhere", [True, False])
def test_a_group_with_many_clients_at_hand_is_cut_the_same_on_any_number_of_ranks(lives_somewhere):
    groups = cut_groups(np.zeros(50, np.int64), np.arange(50), 20)
    calls = []
    for ranks in (1, 2, 5):
        home = np.empty(50, np.int64)
        for i, group in enumerate(groups):
            home[group] = i % ranks
        placement = Placement(
            ranks, groups, 8, home if lives_somewhere else None, tuple(range(ranks)), *np.ones((2, 50))
        )
        calls.append(sorted(call.tolist() for rank_calls in placement.assign(np.arange(3, 50)) for call in rank_calls))
    assert calls[0] == calls[1] == calls[2]
    assert [len(call) for call in calls[0]] == [8, 6, 8, 8, 1, 8, 8]


def plain_homes(groups, work, hosts, most):
    """As `place_clients` says, in plain words; `most` hosts are compared for each group."""
    home, load = [-1] * sum(map(len, groups)), [np.zeros(work.shape[1]) for _ in hosts]
    for number in sorted(range(len(groups)), key=lambda number: (-work[number].sum(), groups[number][0])):
        group, cost, before = groups[number], work[number], np.max(load, axis=0).sum()
        after = [np.max([*load[:i], load[i] + cost, *load[i + 1 :]], axis=0).sum() for i in range(len(hosts))]
        least = sorted(range(len(hosts)), key=lambda i: (load[i].sum(), i))[:most]
        best = min(least, key=lambda i: (after[i] - before, load[i].sum(), i))
        load[best] += cost
        for client in group:
            home[client] = hosts[best]
    return home


@pytest.mark.parametrize("seed", range(30))
def test_homes_are_those_that_comparing_every_host_gives(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    clients, rounds, count = rng.integers(1, 60), rng.integers(1, 20), rng.integers(1, 70)
    cost = rng.integers(1, 4 if seed % 2 else 1000, clients)[:, None]
    takes_part = rng.random((clients, rounds)) < rng.choice([0.05, 0.3, 1.0])
    tested = rng.choice([0, 1]) * rng.integers(0, 5, clients)[:, None]  # in every round
    work = (cost * takes_part + tested).astype(float)
    hosts = np.sort(rng.choice(100, count, replace=False)).tolist()
    groups = cut_groups(rng.integers(0, 2, clients), cost[:, 0], int(rng.integers(1, 5)))
    work = np.stack([work[group].sum(0) for group in groups])
    assert place_clients(groups, work, hosts).tolist() == plain_homes(groups, work, hosts, count)
    if takes_part.all():  # 32 hosts with the least work are compared at least
        monkeypatch.setattr("pflmpi.runtime.placement._MAX_COMPARED", 0)
        assert place_clients(groups, work, hosts).tolist() == plain_homes(groups, work, hosts, 32)


@pytest.mark.parametrize("clients,hidden,most", [(1000, 16, 32), (50_000, 16, 48), (50_000, 40_000, 32)])
def test_more_of_very_many_small_models_are_tested_in_a_call(clients, hidden, most):
    raw = quick_run.settings(
        data={"name": "digits"},
        partition={"name": "iid", "clients": 10},
        model={"name": "mlp", "hidden": hidden},
        algorithm={"name": "fedper"},
        training={"participation": 10 / clients},
    )
    config = configuration.parse(raw)
    federation = load_federation(config)
    many = replace(federation, train=federation.train[:1] * clients, test=federation.test[:1] * clients)
    many = replace(many, class_counts=np.repeat(federation.class_counts[:1], clients, 0))
    placement = setup(prepare(config, HOST, federation=many), 1, 1).placement
    everyone = np.arange(clients)
    assert max(map(len, placement.assign(everyone, tested=True)[0])) == most
    assert max(map(len, placement.assign(everyone)[0])) == 32


LIGHT, HEAVY = {"name": "mlp", "hidden": 16}, {"name": "cnn", "hidden": 16, "kernel": 3, "padding": 1}


@pytest.mark.parametrize("name", ["fedproto", "fedavg"])
def test_clients_with_large_models_are_spread_from_the_first_round_on_and_bits_are_the_same(name, tmp_path):
    raw = quick_run.settings(
        every_algorithm()[name],
        partition={"name": "iid", "clients": 4},
        model=[HEAVY, LIGHT] if name == "fedproto" else LIGHT,
        training={"rounds": 2, "participation": 1.0, "steps": 1},
        runtime={"executor": "loop"},
    )
    placement = setup(prepare(configuration.parse(raw), HOST), 2, 2).placement
    assert (placement.home is None) == (name == "fedavg")
    clients = [np.concatenate(groups).tolist() for groups in placement.assign(np.arange(4))]
    assert clients == ([[0, 1], [2, 3]] if name == "fedproto" else [[0, 2], [1, 3]]), "0 and 2 have the large model"
    heavy, light = placement.work[:2]
    assert heavy > 5 * light if name == "fedproto" else heavy == light
    assert quick_run.run(raw, tmp_path / "one") == quick_run.run(raw, tmp_path / "two", 2)
