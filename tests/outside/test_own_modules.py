"""Torch modules from outside the package as models: named head, pretrained weights, dropout, unlike clients."""

import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quick_run
from comparisons import state_of
from pflmpi import outside, tree
from pflmpi.analysis.run import open_run
from pflmpi.cli import main
from pflmpi.config import load as configuration
from pflmpi.errors import ConfigError
from pflmpi.models import MODELS
from pflmpi.models.built_module import read_weights
from pflmpi.models.torch_module import module_model

NET = '''
import torch
from torch import nn


class Net(nn.Module):
    """A small convolutional network."""

    def __init__(self, num_classes, in_channels, width: int = 4, drop=0.0, normed=False):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, width, 3)
        self.norm = nn.BatchNorm2d(width) if normed else nn.Identity()
        self.drop = nn.Dropout(drop) if drop else nn.Identity()
        self.classify = nn.Sequential(nn.Linear(36 * width, 10), nn.ReLU(), nn.Linear(10, num_classes))

    def forward(self, x):
        return self.classify(self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1))


class Soft(Net):
    def forward(self, x):
        return super().forward(x).softmax(1)
'''

LINEAR = """
from torch import nn


class Linear(nn.Module):
    def __init__(self, num_classes: int):
        super().__init__()
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x):
        return self.fc(x.flatten(1))
"""

COMPILED = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes: int, compiled: bool = False):
        super().__init__()
        body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())
        self.body = torch.compile(body, backend="eager") if compiled else body
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x):
        return self.fc(self.body(x))
"""

FIXED = """

class Fixed(Net):
    def __init__(self, in_channels):
        super().__init__(7, in_channels)
"""


@pytest.fixture
def net(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path}/net.py:Net"


def settings(model, **sections):
    return quick_run.settings(model=model, algorithm={"name": "fedper"}, **sections)


@pytest.mark.parametrize(
    "options, executor",
    [({"drop": 0.3}, "lanes"), ({"normed": True}, "loop"), ({"normed": True, "norm": "group"}, "lanes")],
)
def test_a_module_has_the_same_bits_on_any_number_of_ranks(options, executor, net, tmp_path):
    raw = settings({"name": net, "head": "classify.2", **options}, runtime={"executor": executor, "lanes": 2})
    alone = quick_run.run(raw, tmp_path / "1")
    assert quick_run.run(raw, tmp_path / "3", 3) == alone
    quick_run.run(quick_run.settings(raw, training={"rounds": 1}), tmp_path / "parts", 2)
    assert quick_run.resume(tmp_path / "parts", ("training.rounds=3",)) == alone


def test_dropout_is_the_same_in_loop_and_lanes_and_drops(net, tmp_path):
    states = {}
    for name, drop, executor in (("loop", 0.3, "loop"), ("lanes", 0.3, "lanes"), ("none", 0.0, "loop")):
        raw = settings({"name": net, "head": "classify.2", "drop": drop}, runtime={"executor": executor, "lanes": 3})
        quick_run.run(raw, tmp_path / name)
        states[name] = state_of(tmp_path / name)
    for path, array in states["loop"].items():
        np.testing.assert_allclose(array, states["lanes"][path], atol=1e-5, err_msg=path)
    assert any(not np.allclose(array, states["none"][path]) for path, array in states["loop"].items())


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("algorithm", ["fedavg", "apfl", "fedala", "fedrod", "scaffold"])
def test_a_module_that_is_its_head_is_trained_and_opened(algorithm, executor, tmp_path):
    (tmp_path / "net.py").write_text(LINEAR)
    raw = settings({"name": f"{tmp_path}/net.py:Linear", "head": "fc"}, runtime={"executor": executor})
    quick_run.run({**raw, "algorithm": {"name": algorithm}}, tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.columns["accuracy_mean"][-1] > 0.2 and run.model(0)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_a_part_that_torch_compiles_is_trained_as_the_same_part(executor, tmp_path):
    (tmp_path / "net.py").write_text(COMPILED)
    losses = []
    for compiled in (False, True):
        model = {"name": f"{tmp_path}/net.py:Net", "head": "fc", "compiled": compiled}
        quick_run.run(settings(model, runtime={"executor": executor}), tmp_path / str(compiled))
        losses.append(open_run(tmp_path / str(compiled)).columns["train_loss"])
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_unlike_clients_may_have_unlike_modules(net, tmp_path):
    models = [{"name": net, "head": "classify.2", "width": width} for width in (3, 4)]
    raw = quick_run.settings(model=models, algorithm={"name": "fedproto"})
    assert quick_run.run(raw, tmp_path / "1") == quick_run.run(raw, tmp_path / "2", 2)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_pretrained_weights_are_where_clients_start(suffix, net, tmp_path):
    from safetensors.torch import save_file

    torch.manual_seed(3)
    module = outside.load(net)(7, 1)
    path = tmp_path / f"weights{suffix}"
    torch.save(module.state_dict(), path) if suffix == ".pt" else save_file(module.state_dict(), path)
    for classes, same_head in ((10, False), (7, True)):
        model = (
            MODELS[net](head="classify.2", weights=str(path)).bind((1, 8, 8), classes).init(np.random.default_rng(0))
        )
        assert torch.equal(tree.at(model, "body/conv/weight"), module.conv.weight)
        assert tree.at(model, "head/weight").shape[0] == classes
        assert not same_head or torch.equal(tree.at(model, "head/bias"), module.classify[2].bias)


def _plain():
    """As a module is when its weights are read: batch norm has no counter."""
    norm = nn.BatchNorm1d(2)
    norm.num_batches_tracked = None
    return nn.ModuleDict({"body": norm, "fc": nn.Linear(2, 3)})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"body.weight": torch.tensor([1, float("nan")])}, "body.weight has a value that is not a finite number$"),
        ({"body.running_mean": torch.tensor([1, float("nan")])}, "body.running_mean has a value that is not a finite"),
        ({"fc.bias": torch.tensor([1, 2, float("inf")])}, "fc.bias has a value that is not a finite number$"),
        ({"body.weight": torch.full((2,), 1e300, dtype=torch.float64)}, "body.weight has a value that is not a finite"),
        ({"body.weight": torch.empty(2, device="meta")}, r"body.weight has no plain numbers \(meta\); write it by"),
        ({"body.weight": torch.ones(2, dtype=torch.complex64)}, "body.weight has no plain numbers"),
        ({"epoch": 3}, "is no state dict, it has 'epoch' with a int; write it by torch.save"),
        ({7: torch.ones(2)}, "is no state dict, it has 7 with a Tensor"),
    ],
)
def test_weights_that_are_no_numbers_are_named(changes, said, tmp_path):
    torch.save({**_plain().state_dict(), **changes}, tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match=said):
        read_weights(tmp_path / "weights.pt", _plain(), "fc", 3)


@pytest.mark.parametrize("content", ["module", "script", "text"])
def test_a_file_that_is_no_state_dict_is_refused_in_one_line(content, tmp_path):
    path = tmp_path / "weights.pt"
    if content == "module":
        torch.save(_plain(), path)
    elif content == "script":
        with warnings.catch_warnings(action="ignore"):
            torch.jit.script(nn.Linear(2, 2)).save(path)
    else:
        path.write_text("hello")
    with pytest.raises(
        ConfigError, match=r"^[\x20-\x7e]+ write it by torch.save\(module.state_dict\(\), FILE\)"
    ) as caught:
        read_weights(path, _plain(), "fc", 3)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"fc.weight": torch.ones(3, 3)}, r"is not of this model: fc.weight is \[3, 3\], here \[3, 2\]"),
        ({"fc.bias": None}, r"is not of this model: fc.bias is missing, here \[3\]"),
        ({"fc.weight": torch.ones(4, 2), "fc.bias": None}, "fc.bias is missing"),
        ({"fc.weight": torch.ones(4, 2)}, r"fc.weight is \[4, 2\], here \[3, 2\]"),
        ({"fc.weight": torch.ones(4, 2), "fc.bias": torch.ones(4)}, ""),
        ({"fc.weight": None, "fc.bias": None}, ""),
    ],
)
def test_a_head_in_a_weights_file_is_read_or_refused_or_left_where_it_is_for_other_classes(changes, said, tmp_path):
    """`said` is None if it is read, "" if it is left."""
    state = {**_plain().state_dict(), **changes}
    torch.save({name: value for name, value in state.items() if value is not None}, tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        head = read_weights(tmp_path / "weights.pt", _plain(), "fc", 3)
        assert head.keys() == ({"weight", "bias"} if said is None else set())


class Versioned(nn.Linear):
    def get_extra_state(self):
        return {"version": 2}


def test_an_extra_state_is_in_no_weights_file(tmp_path):
    module = nn.ModuleDict({"body": Versioned(2, 2), "fc": nn.Linear(2, 3)})
    stored = {name: torch.ones_like(value) for name, value in module.named_parameters()}
    torch.save(stored, tmp_path / "weights.pt")
    read_weights(tmp_path / "weights.pt", module, "fc", 3)
    assert module["body"].weight.eq(1).all()


def test_a_mask_of_infinities_is_a_buffer_as_any(tmp_path):
    module = _plain()
    module.register_buffer("mask", torch.tensor([0, float("-inf")]))
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    assert read_weights(tmp_path / "weights.pt", module, "fc", 3).keys() == {"weight", "bias"}


def test_torchvision_by_name_with_its_own_weights(tmp_path):
    from torchvision.models.resnet import resnet18

    torch.manual_seed(1)
    module = resnet18(num_classes=5)
    torch.save(module.state_dict(), tmp_path / "resnet18.pt")
    kind = MODELS["torchvision.models:resnet18"]
    bound = kind(head="fc", weights=str(tmp_path / "resnet18.pt")).bind((3, 32, 32), 5)
    weights = bound.init(np.random.default_rng(0))
    x = torch.randn(2, 3, 32, 32)
    expected = module.eval()(x)
    scores = bound.logits(weights["head"], bound.features(weights, x, False))
    torch.testing.assert_close(scores, expected)
    assert bound.has_batch_norm and bound.num_features == 512


class Adapted(nn.Module):
    """Batch norm that is frozen with its values, and one without weights."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.norm, self.bare, self.fc = nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, num_classes)
        nn.init.constant_(self.norm.weight, 0.25)
        self.norm.requires_grad_(False)

    def forward(self, x):
        return self.fc(self.bare(self.norm(x)))


class Rare(nn.Module):
    """A head whose bias says that positives are rare."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.fc = nn.Linear(4, outputs)
        nn.init.constant_(self.fc.bias, -4.6)

    def forward(self, x):
        return self.fc(x)


def test_a_head_for_the_classes_of_the_data_keeps_the_values_that_the_class_gives_it():
    bound = module_model(Rare)(head="fc").bind((4,), 3)
    first, second = (bound.init(np.random.default_rng(seed))["head"] for seed in (0, 1))
    assert torch.equal(first["bias"], torch.full((3,), -4.6)) and not torch.equal(first["weight"], second["weight"])
    smaller_head = module_model(Rare)(head="fc").bind((4,), 2).init(np.random.default_rng(0))["head"]
    assert smaller_head["weight"].shape == (2, 4) and (smaller_head["bias"] > -1).all(), (
        "of PyTorch's default distributions"
    )


def test_a_head_for_other_classes_is_made_anew_which_the_start_says(tmp_path, caplog):
    for kind, says in (("Net", False), ("Fixed", True)):
        (tmp_path / "net.py").write_text(NET + FIXED)
        caplog.clear()
        quick_run.run(settings({"name": f"{tmp_path}/net.py:{kind}", "head": "classify.2"}), tmp_path / kind)
        messages = [record.getMessage() for record in caplog.records if "made anew" in record.getMessage()]
        assert messages == [f"model {kind}: its head classify.2 is made anew for 10 classes"] * says


def test_group_norm_is_what_the_batch_norm_in_its_place_was():
    bound = module_model(Adapted)(head="fc", norm="group").bind((4,), 3)
    assert bound.frozen == ("body/norm/weight", "body/norm/bias")
    body = bound.init(np.random.default_rng(0))["body"]
    assert torch.equal(body["norm"]["weight"], torch.full((4,), 0.25)) and body.keys() == {"norm"}


def test_an_export_of_a_run_with_group_norm_starts_another(net, tmp_path):
    model = {"name": net, "head": "classify.2", "normed": True, "norm": "group"}
    quick_run.run(settings(model, training={"rounds": 1}), tmp_path / "first")
    assert main(["export", str(tmp_path / "first"), "--client", "1", "-o", str(tmp_path / "one.pt")]) == 0
    quick_run.run(settings({**model, "weights": str(tmp_path / "one.pt")}), tmp_path / "second")


def test_group_norm_takes_the_weights_of_the_module_as_it_is_written(tmp_path):
    module = Adapted(3)
    nn.init.constant_(module.norm.bias, 0.5)
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    model = module_model(Adapted)(head="fc", norm="group", weights=str(tmp_path / "weights.pt")).bind((4,), 3)
    assert torch.equal(model.init(np.random.default_rng(0))["body"]["norm"]["bias"], torch.full((4,), 0.5))


def test_what_is_no_model_is_refused(net, tmp_path):
    class Evil:
        def __reduce__(self) -> Any:
            return print, ("executed",)

    torch.save({"conv.weight": Evil()}, tmp_path / "evil.pt")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "other.pt")
    for changes, expected in (
        ({}, "model.head is missing: name of the linear layer"),
        ({"head": "fc"}, "'fc' is no nn.Linear of the module; known: classify.0, classify.2"),
        ({"head": "classify.0"}, "does not end with classify.0"),
        ({"name": net.replace("Net", "Soft"), "head": "classify.2"}, "does not end with classify.2"),
        ({"head": "classify.2", "width": "x"}, "model.width = 'x'"),
        ({"head": "classify.2", "weights": "nothing.pt"}, "cannot be read"),
        (
            {"head": "classify.2", "weights": str(tmp_path / "evil.pt")},
            "holds more than plain tensors, and nothing else is read: write it by",
        ),
        (
            {"head": "classify.2", "weights": str(tmp_path / "other.pt")},
            "is not of this model: bias is .*, here missing",
        ),
    ):
        with pytest.raises(ConfigError, match=expected):
            config = configuration.parse(settings({"name": net, **changes}))
            config.models[0].bind((1, 8, 8), 10).init(np.random.default_rng(0))
    with pytest.raises(ConfigError, match="cannot use samples of 3x5x5"):
        MODELS[net](head="classify.2").bind((3, 5, 5), 10)


@pytest.mark.parametrize(
    "name, shape, count",
    [("lenet", (1, 28, 28), 61706), ("logistic", (1, 28, 28), 7850), ("dropout_cnn", (1, 28, 28), 1199882)],
)
def test_models_of_speed_comparisons_have_their_sizes(name, shape, count):
    model = MODELS[name]().bind(shape, 10).init(np.random.default_rng(0))
    assert sum(leaf.numel() for _, leaf in tree.leaves(model)) == count
