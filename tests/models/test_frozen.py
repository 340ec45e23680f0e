"""Parameters that no client trains: one copy for all, in no message, row or round; and parts named by pattern."""

import pytest
import torch
from torch import nn

import quick_run
from comparisons import state_of
from every_algorithm import ON_ANY_MODEL, every_algorithm
from pflmpi import tree
from pflmpi.algorithms import ALGORITHMS
from pflmpi.cli import main
from pflmpi.config import load as configuration
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.experiment.build import prepare
from pflmpi.store import run_folder
from pflmpi.testing import conformance
from pflmpi.testing.conformance import Runs

CNN = {"name": "cnn", "kernel": 3, "padding": 1, "first_channels": 2, "second_channels": 3, "hidden": 12}
LAST = {**CNN, "trainable": ["fc1.*", "head.*"]}
NET = '''
import torch
from torch import nn


class Net(nn.Module):
    """Two layers."""

    def __init__(self, num_classes):
        super().__init__()
        self.first, self.second, self.fc = nn.Linear(64, 6), nn.Linear(6, 6), nn.Linear(6, num_classes)

    def forward(self, x):
        return self.fc(self.second(self.first(x.flatten(1)).relu()).relu())


class Fixed(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.first.requires_grad_(False)


class Scaled(Fixed):
    """It also trains a number, a parameter without an axis."""

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.fc(self.second(self.scale * self.first(x.flatten(1)).relu()).relu())


class Tied(Net):
    """Its second and third layer have one weight."""

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.third = nn.Linear(6, 6)
        self.third.weight = self.second.weight

    def forward(self, x):
        return self.fc(self.third(self.second(self.first(x.flatten(1)).relu()).relu()).relu())


class AllFixed(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.requires_grad_(False)


class FixedHead(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        nn.init.eye_(self.fc.weight)
        self.fc.requires_grad_(False)
'''


def settings(model, algorithm="fedavg", **sections):
    return quick_run.settings(model=model, algorithm={"name": algorithm}, **sections)


def experiment(model, algorithm="fedavg", **sections):
    return prepare(configuration.parse(settings(model, algorithm, **sections)), torch.device("cpu"))


@pytest.fixture
def net(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    return {"name": f"{tmp_path}/net.py:Fixed", "head": "fc"}


@pytest.mark.parametrize("name", ON_ANY_MODEL)
def test_each_algorithm_keeps_its_promises_with_frozen_parts_and_a_number(name, net, tmp_path):
    model = {**net, "name": net["name"].replace("Fixed", "Scaled")}
    case = next(case for case in every_algorithm().values() if case["algorithm"]["name"] == name)
    continued = name in ("fedavg", "fedper", "fedproto", "fedgmh")
    rounds = 3 if continued else 2
    runs = Runs({**case, "model": model, "training": {**case["training"], "rounds": rounds}}, tmp_path)
    conformance.loop_and_lanes_agree(runs)
    if continued:
        conformance.same_bits(runs, "lanes", 3)
        conformance.exact_continuation(runs, "latest", "lanes")
        conformance.declared_bytes(runs, "lanes")
    assert not [path for path in conformance.state_of(runs.get("lanes")[0], rounds) if "first" in path]


@pytest.mark.parametrize("trained", ["head.*", "fc1.*"])
@pytest.mark.parametrize("name", ON_ANY_MODEL)
def test_each_algorithm_goes_without_a_body_or_a_head_or_refuses_that(name, trained, tmp_path):
    case = next(case for case in every_algorithm().values() if case["algorithm"]["name"] == name)
    raw = quick_run.settings(case, model={**CNN, "trainable": [trained]})
    if trained == "fc1.*" and not ALGORITHMS[name].frozen_head:
        with pytest.raises(ConfigError, match=r"treats the head .* and that of cnn is not trained; train it"):
            quick_run.run(raw, tmp_path / "run")
        return
    try:
        quick_run.run(raw, tmp_path / "run")
    except ConfigError as error:
        assert trained == "head.*" and ("is empty with model cnn" in str(error) or "has none" in str(error)), error


def test_what_is_frozen_stays_and_travels_nowhere(net, tmp_path):
    for model in (net, LAST):
        folder = tmp_path / str(len(model))
        quick_run.run(settings(model), folder)
        task = experiment(model).tasks[0]
        trained = {path for path, _ in tree.leaves(task.like())}
        assert {path.removeprefix("server/model/") for path in state_of(folder)} == trained
        bytes_of_round, participants = run_folder.read_bytes(folder, 1), 3
        assert bytes_of_round["up"].sum() == participants * tree.num_bytes(task.like())
        frozen = {path for path, _ in tree.leaves(task.frozen.on(torch.device("cpu")))}
        assert frozen and not frozen & trained


def test_frozen_values_follow_from_the_seed_and_are_one_for_all_clients():
    def values(seed, init="shared"):
        task = experiment(LAST, "local", seed=seed, training={"init": init}).tasks[0]
        return task.frozen.digest, [task.of_client(client).init() for client in (0, 1)]

    assert values(1)[0] == values(1, "per_client")[0] != values(2)[0]
    first, second = values(1, "per_client")[1]
    assert not torch.equal(tree.at(first, "head/weight"), tree.at(second, "head/weight"))


def test_a_frozen_head_keeps_the_values_that_the_class_gives_it(net):
    model = {**net, "name": net["name"].replace("Fixed", "FixedHead")}
    task = experiment(model).tasks[0]
    assert task.frozen.paths == ("head/bias", "head/weight") and not task.like()["head"]
    assert torch.equal(tree.at(task.frozen.on(torch.device("cpu")), "head/weight"), torch.eye(10, 6))


def test_a_tied_parameter_goes_by_each_of_its_names(net):
    model = {**net, "name": net["name"].replace("Fixed", "Tied"), "trainable": ["third.*", "fc.*"]}
    trained = {path for path, _ in tree.leaves(experiment(model).tasks[0].like())}
    assert trained == {"body/second/weight", "body/third/bias", "head/bias", "head/weight"}
    personal = experiment({**model, "personal": ["third.weight"]}, "fedper").tasks[0].personal
    assert personal == ("body/second/weight",)


def test_models_that_train_other_parts_are_other_cohorts(tmp_path):
    models = [{**CNN, "trainable": [part, "head.*"]} for part in ("conv1.*", "fc1.*")]
    raw = settings(models, "fedproto")
    assert len(experiment(models, "fedproto").tasks) == 2
    assert quick_run.run(raw, tmp_path / "1") == quick_run.run(raw, tmp_path / "3", 3)
    with pytest.raises(ConfigError, match=r"cnn \(frozen = \['body/conv2/bias.*\), cnn \(frozen = \['body/conv1"):
        experiment(models)


def test_lanes_have_one_copy_of_what_is_frozen(net, tmp_path):
    task = experiment(net).tasks[0].replace(batched=True)
    frozen = task.frozen.on(torch.device("cpu"))

    def scores(model):
        return task.predict(model, torch.ones(2, 1, 8, 8))

    torch.func.vmap(scores)(tree.stack([task.init(), task.init()]))
    module = task.architecture._bodies[torch.device("cpu")][0].module
    assert module.first.weight is tree.at(frozen, "body/first/weight")


@pytest.mark.parametrize(
    "model, algorithm, said",
    [
        (
            {"trainable": ["conv9.*"]},
            "fedavg",
            r"model.trainable: 'conv9.\*' matches no parameter of model cnn; known: ",
        ),
        ({"trainable": []}, "fedavg", r"model.trainable = \[\]: name at least one pattern"),
        ({"personal": []}, "fedper", r"model.personal = \[\]: name at least one pattern"),
        ({"trainable": ["fc1.*", "head.bias"]}, "fedavg", "only head.bias is trained; a head is trained as a whole or"),
        (
            {"trainable": ["head.*"], "personal": ["fc1.*"]},
            "fedper",
            r"model.personal: 'fc1.\*' matches no trained parameter of model cnn; known: head.",
        ),
        ({"personal": ["head.*"]}, "fedavg", "what stays with a client of FedAvg follows from the algorithm"),
        ({"personal": ["*"]}, "fedper", "'body' is empty with model cnn"),
    ],
)
def test_patterns_without_a_meaning_are_refused(model, algorithm, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        quick_run.run(settings({**CNN, **model}, algorithm), tmp_path / "run")


def test_a_module_of_which_nothing_is_trained_is_refused_unless_a_pattern_names_something(net, tmp_path):
    model = {**net, "name": net["name"].replace("Fixed", "AllFixed")}
    with pytest.raises(ConfigError, match=r"no parameter of model AllFixed is trained; name some as model.trainable, "):
        quick_run.run(settings(model), tmp_path / "run")
    quick_run.run(settings({**model, "trainable": ["second.*"]}), tmp_path / "run")
    assert {path.rpartition("/")[0] for path in state_of(tmp_path / "run")} == {"server/model/body/second"}


@pytest.mark.parametrize("algorithm", ["fedper", "fedrep"])
def test_what_is_personal_stays_and_the_rest_is_averaged(algorithm, tmp_path):
    """Here the head is shared, and a layer before it personal."""
    raw = settings({**LAST, "personal": ["fc1.*"]}, algorithm)
    assert quick_run.run(raw, tmp_path / "1") == quick_run.run(raw, tmp_path / "2", 2)
    layers = {path.rpartition("/")[0] for path in state_of(tmp_path / "1")}
    assert layers == {"server/shared/head", "clients/body/fc1"}


def test_personal_parts_as_fedper_has_them_are_fedper(tmp_path):
    expected = quick_run.run(settings(CNN, "fedper"), tmp_path / "a")
    assert quick_run.run(settings({**CNN, "personal": ["head.*"]}, "fedper"), tmp_path / "b") == expected
    with pytest.raises(ConfigError, match=r"algorithm.personal_layers = 2 and model.personal both say"):
        algorithm = {"name": "fedper", "personal_layers": 2}
        quick_run.run(quick_run.settings(model={**CNN, "personal": ["head.*"]}, algorithm=algorithm), tmp_path / "c")


def exported(run, path):
    assert main(["export", str(run), "--client", "1", "-o", str(path)]) == 0
    return torch.load(path, weights_only=True)


def test_an_export_has_what_is_frozen_too(net, tmp_path):
    for model in (net, LAST):
        folder = tmp_path / str(len(model))
        quick_run.run(settings(model), folder)
        state, task = exported(folder, folder.with_suffix(".pt")), experiment(model).tasks[0]
        frozen = dict(tree.leaves(task.frozen.on(torch.device("cpu"))))
        assert len(state) == len(frozen) + len(dict(tree.leaves(task.like())))
        for path, value in frozen.items():
            assert torch.equal(state[path.removeprefix("body/").replace("/", ".")], value)
        (folder / "modules.h5").unlink()
        assert main(["export", str(folder), "--client", "1", "-o", str(tmp_path / "two.pt")]) == 2


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_of_a_file_stay_in_it(suffix, net, tmp_path, capfd):
    from safetensors.torch import save_file

    plain, path = nn.Sequential(), tmp_path / f"weights{suffix}"
    for name, layer in (("first", nn.Linear(64, 6)), ("second", nn.Linear(6, 6))):
        plain.add_module(name, layer)
    torch.save(plain.state_dict(), path) if suffix == ".pt" else save_file(plain.state_dict(), path)
    folder, model = tmp_path / "run", {**net, "weights": str(path)}
    quick_run.run(settings(model, training={"rounds": 1}), folder)
    assert (folder / "modules.h5").stat().st_size < 8 * 1024
    state = exported(folder, tmp_path / "one.pt")
    assert torch.equal(state["first.weight"], plain.first.weight)
    unbroken = quick_run.run(settings(model), tmp_path / "whole")
    assert quick_run.resume(folder, ("training.rounds=3",), 2) == unbroken
    with torch.no_grad():
        plain.first.bias.add_(1)
    content = path.read_bytes()
    torch.save(plain.state_dict(), path) if suffix == ".pt" else save_file(plain.state_dict(), path)
    capfd.readouterr()
    assert main(["export", str(folder), "--client", "1", "-o", str(tmp_path / "two.pt")]) == 2
    assert f"{path}, which has the frozen weights of {folder}, has changed" in capfd.readouterr().err
    with pytest.raises(CheckpointError, match=r"what model.weights names has changed since"):
        quick_run.resume(folder, ("training.rounds=4",))
    with pytest.raises(CheckpointError, match=rf"the frozen part of the model {path} has changed since"):
        quick_run.resume(folder, ("training.rounds=4",), changed_code=True)
    path.unlink()
    assert main(["export", str(folder), "--client", "1", "-o", str(tmp_path / "two.pt")]) == 2
    assert f"{path}, which has the frozen weights of {folder}, is missing" in capfd.readouterr().err
    with pytest.raises(ConfigError, match=rf"model.weights = '{path}' cannot be read"):
        quick_run.resume(folder, ("training.rounds=4",))
    path.write_bytes(content)
    assert exported(folder, tmp_path / "two.pt").keys() == state.keys()


@pytest.mark.parametrize("outputs", [0, 7])
def test_a_head_that_the_file_of_weights_lacks_is_made_anew_or_refused_if_frozen(outputs, net, tmp_path, caplog):
    layers = {"first": nn.Linear(64, 6), "second": nn.Linear(6, 6)} | ({"fc": nn.Linear(6, outputs)} if outputs else {})
    torch.save(nn.ModuleDict(layers).state_dict(), tmp_path / "w.pt")
    model = {**net, "weights": f"{tmp_path}/w.pt"}
    quick_run.run(settings(model, training={"rounds": 1}), tmp_path / "run")
    assert "its head fc is made anew for 10 classes" in caplog.text
    with pytest.raises(ConfigError, match=r"w\.pt' has no fc for 10 classes, and a head that is made anew needs"):
        quick_run.run(settings({**model, "trainable": ["second.*"]}), tmp_path / "frozen")
