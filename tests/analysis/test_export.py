"""`pflmpi export`: what a client predicts with, as a file that a torch module loads and predicts the same with."""

import sys

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from torch import nn
from torchvision.models import resnet18

import exported
import newcomer
import quick_run
from every_algorithm import MESSAGE_KINDS, every_algorithm
from pflmpi import tree
from pflmpi.algorithms import ALGORITHMS
from pflmpi.algorithms.fedper import FedPer
from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.model import read_client_state_dict, to_module_names
from pflmpi.analysis.personal_module import PersonalModule
from pflmpi.analysis.run import open_run
from pflmpi.cli import main
from pflmpi.learning.client import ClientData
from pflmpi.learning.personal import Kept, Received
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.models import MODELS
from pflmpi.models.module import ModelModule
from pflmpi.store import run_folder
from pflmpi.tree import Tree, leaf, part


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    quick_run.run(quick_run.settings(), folder, ranks=2)
    return folder


def test_a_module_of_a_run_that_keeps_optimizers_predicts_as_its_client(tmp_path):
    training = {"rounds": 2, "momentum": 0.9, "keep_optimizer": True}
    quick_run.run(quick_run.settings(algorithm={"name": "ditto"}, training=training), tmp_path / "run")
    run = open_run(tmp_path / "run")
    right = [exported.right_of_samples(run, client) for client in range(7)]
    assert right == run.round().metrics["correct"].tolist()
    names = PersonalModule(None, None, {"train": {"half": torch.ones(2)}}, {}).state_dict()
    assert list(names) == ["client.train_.half_"], "a module has these as methods"


@pytest.mark.parametrize(
    "case, absent",
    [
        # Options that make it one model, where it is not one by default.
        ({"algorithm": {"name": "fedproto", "predict_with": "head"}}, "last_received"),
        ({"algorithm": {"name": "pfedafe", "adaptive": False}}, "last_received"),
        *(
            (section, "latest")
            for section in map(every_algorithm().get, MESSAGE_KINDS)
            if ALGORITHMS[section["algorithm"]["name"]].predicts_with
        ),
    ],
)
def test_the_exported_model_is_right_as_often_as_in_the_run(case, absent, tmp_path):
    """Those that take runs of their own; all others are checked in the runs of their conformance."""
    raw = quick_run.settings(case, evaluation={"absent": absent}, training={"rounds": 2})
    quick_run.run(raw, tmp_path / "run")
    exported.check_models(tmp_path / "run")


@pytest.mark.parametrize("absent", ["latest", "last_received"])
def test_an_algorithm_that_the_package_does_not_know_is_exported_too(absent, tmp_path):
    """From files alone: it is not registered any more, and its model has kept, shared and own parts."""
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        raw = quick_run.settings(algorithm=newcomer.registered(patch), evaluation={"absent": absent})
        quick_run.run(raw, run, ranks=2)
        made = exported.experiment(run)
    round = open_run(run).round()
    for client, right in enumerate(round.metrics["correct"].tolist()):
        file = tmp_path / f"{client}.npz"
        assert main(["export", str(run), "--client", str(client), "-o", str(file)]) == 0
        assert exported.correct(exported.module(made, load(file)), made, client) == right


def test_what_is_not_one_model_is_refused_with_the_reason_and_the_parts_to_choose(tmp_path, capfd):
    with pytest.MonkeyPatch.context() as patch:
        section = {**newcomer.registered(patch), "one_model": False}
        quick_run.run(quick_run.settings(algorithm=section, training={"rounds": 1}), tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--client", "1", "-o", str(tmp_path / "m.npz")]) == 2
    stderr = capfd.readouterr().err
    assert "a client of Newcomer predicts with what it likes best, which is not one model" in stderr
    assert "--leaf: classes, friends, mine, picked, seen, trust" in stderr and "--server" in stderr
    assert not (tmp_path / "m.npz").exists()


def test_a_model_that_is_adapted_before_a_test_is_in_no_checkpoint(tmp_path, capfd):
    class Adapting(FedPer):
        def adapt(self, task: Task, client: Tree, down: Messages, data: ClientData) -> Tree:
            head = part(client, "head")
            return {"head": {"weight": -leaf(head, "weight"), "bias": leaf(head, "bias")}}

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALGORITHMS._objects, "adapting", Adapting)
        quick_run.run(quick_run.settings(algorithm="adapting", training={"rounds": 1}), tmp_path / "run")
    words = ["export", str(tmp_path / "run"), "--client", "1", "-o", str(tmp_path / "m.npz")]
    assert main(words) == 2
    assert "predicts with a model that it adapts before a test, which is not one model" in capfd.readouterr().err
    assert main([*words, "--leaf", "head"]) == 0


def test_a_checkpoint_that_lacks_a_part_of_its_models_is_named(finished, tmp_path, monkeypatch, capfd):
    for model, complaint in (
        (Received("model"), "lacks what client 1 received: model"),
        (Kept("modell"), "describes models with 'modell', which client 1 does not keep"),
    ):
        monkeypatch.setattr(Checkpoint, "personal", model)
        assert main(["export", str(finished), "--client", "1", "-o", str(tmp_path / "m.npz")]) == 2
        assert f"{finished / 'round_00003.h5'} {complaint}" in capfd.readouterr().err


def test_unlike_clients_have_their_own_models(tmp_path):
    models = [{"name": "cnn", "hidden": 12, "kernel": 3, "padding": 1}, {"name": "mlp", "hidden": 12}]
    algorithm = {"name": "fedproto", "predict_with": "head"}
    quick_run.run(quick_run.settings(algorithm=algorithm, model=models), tmp_path / "run")
    round, made = open_run(tmp_path / "run").round(), exported.experiment(tmp_path / "run")
    for client, right in enumerate(round.metrics["correct"].tolist()):
        module = exported.module(made, read_client_state_dict(round, client), client)
        assert exported.correct(module, made, client) == right


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_names_are_those_of_the_module(name):
    architecture = MODELS[name]().bind((1, 28, 28), 10)
    weights = {path: value.numpy() for path, value in tree.leaves(architecture.init(np.random.default_rng(5)))}
    module = ModelModule(architecture)
    module.load_state_dict(exported.tensors(to_module_names(weights)), strict=True)
    images = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    model = architecture.init(np.random.default_rng(5))
    features = architecture.features(model, images, training=False)
    with torch.no_grad():
        assert torch.equal(module.eval()(images), architecture.logits(tree.part(model, "head"), features))


@pytest.mark.parametrize("hidden, bn", [(None, "average"), (20, "local")])
def test_a_residual_network_loads_into_torchvisions(bn, hidden, tmp_path):
    raw = quick_run.settings(
        data={"name": "digits", "limit": 120},
        partition={"name": "iid", "clients": 2},
        model={"name": "resnet18", "hidden": hidden},
        algorithm={"name": "fedper"},
        training={"rounds": 1, "participation": 1.0, "batch_size": 20, "bn": bn},
    )
    quick_run.run(raw, tmp_path / "run")
    file = tmp_path / "client.pt"
    assert main(["export", str(tmp_path / "run"), "--client", "1", "-o", str(file)]) == 0
    network = resnet18()
    network.conv1, network.maxpool = nn.Conv2d(1, 64, 3, padding=1, bias=False), nn.Identity()
    head = nn.Linear(hidden or 512, 10)
    network.fc = head if hidden is None else nn.Sequential(nn.Linear(512, hidden), nn.ReLU(), head)
    network.load_state_dict(torch.load(file, weights_only=True), strict=True)
    right = open_run(tmp_path / "run").round().metrics["correct"]
    assert exported.correct(network, exported.experiment(tmp_path / "run"), 1) == right[1]


def load(path):
    if path.suffix == ".pt":
        return {name: value.numpy() for name, value in torch.load(path, weights_only=True).items()}
    if path.suffix == ".safetensors":
        return safetensors.numpy.load_file(path)
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".npz"])
def test_a_file_holds_the_clients_arrays(finished, tmp_path, suffix):
    file = tmp_path / f"model{suffix}"
    assert main(["export", str(finished), "--round", "2", "--client", "4", "-o", str(file)]) == 0
    stored = run_folder.read_clients(finished, 2, np.array([4]))["cohort0"][1]
    arrays = load(file)
    expected = {
        "fc1.bias": "body/fc1/bias",
        "fc1.weight": "body/fc1/weight",
        "head.bias": "head/bias",
        "head.weight": "head/weight",
    }
    assert sorted(arrays) == sorted(expected)
    for name, path in expected.items():
        np.testing.assert_array_equal(arrays[name], stored[f"model/{path}"][0], strict=True)
    assert [path.name for path in tmp_path.iterdir()] == [file.name], "nothing else is left"


def test_torch_loads_safetensors_into_the_model(finished, tmp_path):
    file = tmp_path / "model.safetensors"
    assert main(["export", str(finished), "--client", "4", "-o", str(file)]) == 0
    made = exported.experiment(finished)
    loaded = ModelModule(made.tasks[0].architecture)
    loaded.load_state_dict(safetensors.torch.load_file(file), strict=True)
    assert exported.correct(loaded, made, 4) == open_run(finished).round().metrics["correct"][4]


def test_a_library_that_is_missing_is_named(finished, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    assert main(["export", str(finished), "--client", "0", "-o", str(tmp_path / "m.safetensors")]) == 2
    stderr = capfd.readouterr().err
    assert "`pip install safetensors`" in stderr and ".npz" in stderr


def test_the_server_and_parts_are_exported_too(finished, tmp_path):
    server, heads, critical, everything = (tmp_path / f"{name}.npz" for name in ("all", "heads", "critical", "client"))
    run = str(finished)
    assert main(["export", run, "--server", "-o", str(server)]) == 0
    assert main(["export", run, "--server", "--leaf", "heads.weight", "-o", str(heads)]) == 0
    assert main(["export", run, "--client", "3", "--leaf", "critical", "-o", str(critical)]) == 0
    assert main(["export", run, "--client", "3", "--leaf", ".", "-o", str(everything)]) == 0
    stored = run_folder.read_server(finished, 3)
    np.testing.assert_array_equal(load(server)["heads.weight"], stored["heads/weight"], strict=True)
    np.testing.assert_array_equal(load(heads)["weight"], stored["heads/weight"], strict=True)
    assert load(critical)["weight"].dtype == bool and set(load(critical)) == {"weight", "bias"}
    assert "critical.bias" in load(everything) and "model.head.weight" in load(everything)


def test_what_is_printed_says_whose_it_is_and_how_good(finished, tmp_path, capsys):
    assert main(["export", str(finished), "--client", "5", "-o", str(tmp_path / "m.npz")]) == 0
    metrics = run_folder.read_metrics(finished, 3)
    stdout = capsys.readouterr().out
    assert "client 5 after round 3 of fedgmh, 4 arrays" in stdout
    assert f"right for {metrics['correct'][5]} of the client's {metrics['total'][5]} test samples" in stdout


def test_a_file_in_the_way_is_kept_unless_forced(finished, tmp_path, capfd):
    file = tmp_path / "m.npz"
    file.write_bytes(b"precious")
    assert main(["export", str(finished), "--client", "0", "-o", str(file)]) == 2
    assert "--force" in capfd.readouterr().err and file.read_bytes() == b"precious"
    assert main(["export", str(finished), "--client", "0", "-o", str(file), "--force"]) == 0
    assert "head.bias" in load(file)


def test_a_failed_write_leaves_the_old_file(finished, tmp_path, monkeypatch):
    file = tmp_path / "m.npz"
    file.write_bytes(b"precious")

    def fail(*arguments, **arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", fail)
    assert main(["export", str(finished), "--client", "0", "-o", str(file), "--force"]) == 2
    assert file.read_bytes() == b"precious" and len(list(tmp_path.iterdir())) == 1
