"""`pflmpi probe`: CKA between the layers of the clients' models on a batch of samples."""

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import resnet18

import newcomer
import quick_run
import small_task
from every_algorithm import every_algorithm
from model_helpers import images, start
from pflmpi import tree
from pflmpi.analysis.plots import Curves, Matrices, Missing
from pflmpi.analysis.probe import _compute_gram_matrix, compute_cka, probe_samples, record_activations, u_center
from pflmpi.analysis.run import open_run
from pflmpi.analysis.series import clients, similarity
from pflmpi.cli import main
from pflmpi.config import load as configuration
from pflmpi.experiment.restore import reopen
from pflmpi.models import MODELS
from pflmpi.module_names import module_names
from pflmpi.store import config_file, probe_file, verify

# One algorithm for each kind of model that clients predict with.
CASES = {
    type(configuration.parse(quick_run.settings(sections)).algorithm.personal(small_task.task())).__name__: sections
    for sections in every_algorithm().values()
}


def probe(run, *more):
    return main(["probe", str(run), "--samples", "40", *more])


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Clients that have only ever trained alone, from starts of their own; three checkpoints."""
    folder = tmp_path_factory.mktemp("local") / "run"
    training = {"init": "per_client", "participation": 1.0}
    quick_run.run(quick_run.settings(algorithm={"name": "local"}, training=training, checkpoint={"keep": 3}), folder)
    return folder


def hsic(first, second):
    """HSIC_1 as Song et al. print it: eq. 5, with traces and sums over matrices without diagonals."""
    n = len(first)
    k, m = (gram - np.diag(np.diag(gram)) for gram in (first, second))
    ones = np.ones(n)
    return float(
        np.trace(k @ m)
        + (ones @ k @ ones) * (ones @ m @ ones) / ((n - 1) * (n - 2))
        - 2 / (n - 2) * (ones @ k @ m @ ones)
    ) / (n * (n - 3))


def test_cka_is_what_the_unbiased_hsic_of_the_paper_makes_it():
    rng = np.random.default_rng(0)
    layers = [rng.normal(size=(9, width)) for width in (3, 5, 20)]
    layers.append(layers[0] @ rng.normal(size=(3, 4)))
    grams = [layer @ layer.T for layer in layers]
    expected = [[hsic(a, b) / np.sqrt(hsic(a, a) * hsic(b, b)) for b in grams] for a in grams]
    cka = compute_cka(np.stack([u_center(gram) for gram in grams]))
    assert cka == pytest.approx(np.array(expected), abs=1e-12)


def test_cka_does_not_see_rotations_scales_and_shifts():
    rng = np.random.default_rng(1)
    layer = rng.normal(size=(12, 6))
    turned = 3 * layer @ np.linalg.qr(rng.normal(size=(6, 6)))[0] + 5
    assert compute_cka(np.stack([u_center(out @ out.T) for out in (layer, turned)])) == pytest.approx(np.ones((2, 2)))


def test_wide_unrelated_layers_are_not_called_alike():
    rng = np.random.default_rng(2)
    layers = [rng.normal(size=(30, 3000)) for _ in range(2)]
    assert abs(compute_cka(np.stack([u_center(layer @ layer.T) for layer in layers]))[0, 1]) < 0.1
    biased = [(layer - layer.mean(0)) @ (layer - layer.mean(0)).T for layer in layers]
    assert np.sum(biased[0] * biased[1]) / np.sqrt(np.prod([np.sum(gram**2) for gram in biased])) > 0.9


def test_a_layer_whose_output_is_constant_has_no_cka():
    constant, random = torch.full((9, 3), 0.1), torch.from_numpy(np.random.default_rng(3).normal(size=(9, 3)))
    cka = compute_cka(np.stack([u_center(_compute_gram_matrix(output)) for output in (constant, random)]))
    assert np.isnan(cka[0]).all() and cka[1, 1] == pytest.approx(1)
    assert not u_center(np.full((9, 9), 0.1)).any()


def outputs(name, options, shape):
    architecture = MODELS[name](**options).bind(shape, 10)
    model, x = start(architecture), images(architecture, 3)
    seen = {}
    record_activations(architecture, model, x, lambda layer, output: seen.setdefault(layer, output.clone()))
    return architecture, model, x, seen


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_layer_is_seen_once_in_order(name):
    architecture, model, x, seen = outputs(name, {}, (3, 32, 32))
    assert tuple(seen) == architecture.layers
    with torch.no_grad():
        scores = architecture.logits(model["head"], architecture.features(model, x, False))
    assert torch.equal(seen["head"], scores)


def test_the_outputs_of_a_residual_network_are_those_of_torchvisions_modules():
    _, model, x, seen = outputs("resnet18", {"stem": "imagenet"}, (3, 64, 64))
    module = resnet18(num_classes=10).eval()
    called = module_names(path for path, _ in tree.leaves(model))
    module.load_state_dict({called[path]: weight for path, weight in tree.leaves(model)}, strict=False)
    expected = {}
    for path, part in module.named_modules():
        if isinstance(part, nn.Conv2d | nn.BatchNorm2d | nn.Linear):
            part.register_forward_hook(lambda _, __, output, path=path: expected.update({path: output.clone()}))
    with torch.no_grad():
        module(x)
    computed = {layer.removeprefix("body/").replace("/", ".").replace("head", "fc"): out for layer, out in seen.items()}
    assert computed.keys() == expected.keys()
    for path in expected:
        torch.testing.assert_close(computed[path], expected[path], rtol=1e-4, atol=1e-5)


class Attentive(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder, self.fc = nn.TransformerEncoderLayer(8, 2, 6, 0, batch_first=True), nn.Linear(8, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.encoder(self.attention(x, x, x)[0])[:, 0])


def test_layers_beside_attention_are_seen_and_those_in_it_left_out():
    *_, seen = outputs(f"{__file__}:Attentive", {"head": "fc"}, (5, 8))
    names = ("norm1", "linear1", "linear2", "norm2")
    assert [*seen] == [*(f"body/encoder/{name}" for name in names), "head"]
    assert [output.shape for output in seen.values()] == [(3, 5, width) for width in (8, 6, 8, 8)] + [(3, 10)]


@pytest.mark.parametrize("case", CASES)
def test_clients_with_every_kind_of_model_can_be_compared(case, tmp_path):
    quick_run.run(quick_run.settings(CASES[case], training={"rounds": 2}), tmp_path / "run")
    assert probe(tmp_path / "run") == 0
    stored = probe_file.read(tmp_path / "run", 2)
    assert list(stored.layers) == ["body/fc1", "head"]
    for layer in stored.layers.values():
        assert layer.clients.tolist() == list(range(7))
        assert np.diag(layer.cka) == pytest.approx(np.ones(7))
        assert np.array_equal(layer.cka, layer.cka.T) and (abs(layer.cka) <= 1 + 1e-6).all()


def test_clients_of_an_algorithm_that_the_package_does_not_know_can_be_compared(tmp_path):
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        section = {**newcomer.registered(patch), "one_model": False}
        quick_run.run(quick_run.settings(algorithm=section, training={"rounds": 1}), run)
        assert probe(run, "--clients", "3") == 0
    layers = probe_file.read(run, 1).layers
    assert list(layers) == ["body/fc1", "head"] and layers["head"].clients.tolist() == [0, 3, 6]


def test_clients_with_one_model_are_alike_and_those_that_trained_alone_are_not(local, tmp_path):
    quick_run.run(quick_run.settings(algorithm={"name": "fedavg"}), tmp_path / "one")
    assert probe(tmp_path / "one") == probe(local) == 0
    alike, apart = (probe_file.read(run, 3).layers["head"].cka for run in (tmp_path / "one", local))
    assert alike == pytest.approx(np.ones((7, 7)))
    assert apart[np.triu_indices(7, 1)].max() < 0.9


def test_the_figures_are_those_of_the_definition_on_the_same_samples(local):
    assert probe(local, "--round", "2", "--clients", "3") == 0
    stored = probe_file.read(local, 2)
    made = reopen(local, [], torch.device("cpu"))
    samples = probe_samples(made.federation, 40, 3)
    assert stored.samples == len(samples) == 40
    assert np.isin(samples, np.concatenate(made.federation.test)).all()
    x = made.tasks[0].prepare(torch.tensor(made.federation.dataset.images[samples])).flatten(1).double().numpy()
    state = open_run(local).round(2).clients
    grams = []
    for client in (0, 3, 6):
        weight, bias = (state[f"model/body/fc1/{name}"][client].astype(np.float64) for name in ("weight", "bias"))
        z = np.maximum(x @ weight.T + bias, 0)
        head, shift = (state[f"model/head/{name}"][client].astype(np.float64) for name in ("weight", "bias"))
        grams.append((z @ head.T + shift) @ (z @ head.T + shift).T)
    expected = [[hsic(a, b) / np.sqrt(hsic(a, a) * hsic(b, b)) for b in grams] for a in grams]
    assert stored.layers["head"].clients.tolist() == [0, 3, 6]
    assert stored.layers["head"].cka == pytest.approx(np.array(expected), abs=1e-4)


def test_unlike_models_are_compared_where_they_have_the_same_layer(tmp_path):
    models = [{"name": "cnn", "hidden": 12, "kernel": 3, "padding": 1}, {"name": "mlp", "hidden": 12}]
    raw = {**quick_run.settings(algorithm={"name": "fedproto"}, training={"rounds": 1}), "model": models}
    quick_run.run(raw, tmp_path / "run")
    assert probe(tmp_path / "run") == 0
    layers = probe_file.read(tmp_path / "run", 1).layers
    assert layers["body/conv1"].clients.tolist() == [0, 2, 4, 6]
    assert layers["body/fc1"].clients.tolist() == layers["head"].clients.tolist() == list(range(7))
    assert similarity.plot_cka(open_run(tmp_path / "run"))


def test_a_report_draws_the_newest_probe_and_all_rounds(local):
    for number in (2, 3):
        assert probe(local, "--round", str(number)) == 0
    pairs, curves = similarity.plot_cka(open_run(local))
    assert isinstance(pairs, Matrices) and isinstance(curves, Curves)
    newest = probe_file.read(local, 3)
    assert [panel.title for panel in pairs.panels] == list(newest.layers) == list(curves.x_names)
    assert np.array_equal(pairs.panels[1].values, newest.layers["head"].cka)
    assert [curve.label for curve in curves.curves] == ["round 2", "round 3"]
    upper = newest.layers["head"].cka[np.triu_indices(7, 1)]
    last = curves.curves[1]
    assert last.low is not None and last.high is not None and curves.curves[0].low is None
    quantiles = [last.low[1], last.y[1], last.high[1]]
    assert quantiles == pytest.approx([np.quantile(upper, 0.05), upper.mean(), np.quantile(upper, 0.95)])
    assert main(["inspect", str(local), "--verify"]) == 0


def test_a_probe_says_which_classes_the_models_of_all_clients_take_for_which(local):
    assert probe(local, "--clients", "2") == 0
    checkpoint = open_run(local).round()
    confusion = probe_file.read(local, checkpoint.number).confusion
    for name, of_class in (("hits", np.diag(confusion)), ("predicted", confusion.sum(0))):
        assert np.array_equal(checkpoint.metric(name).sum(0), of_class), name
    assert np.array_equal(confusion.sum(1), open_run(local).counts.test.sum(0))
    plot = clients.plot_confusion(open_run(local))
    assert plot.panels[0].values == pytest.approx(100 * confusion / confusion.sum(1, keepdims=True), nan_ok=True)
    assert "confusion" in open_run(local).figures.all()


def test_without_classes_a_probe_has_no_confusion_matrix(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    np.savez(tmp_path / "numbers.npz", x=x, y=x.sum(1))
    raw = quick_run.settings(training={"rounds": 1}, algorithm={"name": "local"}) | {
        "data": {"path": str(tmp_path / "numbers.npz"), "task": "regression"},
        "partition": {"name": "iid", "clients": 3},
        "model": {"name": "mlp", "hidden": 4},
    }
    quick_run.run(raw, tmp_path / "run")
    assert probe(tmp_path / "run", "--samples", "8") == 0
    assert probe_file.read(tmp_path / "run", 1).confusion is None
    assert isinstance(clients.plot_confusion(open_run(tmp_path / "run")), Missing)


def test_without_a_probe_the_report_says_how_to_make_one(tmp_path):
    quick_run.run(quick_run.settings(training={"rounds": 1}), tmp_path / "run")
    (missing,) = similarity.plot_cka(open_run(tmp_path / "run"))
    assert isinstance(missing, Missing) and "`pflmpi probe RUN`" in missing.why


def test_a_damaged_probe_is_named_and_the_rest_is_still_reported(tmp_path, capfd):
    run = tmp_path / "run"
    quick_run.run(quick_run.settings(training={"rounds": 1}), run)
    assert probe(run) == 0
    path = probe_file.path(run, 1)
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    assert main(["inspect", str(run), "--verify"]) == 2
    assert main(["report", str(run), "--out", str(tmp_path / "report")]) == 1
    stderr = capfd.readouterr().err
    assert f"{path} is damaged" in stderr and f"pflmpi probe {run} --round 1" in stderr
    assert (tmp_path / "report/figures/01-fedgmh/layer_cosines.csv").exists()
    assert probe(run) == 0 and main(["inspect", str(run), "--verify"]) == 0


def test_other_data_than_the_run_had_is_refused(tmp_path, capfd, monkeypatch):
    run = tmp_path / "run"
    quick_run.run(quick_run.settings(training={"rounds": 1}), run)
    recorded = open_run(run).config["recorded"]["data"]
    text, _, _ = (run / "config.yaml").read_text().rpartition("# CRC-32")
    config_file.write(run, text.replace(recorded, "f" * len(recorded)))
    monkeypatch.setattr(verify, "verify_newest_attributes", lambda run: None)  # which has the other hash
    assert probe(run) == 2
    assert "the data has changed" in capfd.readouterr().err
