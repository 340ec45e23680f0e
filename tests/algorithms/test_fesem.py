"""FeSEM: E-step, M-step, the first centres, who receives which centre."""

import numpy as np
import pytest
import torch

import numpy_network
import small_task
from pflmpi import tree
from pflmpi.algorithms.base import Round
from pflmpi.algorithms.fesem import FeSEM
from pflmpi.errors import ConfigError
from pflmpi.learning.task import Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.messages.kinds import Messages
from pflmpi.models import MODELS


def filled(*values):
    """One model for each value, with that value in every entry."""
    return tree.stack(
        [tree.map(lambda leaf, value=value: torch.full_like(leaf, value), small_task.task().init()) for value in values]
    )


def values(rows):
    """The value that fills each of the rows."""
    entries = torch.cat([leaf.flatten(1) for _, leaf in tree.leaves(rows)], 1)
    assert torch.equal(entries.amin(1), entries.amax(1))
    return [round(value, 5) for value in entries[:, 0].tolist()]


def state(centres, cluster):
    return {"centres": filled(*centres), "cluster": torch.tensor(cluster)}


def upload(*models, counts=None):
    up: Messages = {"model": filled(*models)}
    return up if counts is None else {**up, "samples": {"count": torch.tensor(counts, dtype=torch.int32)}}


def update(algorithm, server, up, participants, number=2, seed=0):
    task = small_task.task(clients=len(server["cluster"]))
    return algorithm.server_update(task, server, up, Round(number, np.array(participants), seed))


def test_participants_join_the_nearest_centre_which_becomes_their_mean():
    new = update(FeSEM(), state([0, 10, 20], [-1] * 6), upload(1, 8, 3, 11), [0, 1, 3, 5])
    assert new["cluster"].tolist() == [0, 1, -1, 0, -1, 1]
    assert values(new["centres"]) == [2, 9.5, 20]


def test_the_distance_is_over_all_parameters():
    model = small_task.task().init()
    near_in_bias = tree.map(lambda leaf: torch.zeros_like(leaf) if leaf.ndim == 1 else torch.ones_like(leaf), model)
    new = update(FeSEM(num_clusters=2), state([0, 0.9], [-1]), {"model": tree.stack([near_in_bias])}, [0])
    # 35 weights at 1 and 8 biases at 0.
    assert 35 * 1.0 > 35 * 0.1**2 + 8 * 0.9**2 and new["cluster"].tolist() == [1]


def test_random_models_join_as_in_numpy():
    generator = torch.Generator().manual_seed(0)
    rows, centres = (
        tree.map(lambda leaf, n=n: torch.randn(n, *leaf.shape, generator=generator), small_task.task().init())
        for n in (9, 4)
    )
    server = {"centres": centres, "cluster": torch.full((9,), -1)}
    new = update(FeSEM(num_clusters=4), server, {"model": rows}, list(range(9)))
    w, c = (
        np.concatenate([leaf.flatten(1).double().numpy() for _, leaf in tree.leaves(t)], 1) for t in (rows, centres)
    )
    nearest = np.array([np.argmin([((model - centre) ** 2).sum() for centre in c]) for model in w])
    assert new["cluster"].tolist() == nearest.tolist() and len(set(nearest.tolist())) > 1
    for k in range(4):
        new_centre = np.concatenate([leaf[k].flatten().numpy() for _, leaf in tree.leaves(new["centres"])])
        np.testing.assert_allclose(new_centre, w[nearest == k].mean(0) if (nearest == k).any() else c[k], atol=1e-6)


def test_a_cluster_without_members_keeps_its_centre():
    new = update(FeSEM(num_clusters=2), state([0.123, 10], [0, 0]), upload(9, 12), [0, 1])
    assert values(new["centres"]) == [0.123, 10.5]


def test_the_mean_is_plain_unless_samples_are_asked_for():
    # Known defect elsewhere: the mode that is named after ignoring sizes calls the weighted average.
    up = upload(1, 4, 20, counts=[30, 10, 7])
    server = state([0, 21], [-1] * 3)
    assert values(update(FeSEM(num_clusters=2), server, up, [0, 1, 2])["centres"]) == [2.5, 20]
    by_samples = update(FeSEM(num_clusters=2, weighting="samples"), server, up, [0, 1, 2])
    assert values(by_samples["centres"]) == [1.75, 20]


def test_a_cluster_with_one_member_moves_to_it():
    # Known defect elsewhere: clusters with at most one member are left out.
    new = update(FeSEM(num_clusters=2), state([1, 10], [0, 1]), upload(2), [0])
    assert values(new["centres"]) == [2, 10] and new["cluster"].tolist() == [0, 1]


def test_clients_change_their_cluster_in_any_round():
    # Known defect elsewhere: clusters are found anew only every 150 rounds.
    server = state([0, 10], [0, 1, 0])
    for number in (2, 3, 4):
        models = [9.0, 1.0] if number % 2 == 0 else [1.0, 9.0]
        server = {**server, "centres": filled(0, 10)}
        server = update(FeSEM(num_clusters=2), server, upload(*models), [0, 1], number)
        assert server["cluster"].tolist() == ([1, 0, 0] if number % 2 == 0 else [0, 1, 0])


def test_the_first_centres_are_members_drawn_from_the_stream_of_the_first_round():
    models, drawn = [1.0, 5.0, 12.0, 30.0], set()
    for seed in range(20):
        args = FeSEM(num_clusters=3), state([7, 7, 7], [-1] * 4), upload(*models), [0, 1, 2, 3], 1, seed
        new = update(*args)
        again = update(*args)
        assert values(new["centres"]) == values(again["centres"])
        assert sorted(new["cluster"].unique().tolist()) == [0, 1, 2], "each centre has at least the member it was"
        drawn.add(tuple(values(new["centres"])))
    assert len(drawn) > 3


def test_the_first_centres_are_spread_over_groups_that_are_far_apart():
    # Proportional to squared distance: a second centre in a group that has one has a chance of some 1e-6.
    models = [0.0, 0.1, 0.2, 100.0, 100.1, 100.2, -50.0, -50.1, -50.2]
    for seed in range(20):
        new = update(FeSEM(), state([7, 7, 7], [-1] * 9), upload(*models), list(range(9)), 1, seed)
        assert sorted(values(new["centres"])) == [-50.1, 0.1, 100.1]


def test_the_chance_of_a_second_centre_is_proportional_to_the_squared_distance():
    distances, counts = torch.tensor([[0.0, 1, 9], [1, 0, 4], [9, 4, 0]]), {1: 0, 2: 0}
    for seed in range(900):
        first, second = FeSEM(num_clusters=2).seeds(distances, np.random.default_rng(seed))
        if first == 0:
            counts[second] += 1
    share = counts[2] / sum(counts.values())  # of some 300 draws, standard error 0.017
    assert abs(share - 9 / 10) < 0.06


def test_equal_models_in_the_first_round_make_one_cluster():
    new = update(FeSEM(), state([7, 7, 7], [-1] * 3), upload(2, 2, 2), [0, 1, 2], 1)
    assert new["cluster"].tolist() == [0, 0, 0] and values(new["centres"]) == [2, 2, 2]


def test_a_client_receives_the_centre_of_its_cluster():
    server = state([1, 2, 3], [2, 0, 1, 2])
    down = FeSEM().publish(small_task.task(clients=4), server, np.array([3, 0, 1]))
    assert values(down["centre"]) == [3, 3, 1]


def test_a_client_without_a_cluster_receives_the_mean_of_the_centres_by_their_clients():
    server = state([1, 2, 30], [0, 0, -1, 1])
    down = FeSEM().publish(small_task.task(clients=4), server, np.array([2, 3]))
    assert values(down["centre"]) == [round(4 / 3, 5), 2]


def test_before_the_first_round_everybody_receives_the_initial_model():
    task = small_task.task(clients=4, init="per_client")
    server = FeSEM(num_clusters=3).init_server(task)
    down = FeSEM(num_clusters=3).publish(task, server, np.arange(4))
    assert tree.at(server, "cluster").tolist() == [-1] * 4, "a cluster before a client has taken part"
    for path, leaf in tree.leaves(task.init()):
        assert all(torch.equal(row, leaf) for row in tree.at(down["centre"], path)), path


def test_the_client_trains_the_centre_it_received_and_is_tested_with_it():
    task, batch = small_task.task(), small_task.batch(0)
    centre = tree.map(lambda leaf: leaf * 2, task.init())
    kept, up = FeSEM().client_update(task, {}, {"centre": centre}, small_task.data([batch]))
    w = small_task.to_numpy(centre)
    gradient = numpy_network.gradients(w, *small_task.flat(batch))
    small_task.assert_close(up["model"], {name: w[name] - 0.1 * gradient[name] for name in w})
    assert kept == {} and list(up) == ["model"]
    assert torch.equal(FeSEM().predict(task, {}, {"centre": centre}, batch.x), task.predict(centre, batch.x))
    assert FeSEM.predicts_with == ("centre",)


def test_the_number_of_samples_is_sent_where_it_is_needed():
    task, algorithm = small_task.task(), FeSEM(weighting="samples")
    data = small_task.data([small_task.batch(0), small_task.batch(1, 3)])
    _, up = algorithm.client_update(task, {}, {"centre": task.init()}, data)
    assert up["samples"]["count"].item() == 9 and up["samples"]["count"].dtype == torch.int32
    sent = {way: sum(kind.client_bytes(2) for kind in FeSEM(weighting=way).uplink(task).values())
            for way in ("clients", "samples")}  # fmt: skip
    assert sent == {"clients": 4 * 43, "samples": 4 * 43 + 4}


@pytest.mark.parametrize("bn, travels", [("average", True), ("local", False)])
def test_batch_norm_statistics_are_averaged_in_the_cluster_or_stay(bn, travels):
    task = Task(MODELS["resnet18"]().bind((1, 8, 8), 10), TrainingConfig(bn=bn), 2, 0, (0.5,), (0.5,))
    algorithm = FeSEM(num_clusters=1)
    messages = [algorithm.uplink(task)["model"], algorithm.downlink(task)["centre"]]
    assert ["stats" in message.like for message in messages] == [travels, travels]
    assert ("stats" in algorithm.init_client(task)) != travels
    server, client, x = algorithm.init_server(task), algorithm.init_client(task), torch.ones(2, 1, 8, 8)
    assert ("stats" in server["centres"]) == travels
    centre = tree.row(algorithm.publish(task, server, np.array([0]))["centre"], 0)
    assert torch.equal(algorithm.predict(task, client, {"centre": centre}, x), task.predict(task.init(), x))


def test_more_clusters_than_participants_are_refused():
    FeSEM(num_clusters=3).check(small_task.task(), 3)
    with pytest.raises(ConfigError, match=r"num_clusters = 4.*participants of a round, which are 3; choose at most"):
        FeSEM(num_clusters=4).check(small_task.task(), 3)
