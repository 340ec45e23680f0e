"""pFedMe: the inner problem, the step along the envelope, the server's mix, and what is scored."""

import numpy as np
import pytest
import torch

import comparisons
import numpy_network
import small_task
from pflmpi import tree
from pflmpi.algorithms.base import Round
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.pfedme import PFedMe
from pflmpi.errors import ConfigError
from pflmpi.messages.kinds import Mean

LR = 0.05


def algorithm_1(w, batches, prox_weight, personal_lr, inner_steps):
    """The participant's lines of the paper: w_{i,R} and the theta of the last local round."""
    theta = w
    for batch in batches:
        theta = w
        for _ in range(inner_steps):
            slope = numpy_network.gradients(theta, *small_task.flat(batch))
            theta = {k: theta[k] - personal_lr * (slope[k] + prox_weight * (theta[k] - w[k])) for k in w}
        w = {k: w[k] - LR * prox_weight * (w[k] - theta[k]) for k in w}
    return w, theta


def update(algorithm, batches, round=1, **training):
    """What a client with a theta of its own keeps and sends after receiving `comparisons.model(1)`."""
    task = small_task.task(**training)
    state, up = algorithm.client_update(
        task,
        {"personal": comparisons.model(2)},
        {"model": comparisons.model(1)},
        comparisons.data_of({"train": batches}, LR, round, task.training.decay(round)),
    )
    return state["personal"], up["model"]


def test_every_minibatch_solves_from_w_and_moves_w_along_the_envelope():
    """No term but those of the paper: no weight decay of the solver's own, no start from the theta before."""
    batches = [small_task.batch(0), small_task.batch(1), small_task.batch(2)]
    theta, sent = update(PFedMe(prox_weight=4.0, personal_lr=0.2, inner_steps=3), batches)
    w, expected = algorithm_1(small_task.to_numpy(comparisons.model(1)), batches, 4.0, 0.2, 3)
    small_task.assert_close(sent, w)
    small_task.assert_close(theta, expected)


def test_with_one_inner_step_the_local_model_takes_steps_of_sgd():
    """w - eta lambda (w - (w - eta_p g)) = w - eta lambda eta_p g."""
    batches = [small_task.batch(0), small_task.batch(1)]
    _, sent = update(PFedMe(prox_weight=5.0, personal_lr=0.3, inner_steps=1), batches)
    plain = small_task.data(batches, LR * 5.0 * 0.3)
    _, fedavg_up = FedAvg().client_update(small_task.task(), {}, {"model": comparisons.model(1)}, plain)
    small_task.assert_close(sent, small_task.to_numpy(fedavg_up["model"]), 1e-6)


def test_the_personal_learning_rate_decays_with_the_other():
    theta, _ = update(PFedMe(personal_lr=0.08), [small_task.batch(0)], round=3, lr_decay=0.5)
    _, expected = algorithm_1(small_task.to_numpy(comparisons.model(1)), [small_task.batch(0)], 15.0, 0.08 * 0.25, 5)
    small_task.assert_close(theta, expected)


def test_scored_is_theta_and_neither_the_trained_w_nor_the_global_model():
    """Elsewhere the personal weights are the live parameters, which w and the next broadcast overwrite."""
    task, x, algorithm = small_task.task(), small_task.batch(5, 40).x, PFedMe(prox_weight=1.0)
    theta, sent = update(algorithm, [small_task.batch(0), small_task.batch(1)])
    kept = tree.clone(theta)
    server = algorithm.server_update(task, {"model": comparisons.model(1)}, {"model": sent}, Round(1, np.arange(1), 0))
    down = algorithm.publish(task, server, np.arange(4))
    for _, leaf in [*tree.leaves(sent), *tree.leaves(down["model"])]:
        leaf.zero_()  # whoever shares memory with what travels notices
    assert comparisons.same(theta, kept)
    scores = algorithm.predict(task, {"personal": theta}, {"model": comparisons.model(1)}, x)
    assert torch.equal(scores, task.predict(kept, x)) and algorithm.predicts_with == ()
    trained, _ = algorithm_1(
        small_task.to_numpy(comparisons.model(1)), [small_task.batch(0), small_task.batch(1)], 1.0, 0.09, 5
    )
    _, of_w = numpy_network.forward(trained, x.flatten(1).double().numpy())
    assert np.abs(of_w - scores.double().numpy()).max() > 1e-2


def test_training_replaces_the_personal_model():
    """Elsewhere it is never updated, and what is scored has the initial weights."""
    theta, _ = update(PFedMe(), [small_task.batch(0)])
    assert not comparisons.same(theta, comparisons.model(2)) and not comparisons.same(theta, small_task.task().init())


def test_without_a_minibatch_the_personal_model_stays():
    theta, sent = update(PFedMe(), [])
    assert comparisons.same(theta, comparisons.model(2)) and comparisons.same(sent, comparisons.model(1))


@pytest.mark.parametrize("beta", [0.25, 1.0, 2.0])
def test_the_server_mixes_the_plain_mean_in(beta):
    task, before, mean = small_task.task(), comparisons.model(1), comparisons.model(2)
    algorithm = PFedMe(server_mix=beta)
    after = algorithm.server_update(task, {"model": before}, {"model": mean}, Round(1, np.arange(2), 0))["model"]
    old, new = small_task.to_numpy(before), small_task.to_numpy(mean)
    small_task.assert_close(after, {k: (1 - beta) * old[k] + beta * new[k] for k in old})
    assert algorithm.uplink(task) == {"model": Mean(task.like("body", "head"), by="clients")}


def test_the_defaults_do_not_freeze_the_global_model():
    task, mean = small_task.task(), comparisons.model(2)
    after = PFedMe().server_update(task, {"model": comparisons.model(1)}, {"model": mean}, Round(1, np.arange(2), 0))
    assert comparisons.same(after["model"], mean)


def test_batch_norm_statistics_follow_theta_and_are_averaged_without_mixing():
    task = comparisons.with_batch_norm()
    algorithm = PFedMe(inner_steps=2, server_mix=2.0)
    server = algorithm.init_server(task)
    down = algorithm.publish(task, server, np.arange(4))
    data = small_task.data([small_task.batch(0), small_task.batch(1)], LR)
    state, up = algorithm.client_update(task, algorithm.init_client(task), down, data)
    stats = up["model"]["stats"]
    assert comparisons.same(state["personal"]["stats"], stats) and not comparisons.same(stats, down["model"]["stats"])
    after = algorithm.server_update(task, server, up, Round(1, np.arange(1), 0))
    assert comparisons.same(after["model"]["stats"], stats) and comparisons.same(server, algorithm.init_server(task))


def test_local_batch_norm_statistics_stay_with_the_personal_model():
    task = comparisons.with_batch_norm(bn="local")
    algorithm = PFedMe(inner_steps=1)
    client = algorithm.init_client(task)
    client["personal"]["stats"] = tree.map(lambda leaf: leaf + 1, client["personal"]["stats"])
    down = algorithm.publish(task, algorithm.init_server(task), np.arange(4))
    state, up = algorithm.client_update(task, client, down, small_task.data([small_task.batch(0)], LR))
    assert "stats" not in up["model"] and tree.differences(state, client) == []
    z = small_task.batch(0).x.flatten(1) @ down["model"]["body"]["weight"].mT
    torch.testing.assert_close(state["personal"]["stats"]["mean"], 0.9 * torch.ones(z.shape[1]) + 0.1 * z.mean(0))


@pytest.mark.parametrize("options", [{"personal_lr": 0.2}, {"prox_weight": 40.0, "personal_lr": 0.01}])
def test_steps_that_overshoot_further_every_time_are_refused(options):
    with pytest.raises(ConfigError, match="must be below 2"):
        PFedMe(**options).check(small_task.task(lr=LR), 2)
    PFedMe().check(small_task.task(lr=LR), 2)


def test_padding_alone_changes_neither_theta_nor_w():
    comparisons.check_padding(PFedMe(), {"personal": comparisons.model(2)}, {"model": comparisons.model(1)}, ("train",))
