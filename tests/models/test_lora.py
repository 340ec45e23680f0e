"""Adapters of low rank for the layers of any module."""

import numpy as np
import pytest
import torch
from torch import nn

import quick_run
from comparisons import state_of
from pflmpi.config import load as configuration
from pflmpi.errors import ConfigError
from pflmpi.experiment.build import prepare
from pflmpi.models.lora import lora

CASES = {
    "linear": (lambda: nn.Linear(6, 4), (3, 6)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1, padding_mode="reflect"), (2, 3, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 4, (3, 2), stride=2, dilation=2, bias=False), (2, 3, 9, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4)),
}
NET = """
from torch import nn

from pflmpi.models.lora import lora


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv, self.first, self.head = nn.Conv2d(1, 3, 3), nn.Linear(108, 6), nn.Linear(6, num_classes)

    def forward(self, x):
        return self.head(self.first(self.conv(x).relu().flatten(1)).relu())


class Adapted(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        lora(self, ["conv", "first"], rank=2, alpha=4)
"""


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_adds_a_weight_of_low_rank(case):
    make, shape = CASES[case]
    layer, plain, x = make(), make(), torch.randn(shape)
    plain.load_state_dict(layer.state_dict())
    adapted = lora(nn.Sequential(layer), ["*"], rank=2, alpha=6.0)[0]
    assert torch.equal(adapted(x), plain(x)), "B begins at zero"
    assert [name for name, value in adapted.named_parameters() if value.requires_grad] == ["lora_a", "lora_b"]
    with torch.no_grad():
        adapted.lora_b.normal_()
        change = (adapted.lora_b.flatten(1) @ adapted.lora_a.flatten(1)).view(plain.weight.shape)
        plain.weight.add_(6.0 / 2 * change)
    torch.testing.assert_close(adapted(x), plain(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["linear1", "linear2"])
def test_an_encoder_computes_with_its_adapters_in_evaluation(name):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True), 2)
    x, padding = torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor([[5], [3], [4]])
    lora(encoder, [f"layers.*.{name}"], 2)
    with torch.no_grad():
        for layer in encoder.layers:
            getattr(layer, name).lora_b.normal_()
        for mask in (None, padding):
            training, evaluation = (encoder.train(mode)(x, src_key_padding_mask=mask) for mode in (True, False))
            torch.testing.assert_close(evaluation, training)


def test_what_has_no_adapter_is_refused_by_name():
    for layers, module, message in (
        (["fc"], nn.Sequential(nn.Linear(2, 2)), "'fc' matches no nn.Linear or convolution of the module; known: 0"),
        (["0"], nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)), "0 has groups = 2"),
        (["attention.out_proj"], nn.TransformerEncoderLayer(8, 2, 8), "'attention.out_proj' matches no nn.Linear"),
    ):
        with pytest.raises(ConfigError, match=message):
            lora(module, layers, 2)
    with pytest.raises(ConfigError, match="rank = 0; must be at least 1"):
        lora(nn.Sequential(nn.Linear(2, 2)), ["0"], 0)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    return {"name": f"{tmp_path}/net.py:Adapted", "head": "head", "trainable": ["*.lora_*", "head.*"]}


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize(
    "algorithm, personal, kept",
    [
        ("fedavg", None, set()),
        ("fedper", ["head.*"], {"clients/head"}),
        ("fedrep", ["*.lora_*"], {"clients/body/conv", "clients/body/first"}),
    ],
)
def test_adapters_are_shared_or_personal(algorithm, personal, kept, executor, model, tmp_path):
    model, runtime = {**model, "personal": personal}, {"executor": executor, "lanes": 2}
    raw = quick_run.settings(model=model, algorithm={"name": algorithm}, runtime=runtime)
    digest = quick_run.run(raw, tmp_path / "1")
    assert quick_run.run(raw, tmp_path / "3", 3) == digest
    quick_run.run(quick_run.settings(raw, training={"rounds": 1}), tmp_path / "parts", 2)
    assert quick_run.resume(tmp_path / "parts", ("training.rounds=3",)) == digest
    state = state_of(tmp_path / "1")
    assert {path.rpartition("/")[0] for path in state if path.startswith("clients")} == kept
    assert {path.rpartition("/")[2] for path in state if "body" in path} == {"lora_a", "lora_b"}


def test_adapters_in_lanes_are_those_of_a_loop(model, tmp_path):
    states = []
    for executor in ("loop", "lanes"):
        raw = quick_run.settings(model=model, algorithm={"name": "fedper"}, runtime={"executor": executor, "lanes": 3})
        quick_run.run(raw, tmp_path / executor)
        states.append(state_of(tmp_path / executor))
    for path, array in states[0].items():
        np.testing.assert_allclose(array, states[1][path], atol=1e-5, err_msg=path)


def test_a_weights_file_is_that_of_the_module_without_adapters(model, tmp_path):
    net = {}
    exec(NET, net)
    plain = net["Net"](10)
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    raw = quick_run.settings(model={**model, "weights": str(tmp_path / "plain.pt")}, algorithm={"name": "fedavg"})
    task = prepare(configuration.parse(raw), torch.device("cpu")).tasks[0]
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(task.predict(task.init(), x), plain(x))
    del (state := plain.state_dict())["first.bias"]
    torch.save(state, tmp_path / "plain.pt")
    with pytest.raises(ConfigError, match=r"first.bias is missing"):
        prepare(configuration.parse(raw), torch.device("cpu"))
