"""FedFCD: the fused and aligned losses, who moves when, the server's rules, the ablations."""

import dataclasses

import numpy as np
import pytest
import torch

import comparisons
import numpy_network
import quick_run
import small_task
from pflmpi import tree
from pflmpi.algorithms.base import Round
from pflmpi.algorithms.fedfcd import FedFCD
from pflmpi.algorithms.local_only import Local
from pflmpi.algorithms.prototypes import train_head
from pflmpi.errors import ConfigError
from pflmpi.learning.training import Pass
from pflmpi.store import run_folder

BODY, HEAD = ("W1", "b1"), ("W2", "b2")
FEATURES, CLASSES = small_task.FEATURES, small_task.CLASSES


def received(known=(True, True, True)):
    means = torch.from_numpy(np.random.default_rng(4).normal(size=(CLASSES, FEATURES))).float()
    return {"head": comparisons.model(2)["head"], "class_means": {"mean": means, "known": torch.tensor(known)}}


def data_of(passes, lr=0.1):
    return dataclasses.replace(
        small_task.data([batch for batches in passes.values() for batch in batches], lr), passes=passes
    )


def slopes(w, down, batch, weight=0.0):
    """Gradients of CE(h_g(z) + h_i(z)) + weight * mean 1/d ||z - C_y||^2 over samples whose class has a mean."""
    x, y = small_task.flat(batch)
    mean, known = (down["class_means"][name].double().numpy() for name in ("mean", "known"))
    z, _ = numpy_network.forward(w, x)
    pull = weight * 2 * (z - mean[y]) / (FEATURES * len(y)) * known[y][:, None]
    head = {"W2": down["head"]["weight"].double().numpy(), "b2": down["head"]["bias"].double().numpy()}
    # A sum of logits is the logit of the summed heads, and has the same derivative by either.
    return numpy_network.gradients({**w, **{name: w[name] + head[name] for name in HEAD}}, x, y, pull)


def descend(w, slope, names, lr):
    return {name: w[name] - lr * slope[name] if name in names else w[name] for name in w}


def test_body_and_head_take_turns_of_an_epoch_each():
    task = small_task.task(epochs=2, lr=0.5)
    algorithm, down = FedFCD(align_weight=0.7, body_lr=0.2, head_lr=0.3), received()
    names = ["body/1", "head/1", "body/2", "head/2"]
    assert dict(algorithm.passes(task, 1)) == dict.fromkeys(names, Pass(epochs=1))
    passes = {name: [small_task.batch(2 * i), small_task.batch(2 * i + 1)] for i, name in enumerate(names)}
    state, _ = algorithm.client_update(task, {"model": comparisons.model(1)}, down, data_of(passes))

    w = small_task.to_numpy(comparisons.model(1))
    for name in names:
        for batch in passes[name]:
            if name.startswith("body"):
                w = descend(w, slopes(w, down, batch, 0.7), BODY, 0.2)
            else:
                w = descend(w, slopes(w, down, batch), HEAD, 0.3)
    small_task.assert_close(state["model"], w)


def test_body_and_head_take_turns_on_every_batch():
    task, down, batches = small_task.task(), received(), [small_task.batch(0), small_task.batch(1)]
    algorithm = FedFCD(align_weight=0.7, body_lr=0.2, head_lr=0.3, alternation="batch")
    assert dict(algorithm.passes(task, 1)) == {"train": Pass()}
    state, _ = algorithm.client_update(task, {"model": comparisons.model(1)}, down, data_of({"train": batches}))
    w = small_task.to_numpy(comparisons.model(1))
    for batch in batches:
        w = descend(w, slopes(w, down, batch, 0.7), BODY, 0.2)
        w = descend(w, slopes(w, down, batch), HEAD, 0.3)
    small_task.assert_close(state["model"], w)


def test_without_hierarchy_body_and_head_step_together():
    task, down, batches = small_task.task(lr=0.2), received(), [small_task.batch(0), small_task.batch(1)]
    algorithm = FedFCD(align_weight=0.7, variant="without_hierarchy")
    assert dict(algorithm.passes(task, 1)) == {"train": Pass()}
    state, _ = algorithm.client_update(task, {"model": comparisons.model(1)}, down, data_of({"train": batches}))
    w = small_task.to_numpy(comparisons.model(1))
    for batch in batches:
        w = descend(w, slopes(w, down, batch, 0.7), BODY + HEAD, 0.2)
    small_task.assert_close(state["model"], w)


def test_without_fusion_the_personal_logits_train_and_predict_alone():
    task, down, batch = small_task.task(), received(), small_task.batch(0)
    algorithm = FedFCD(align_weight=0.7, variant="without_fusion")
    passes = {"body/1": [batch], "head/1": [batch]}
    state, _ = algorithm.client_update(task, {"model": comparisons.model(1)}, down, data_of(passes))
    alone = {**down, "head": tree.map(torch.zeros_like, down["head"])}
    w = small_task.to_numpy(comparisons.model(1))
    w = descend(w, slopes(w, alone, batch, 0.7), BODY, 0.01)
    small_task.assert_close(state["model"], descend(w, slopes(w, alone, batch), HEAD, 0.01))
    assert torch.equal(algorithm.predict(task, state, down, batch.x), task.predict(state["model"], batch.x))


def test_samples_of_a_class_without_a_mean_are_not_aligned():
    task, down, batch = small_task.task(lr=0.2), received((False, True, False)), small_task.batch(0)
    assert set(batch.y.tolist()) == {0, 1, 2}
    passes = {"body/1": [batch], "head/1": []}
    state, _ = FedFCD(align_weight=5).client_update(task, {"model": comparisons.model(1)}, down, data_of(passes))
    w = small_task.to_numpy(comparisons.model(1))
    small_task.assert_close(state["model"], descend(w, slopes(w, down, batch, 5), BODY, 0.2))


def test_the_sum_of_both_heads_logits_predicts():
    task, down, x = small_task.task(), received(), small_task.batch(3).x
    w = small_task.to_numpy(comparisons.model(1))
    z, own = numpy_network.forward(w, x.flatten(1).double().numpy())
    global_scores = z @ down["head"]["weight"].double().numpy().T + down["head"]["bias"].double().numpy()
    scores = FedFCD().predict(task, {"model": comparisons.model(1)}, down, x)
    np.testing.assert_allclose(scores, own + global_scores, atol=1e-6)


def test_clients_upload_the_class_means_of_their_body_also_before_the_first_round():
    task, down, batches = small_task.task(), received(), [small_task.batch(0), small_task.batch(1)]
    data = data_of({"body/1": batches, "head/1": batches})
    client = {"model": comparisons.model(1)}
    state, up = FedFCD(body_lr=0.3).client_update(task, client, down, data)
    before = FedFCD().introduce(task, client, dataclasses.replace(data, passes={}))
    x, y = (np.concatenate(parts) for parts in zip(*(small_task.flat(batch) for batch in data.train), strict=True))
    for message, model in ((up, state["model"]), (before, client["model"])):
        z, _ = numpy_network.forward(small_task.to_numpy(model), x)
        assert message["means"]["counts"].tolist() == np.bincount(y, minlength=CLASSES).tolist()
        for label in np.unique(y):
            np.testing.assert_allclose(message["means"]["means"][label], z[y == label].mean(0), atol=1e-6)


@pytest.mark.parametrize("server_batch_size, pairs", [(None, 3), (2, 2)])
def test_the_server_trains_its_head_on_the_pairs_and_combines_the_means(server_batch_size, pairs):
    task = small_task.task(batch_size=3)
    means = torch.from_numpy(np.random.default_rng(0).normal(size=(4, FEATURES))).float()
    labels, counts = torch.tensor([0, 2, 0, 2], dtype=torch.int32), torch.tensor([1, 4, 3, 4], dtype=torch.int32)
    up = {"means": {"labels": labels, "counts": counts, "means": means, "clients": torch.tensor([1, 1, 3, 3])}}
    down = received((False, True, False))
    server = {"head": down["head"], "means": down["class_means"]["mean"], "known": down["class_means"]["known"]}
    expected = {"samples": means[0] / 4 + means[2] * 3 / 4, "as_printed": means[0] / 8 + means[2] * 3 / 8}
    for weighting, mean in expected.items():
        algorithm = FedFCD(
            global_head_lr=0.4, server_epochs=2, server_batch_size=server_batch_size, class_mean_weighting=weighting
        )
        round = Round(3, np.array([1, 3]), 7)
        new = algorithm.server_update(task, server, up, round)
        rng = round.stream("server head")
        head = train_head(server["head"], up["means"], rng, lr=0.4, epochs=2, batch_size=pairs)
        assert all(torch.equal(new["head"][name], head[name]) for name in ("weight", "bias"))
        torch.testing.assert_close(new["means"][0], mean)
        assert torch.equal(new["means"][1], server["means"][1]), "a class without uploads keeps its mean"
        assert new["known"].tolist() == [True, True, True]
        published = algorithm.publish(task, new, np.arange(4))
        assert published["class_means"] == {"mean": new["means"], "known": new["known"]}


def test_without_alignment_fusion_and_hierarchy_it_is_local():
    """A global head of zeros adds nothing to the decision."""
    task, data = small_task.task(), small_task.data([small_task.batch(0), small_task.batch(1)], lr=0.01)
    down = received()
    down["head"] = tree.map(torch.zeros_like, down["head"])
    algorithm = FedFCD(align_weight=0, variant="without_hierarchy")
    fedfcd_state, _ = algorithm.client_update(task, algorithm.init_client(task), down, data)
    local_state, _ = Local().client_update(task, Local().init_client(task), {}, data)
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(tree.leaves(fedfcd_state), tree.leaves(local_state), strict=True)
    )


def test_learning_rates_are_those_of_training_unless_given_and_decay_with_it():
    task = small_task.task(lr=0.4)
    assert FedFCD().learning_rates(task, 0.25) == (0.1, 0.1)
    assert FedFCD(body_lr=0.8).learning_rates(task, 0.25) == (0.2, 0.1)
    assert FedFCD(head_lr=0.8).learning_rates(task, 0.25) == (0.1, 0.2)
    batch, down = small_task.batch(0), received()
    data = dataclasses.replace(data_of({"body/1": [batch], "head/1": []}), round=3, decay=0.25)
    state, _ = FedFCD(align_weight=0, body_lr=0.8).client_update(task, {"model": comparisons.model(1)}, down, data)
    w = small_task.to_numpy(comparisons.model(1))
    small_task.assert_close(state["model"], descend(w, slopes(w, down, batch), BODY, 0.2))


def test_with_steps_configured_a_round_has_one_turn_of_that_many_steps():
    task = small_task.task(steps=7, epochs=3)
    assert dict(FedFCD().passes(task, 1)) == {"body/1": Pass(), "head/1": Pass()}
    assert task.training.num_steps(100, Pass()) == 7
    assert dict(FedFCD().passes(small_task.task(epochs=0), 1)) == {}


def test_two_learning_rates_in_one_step_are_refused():
    task = small_task.task(lr=0.1)
    with pytest.raises(ConfigError, match=r"body_lr is 0\.1 and head_lr 0\.2; give both the same value"):
        FedFCD(variant="without_hierarchy", head_lr=0.2).check(task, 4)
    FedFCD(variant="without_hierarchy", body_lr=0.2, head_lr=0.2).check(task, 4)
    FedFCD(head_lr=0.2).check(task, 4)


def test_only_the_means_of_held_classes_come_down():
    task = small_task.task()
    down = sum(kind.client_bytes(2) for kind in FedFCD().downlink(task).values())
    assert down == 4 * CLASSES * (FEATURES + 1) + 2 * (4 * FEATURES + 1)
    assert FedFCD().uplink(task)["means"].client_bytes(2) == 2 * (4 * FEATURES + 8)


def test_every_class_has_a_mean_and_the_global_head_has_learnt_before_the_first_round(tmp_path):
    quick_run.run(quick_run.settings(algorithm={"name": "fedfcd"}, training={"rounds": 1}), tmp_path / "run")
    server = run_folder.read_server(tmp_path / "run", 0)
    assert server["known"].all() and (np.abs(server["means"]).max(1) > 0).all()
    initial = run_folder.read_clients(tmp_path / "run", 0, np.arange(7))
    own = next(arrays["model/head/weight"] for _, arrays in initial.values())
    assert not np.array_equal(server["head/weight"], own[0]), "clients' heads are as drawn, which the server's was too"
