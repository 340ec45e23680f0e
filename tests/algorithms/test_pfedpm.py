"""pFedPM: the mixed means, both losses from their equations, the relation module, and what travels."""

import numpy as np
import pytest
import torch

import comparisons
import numeric_gradients
import numpy_network
import quick_run
import small_task
from comparisons import data_of
from pflmpi import tree
from pflmpi.algorithms.local_only import Local
from pflmpi.algorithms.pfedpm import PFedPM, init_relation, relation_scores
from pflmpi.algorithms.prototypes import one_hot
from pflmpi.learning.client import Batch, ClientData
from pflmpi.learning.task import Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.messages.kinds import OwnClasses, Shared
from pflmpi.models import MODELS
from pflmpi.rng import stream

LR = 0.1
K, D = small_task.CLASSES, small_task.FEATURES
LABELS = torch.tensor([0, 0, 0, 1, 1, 2])


def batch(seed):
    return Batch(small_task.batch(seed, len(LABELS)).x, LABELS)


def class_means(seed, *known):
    """Means of the known classes and zeros for the others, as they are kept and travel."""
    flags = torch.tensor(known)
    means = torch.from_numpy(np.random.default_rng(seed).uniform(0, 2, (K, D)).astype(np.float32))
    return {"means": means * flags.unsqueeze(-1), "known": flags}


NOTHING = class_means(0, False, False, False)


def client_of(algorithm, task, own):
    return {**algorithm.init_client(task), "own": own}


def pull(z, mixed, known, algorithm):
    """The gradient by z of sum_j b_j/b l(M_j, mean of z over class j), class by class."""
    gradient = np.zeros_like(z)
    for j in range(K):
        mask = LABELS.numpy() == j
        gap = z[mask].mean(0) - mixed[j]
        length = np.sqrt((gap**2).sum() + algorithm.norm_epsilon)
        slope = 2 * gap / D if algorithm.distance == "mse" else gap / length
        gradient[mask] += known[j] * mask.sum() / len(z) * slope / mask.sum()
    return gradient


def trained_by_hand(w, minibatch, mixed, known, algorithm):
    x, y = small_task.flat(minibatch)
    z, _ = numpy_network.forward(w, x)
    slopes = numpy_network.gradients(w, x, y, algorithm.prototype_weight * pull(z, mixed, known, algorithm))
    for name in w:
        w[name] = w[name] - LR * slopes[name]


def test_means_are_mixed_where_a_client_has_its_own():
    own, everyone = class_means(1, True, False, True), class_means(2, True, True, True)
    mixed = PFedPM(own_weight=0.3).mix(own, everyone)
    for j, expected in ((0, 0.3 * own["means"][0] + 0.7 * everyone["means"][0]), (1, everyone["means"][1])):
        np.testing.assert_allclose(mixed[j], expected, atol=1e-6)
    assert torch.equal(PFedPM(own_weight=0).mix(own, everyone), everyone["means"])
    only_own = PFedPM(own_weight=1).mix(own, everyone)
    assert torch.equal(only_own, torch.where(own["known"].unsqueeze(-1), own["means"], everyone["means"]))


@pytest.mark.parametrize("options", [{"distance": "l2"}, {"distance": "mse"}, {"norm_epsilon": 0.5}], ids=str)
def test_the_model_is_drawn_from_the_batch_means_to_the_mixed_means(options):
    task, minibatch = small_task.task(), batch(0)
    algorithm = PFedPM(own_weight=0.4, prototype_weight=0.7, **options)
    own, everyone = class_means(1, True, False, False), class_means(2, True, True, False)
    client = client_of(algorithm, task, own)
    state, up = algorithm.client_update(task, client, {"class_means": everyone}, small_task.data([minibatch]))

    mixed, c = everyone["means"].double().numpy(), own["means"].double().numpy()
    mixed[0] = 0.4 * c[0] + 0.6 * mixed[0]
    w = small_task.to_numpy(task.init())
    trained_by_hand(w, minibatch, mixed, np.array([1, 1, 0]), algorithm)
    small_task.assert_close(state["model"], w)

    z, _ = numpy_network.forward(w, small_task.flat(minibatch)[0])
    expected = np.stack([z[LABELS.numpy() == j].mean(0) for j in range(K)])
    np.testing.assert_allclose(up["means"]["means"], expected, atol=1e-6)
    assert up["means"]["counts"].tolist() == [3, 2, 1]
    assert torch.equal(state["own"]["means"], up["means"]["means"]) and state["own"]["known"].all()


def test_own_means_are_known_for_the_classes_that_a_client_holds():
    task = small_task.task()
    data = small_task.data([Batch(batch(0).x, LABELS.clamp(max=1))])
    state, _ = PFedPM().client_update(task, PFedPM().init_client(task), {"class_means": NOTHING}, data)
    assert state["own"]["known"].tolist() == [True, True, False] and not state["own"]["means"][2].any()


@pytest.mark.parametrize(
    "algorithm, received",
    [(PFedPM(), NOTHING), (PFedPM(prototype_weight=0), class_means(2, True, True, True))],
    ids=["before there are global means", "without prototype_weight"],
)
def test_without_the_second_term_it_is_local(algorithm, received):
    task, data = small_task.task(momentum=0.5), small_task.data([batch(0), batch(1)])
    client = client_of(algorithm, task, class_means(1, True, True, True))
    pfedpm_state, _ = algorithm.client_update(task, client, {"class_means": received}, data)
    local_state, _ = Local().client_update(task, {"model": task.init()}, {}, data)
    assert comparisons.same(pfedpm_state["model"], local_state["model"])


def test_a_norm_of_zero_has_no_gradient_and_no_nan():
    task = small_task.task()
    # One sample and numbers of few bits, so that no order of sums rounds: its class mean is the feature exactly.
    minibatch = Batch((batch(0).x[:1] * 4).round(), LABELS[:1])
    model = tree.map(lambda entry: (entry * 32).round() / 32, task.init())
    at = {"means": task.features(model, minibatch.x).expand(K, D).clone(), "known": torch.tensor([True, False, False])}
    client, data = {**PFedPM().init_client(task), "model": model}, small_task.data([minibatch])
    alone, _ = Local().client_update(task, {"model": model}, {}, data)
    state, _ = PFedPM().client_update(task, client, {"class_means": at}, data)
    lanes = in_lanes(PFedPM(), task, client, at, minibatch.x[None, None], minibatch.y[None, None], torch.ones(1, 1, 1))
    for path, expected in tree.leaves(alone["model"]):
        for leaf in (tree.at(state["model"], path), tree.at(lanes["model"], path)[0]):
            np.testing.assert_allclose(leaf, expected, atol=1e-6, err_msg=path)


def test_a_mean_that_misses_its_aim_by_rounding_pulls_nowhere_with_an_epsilon():
    task, minibatch = small_task.task(), batch(0)
    share = one_hot(minibatch, K).mT / torch.bincount(LABELS, minlength=K).unsqueeze(-1)
    means = share @ task.features(task.init(), minibatch.x)
    down = {"class_means": {"means": means * (1 + 1e-6), "known": torch.tensor([True] * K)}}
    alone, _ = Local().client_update(task, {"model": task.init()}, {}, small_task.data([minibatch]))

    def moved(epsilon):
        algorithm = PFedPM(own_weight=0.0, norm_epsilon=epsilon)
        state, _ = algorithm.client_update(task, algorithm.init_client(task), down, small_task.data([minibatch]))
        leaves = [(leaf - tree.at(alone["model"], path)).abs().max() for path, leaf in tree.leaves(state["model"])]
        return float(max(leaves))

    assert moved(0.0) > 1e-2 and moved(1e-6) < 1e-3


def test_the_bounds_of_corollary_1_are_those_of_the_round():
    task, batches = small_task.task(), [batch(0), batch(1)]
    algorithm = PFedPM(own_weight=0.4, prototype_weight=0.7, bounds=True)
    own, everyone = class_means(1, True, True, False), class_means(2, True, True, True)
    client, down = client_of(algorithm, task, own), {"class_means": everyone}
    state, _ = algorithm.client_update(task, client, down, small_task.data(batches))

    mixed = algorithm.mix(own, everyone).double().numpy()
    w, slopes = small_task.to_numpy(task.init()), []
    for minibatch in batches:  # all at the first model
        x, y = small_task.flat(minibatch)
        slope = numpy_network.gradients(w, x, y, 0.7 * pull(numpy_network.forward(w, x)[0], mixed, [1] * K, algorithm))
        slopes.append(np.concatenate([slope[name].ravel() for name in sorted(slope)]))
    after = small_task.to_numpy(state["model"])
    body = np.sqrt(sum(((after[name] - w[name]) ** 2).sum() for name in ("W1", "b1")))
    moved = (state["own"]["means"] - own["means"]).double().numpy()[:2]  # the third was not known
    lipschitz = np.sqrt((moved**2).sum(1)).max() / body
    size = np.mean([np.sqrt((slope**2).sum()) for slope in slopes])
    weight = (np.mean(slopes, 0) ** 2).sum() / (lipschitz * 2 * size)
    bounds = {name: float(value) for name, value in state["bounds"].items()}
    assert bounds == pytest.approx({"weight": weight, "rate": 2 * (weight - 0.7), "known": 1.0}, rel=1e-4)

    plain, _ = PFedPM(own_weight=0.4, prototype_weight=0.7).client_update(task, client, down, small_task.data(batches))
    assert comparisons.same(plain["model"], state["model"]), "watching changes nothing"
    first, _ = algorithm.client_update(task, algorithm.init_client(task), down, small_task.data(batches))
    assert not first["bounds"]["known"]
    assert [*algorithm.diagnostics(task)] == ["weight_bound", "rate_bound", "class_means"]


def in_lanes(algorithm, task, client, received, x, y, weight):
    """The new states of lanes that differ in their data alone; x: [L, S, B, C, H, W], y and weight: [L, S, B]."""

    def update(client, x, y, weight):
        batches = [small_task.padded(x[step], y[step], weight[step]) for step in range(len(x))]
        counts = ((y.unsqueeze(-1) == torch.arange(K)) * weight.unsqueeze(-1)).sum((0, 1))
        data = ClientData({"train": batches}, batches, counts, LR, 2)
        return algorithm.client_update(task.replace(batched=True), client, {"class_means": received}, data)[0]

    return torch.func.vmap(update)(tree.stack([client] * len(x)), x, y, weight)


def test_padding_counts_in_neither_loss():
    task, algorithm = small_task.task(momentum=0.5, weight_decay=0.1), PFedPM(relation=True)
    client, received = client_of(algorithm, task, class_means(1, True, True, False)), class_means(2, True, True, True)
    lanes = [[batch(0), batch(1)], [Batch(batch(2).x[:4], LABELS[:4])]]
    x, y = torch.stack([batch(seed).x for seed in (0, 1, 2, 3)]), LABELS.expand(4, -1)
    weight = torch.tensor([[1.0] * 6, [1.0] * 6, [1.0] * 4 + [0.0] * 2, [0.0] * 6])
    states = in_lanes(
        algorithm, task, client, received, x.unflatten(0, (2, 2)), y.unflatten(0, (2, 2)), weight.unflatten(0, (2, 2))
    )
    for lane, batches in enumerate(lanes):
        alone, _ = algorithm.client_update(task, client, {"class_means": received}, small_task.data(batches))
        for path, expected in tree.leaves(alone):
            np.testing.assert_allclose(tree.at(states, path)[lane], expected, atol=1e-6, err_msg=path)


# The relation module pair by pair, and the gradient of its loss written out.


def windows(z, c):
    """The three neighbours of every place of the pair's two channels, [2, d, 3], zeros outside."""
    return np.lib.stride_tricks.sliding_window_view(np.pad(np.stack([z, c]), ((0, 0), (1, 1))), 3, axis=1)


def layers_by_hand(w, z, c):
    """The outputs of the convolution [8, d], of fc1 [64] (both after ReLU) and the score."""
    convolved = np.maximum(np.einsum("oik,itk->ot", w["conv/weight"], windows(z, c)) + w["conv/bias"][:, None], 0)
    hidden = np.maximum(w["fc1/weight"] @ convolved.ravel() + w["fc1/bias"], 0)
    return convolved, hidden, 1 / (1 + np.exp(-(w["fc2/weight"] @ hidden + w["fc2/bias"]).item()))


def scores_by_hand(w, z, c):
    """[B, K] for features [B, d] and class means [K, d]."""
    return np.array([[layers_by_hand(w, feature, mean)[2] for mean in c] for feature in z])


def gradients_by_hand(w, z, c, one_hot, known):
    """Of the mean over samples of the sum over known classes of (score - one_hot)^2."""
    total = {path: np.zeros_like(value) for path, value in w.items()}
    for s, j in np.ndindex(one_hot.shape):
        convolved, hidden, score = layers_by_hand(w, z[s], c[j])
        error = known[j] * 2 * (score - one_hot[s, j]) / len(z) * score * (1 - score)
        back_hidden = error * w["fc2/weight"][0] * (hidden > 0)
        back_convolved = (w["fc1/weight"].T @ back_hidden).reshape(convolved.shape) * (convolved > 0)
        for path, slope in {
            "fc2/weight": error * hidden[None],
            "fc2/bias": np.array([error]),
            "fc1/weight": np.outer(back_hidden, convolved.ravel()),
            "fc1/bias": back_hidden,
            "conv/weight": np.einsum("ot,itk->oik", back_convolved, windows(z[s], c[j])),
            "conv/bias": back_convolved.sum(1),
        }.items():
            total[path] += slope
    return total


def test_relation_scores_are_those_of_the_pairs_signals():
    weights = init_relation(np.random.default_rng(0), D)
    rng = np.random.default_rng(1)
    z, c = rng.normal(size=(4, D)), rng.normal(size=(K, D))
    scores = relation_scores(weights, torch.from_numpy(z).float(), torch.from_numpy(c).float())
    np.testing.assert_allclose(scores, scores_by_hand(numeric_gradients.weights(weights), z, c), atol=1e-6)


@pytest.mark.parametrize("known", [(True, True, True), (True, False, True)])
def test_the_relation_module_steps_after_the_model_on_every_batch(known):
    task, batches = small_task.task(), [batch(0), batch(1)]
    algorithm = PFedPM(own_weight=0.4, relation=True, relation_lr=0.2)
    received = class_means(2, *known)
    client = client_of(algorithm, task, NOTHING)
    state, _ = algorithm.client_update(task, client, {"class_means": received}, small_task.data(batches))

    mixed, mask = received["means"].double().numpy(), np.array(known, float)
    w, psi = small_task.to_numpy(task.init()), numeric_gradients.weights(client["relation"])
    for minibatch in batches:
        trained_by_hand(w, minibatch, mixed, mask, algorithm)
        z, _ = numpy_network.forward(w, small_task.flat(minibatch)[0])  # of the body after its step
        slopes = gradients_by_hand(psi, z, mixed, np.eye(K)[LABELS.numpy()], mask)
        psi = {path: psi[path] - 0.2 * slopes[path] for path in psi}
    small_task.assert_close(state["model"], w)
    for path, value in psi.items():
        np.testing.assert_allclose(tree.at(state["relation"], path), value, atol=2e-6, err_msg=path)
    assert torch.equal(state["mixed"]["means"], received["means"]) and state["mixed"]["known"].tolist() == list(known)


def test_the_relation_module_has_the_models_learning_rate_unless_given_and_it_decays():
    task, data = small_task.task(lr=0.05), data_of({}, decay=0.81)
    assert PFedPM().learning_rate(task, data) == pytest.approx(0.05 * 0.81)
    assert PFedPM(relation_lr=0.4).learning_rate(task, data) == pytest.approx(0.4 * 0.81)


def test_the_relation_module_changes_nothing_of_the_model_nor_its_statistics():
    task, data, received = (
        comparisons.with_batch_norm(momentum=0.5),
        small_task.data([batch(0), batch(1)]),
        class_means(2, True, True, True),
    )
    states = [
        algorithm.client_update(task, algorithm.init_client(task), {"class_means": received}, data)[0]
        for algorithm in (PFedPM(relation=True), PFedPM())
    ]
    assert comparisons.same(states[0]["model"], states[1]["model"]) and "relation" not in states[1]
    assert not comparisons.same(states[0]["model"]["stats"], task.init()["stats"])


@pytest.mark.parametrize("client", [0, 3])
@pytest.mark.parametrize("init", ["shared", "per_client"])
def test_all_clients_begin_with_one_relation_module_unless_each_draws_its_own(init, client):
    task = small_task.task(init=init)
    drawn = init_relation(stream(task.seed, 0, -1 if init == "shared" else client, "relation"), D)
    assert comparisons.same(PFedPM(relation=True).init_client(task.of_client(client))["relation"], drawn)


def test_the_relation_module_has_its_sizes_and_pytorchs_bounds():
    weights = dict(tree.leaves(init_relation(np.random.default_rng(0), 50)))
    shapes = {path: tuple(leaf.shape) for path, leaf in weights.items() if path.endswith("weight")}
    assert shapes == {"conv/weight": (8, 2, 3), "fc1/weight": (64, 8 * 50), "fc2/weight": (1, 64)}
    for path, fan_in in (("conv/weight", 6), ("conv/bias", 6), ("fc1/weight", 400), ("fc2/weight", 64)):
        assert 0.8 * fan_in**-0.5 < weights[path].abs().max() <= fan_in**-0.5, path


def test_prediction_by_relation_uses_the_mixed_means_of_the_last_round():
    task, algorithm, x = small_task.task(), PFedPM(relation=True), batch(5).x
    client = client_of(algorithm, task, class_means(1, True, True, False))
    model = client["model"]
    at_first = algorithm.predict(task, algorithm.init_client(task), {}, x)
    assert torch.equal(at_first, task.predict(model, x)), "never trained"
    incomplete = {**client, "mixed": class_means(3, True, False, True)}
    assert torch.equal(algorithm.predict(task, incomplete, {}, x), task.predict(model, x)), "class 1 has no mixed mean"

    mixed = class_means(3, True, True, False)
    scores = algorithm.predict(task, {**client, "mixed": mixed}, {}, x)
    z = task.features(model, x).double().numpy()
    psi = numeric_gradients.weights(client["relation"])
    expected = scores_by_hand(psi, z, mixed["means"].double().numpy())
    np.testing.assert_allclose(scores[:, :2], expected[:, :2], atol=1e-6)
    assert (scores[:, 2] == -torch.inf).all()


def test_all_classes_come_down_only_where_the_relation_module_needs_them():
    plain, related = (PFedPM(relation=on).downlink(small_task.task())["class_means"] for on in (False, True))
    assert type(plain) is OwnClasses and plain.client_bytes(2) == 2 * (4 * D + 1)
    assert type(related) is Shared and related.client_bytes(2) == K * (4 * D + 1)


def test_twenty_clients_with_four_classes_send_the_papers_four_thousand_parameters():
    task = Task(MODELS["protocnn"]().bind((1, 28, 28), 10), TrainingConfig(), 20, 0, (0.5,), (0.5,))
    label, count = 4, 4
    sent = PFedPM().uplink(task)["means"].client_bytes(4) - 4 * (label + count)
    assert 20 * sent / 4 == 20 * 4 * 50 == 4000


WIDTHS = [{"name": "protocnn", "channels": channels, "kernel": 3, "padding": 1} for channels in (18, 20, 22)]


def test_clients_may_have_unlike_models_with_features_of_one_width(tmp_path):
    raw = quick_run.settings(
        model=WIDTHS, algorithm={"name": "pfedpm", "relation": True}, training={"rounds": 2}, data={"limit": 200}
    )
    assert quick_run.run(raw, tmp_path / "1") == quick_run.run(raw, tmp_path / "3", 3)
