"""Convolutions in lanes: the ways to compute them are the same convolution, and a run keeps the one it began with."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import quick_run
from pflmpi.config import load as configuration
from pflmpi.errors import CheckpointError
from pflmpi.experiment import build, convolution_choice
from pflmpi.experiment.execute import RankContext
from pflmpi.experiment.start import start
from pflmpi.experiment.stored_config import resumed_config, stored_config
from pflmpi.learning.task import HOST
from pflmpi.runtime.executors import lane_convolutions
from pflmpi.runtime.executors.lane_convolutions import WAYS as CHOICES
from pflmpi.runtime.executors.lane_convolutions import convolutions, fastest, im2col
from pflmpi.transports.base import Transport
from pflmpi.transports.inprocess import InProcessTransport
from project import ROOT
from thread_transport import run_ranks

WAYS = ("grouped", "im2col", "im2col each")


@pytest.fixture(scope="module")
def benchmark() -> dict[str, Any]:
    """Its functions by name."""
    path = ROOT / "benchmarks" / "lane_convolutions.py"
    scope: dict[str, Any] = {"__file__": str(path), "__name__": "lane_convolutions"}
    exec(path.read_text(), scope)
    return scope


@pytest.mark.parametrize("situation", [(1, 1, 28, 3), (3, 3, 20, 2)])
def test_each_way_has_the_gradients_of_one_lane_after_the_other(
    situation: tuple[int, ...], benchmark: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    given = benchmark["inputs"](*situation, torch.device("cpu"))
    assert tuple(benchmark["ways"]()) == ("loop", *WAYS)
    assert benchmark["error"](*given) < 1e-5  # sums of up to 1,728 float32 products in another order


def test_launches_are_those_of_the_page(benchmark: dict[str, Any]) -> None:
    page = (ROOT / "results" / "gpu.md").read_text()
    written = re.findall(r"^\| (loop|grouped|im2col|im2col each) \| (\d+) \|", page, re.MULTILINE)
    assert {name: int(count) for name, count in written} == benchmark["launches"]()


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [((3, 3), 1, 1, 1), ((5, 3), 2, (1, 2), (2, 1)), ((1, 1), 1, 0, 1), ((2, 4), (3, 1), 0, 2)],
)
@pytest.mark.parametrize("bias", [True, False])
def test_im2col_is_the_convolution(
    kernel: tuple[int, int], stride: Any, padding: Any, dilation: Any, bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3, 17, 19), (6, 3, *kernel), (6,)]
    x, weight, offset = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    given = x, weight, offset if bias else None, stride, padding, dilation
    torch.testing.assert_close(im2col(*given), F.conv2d(*given), rtol=0, atol=1e-12)


def test_what_im2col_cannot_compute_is_left_to_torch() -> None:
    x, weight = torch.randn(2, 4, 6, 6), torch.randn(4, 1, 3, 3)
    wanted = F.conv2d(x, weight, groups=4), F.conv2d(x, weight.expand(4, 4, 3, 3), padding="same")
    with convolutions("im2col"):
        found = F.conv2d(x, weight, groups=4), F.conv2d(x, weight.expand(4, 4, 3, 3), padding="same")
    assert all(map(torch.equal, found, wanted))


def experiment_settings(**runtime: Any) -> dict[str, Any]:
    return quick_run.settings(
        model={"name": "cnn", "kernel": 3, "padding": 1, "hidden": 8},
        training={"rounds": 2},
        runtime={"executor": "lanes", "lanes": 3, **runtime},
    )


class Operations(TorchDispatchMode):
    """Notes what is computed inside it, below vmap and autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "model",
    [{"name": "cnn", "kernel": 3, "padding": 1, "hidden": 8}, {"name": "resnet18"}],
    ids=lambda one: one["name"],
)
def test_a_run_computes_them_as_configured(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "check_padding", lambda *given: None)  # before the start, always in torch's own way
    names = {}
    for way in CHOICES:
        raw = quick_run.settings(
            model=model,
            training={"rounds": 1, "steps": 1, "participation": 0.2},
            runtime={"executor": "lanes", "lanes": 2, "lane_convolutions": way},
        )
        with Operations() as seen:
            start(configuration.parse(raw), tmp_path / way, RankContext(InProcessTransport(), HOST, 1), lambda _: None)
        names[way] = seen.names
    unfolded, convolved = {"aten.im2col.default", "aten.col2im.default"}, {"aten.convolution.default"}
    assert unfolded <= names["im2col"] and not convolved & names["im2col"]
    assert convolved <= names["grouped"] and not unfolded & names["grouped"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_runs_agree_whichever_way_and_bits_do_not_follow_from_ranks(precision: str, tmp_path: Path) -> None:
    raw = {way: experiment_settings(lane_convolutions=way) for way in CHOICES}
    for one in raw.values():
        one["training"] = {**one["training"], "precision": precision}
    digests = {way: quick_run.run(one, tmp_path / way) for way, one in raw.items()}
    assert digests["im2col"] != digests["grouped"]
    assert quick_run.run(raw["im2col"], tmp_path / "three", ranks=3) == digests["im2col"]


def test_measured_is_decided_once_for_all_ranks_and_for_the_continuation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def one_only(tasks: Any, lanes: int) -> str:
        asked.append(lanes)
        return "im2col" if len(asked) == 1 else "grouped"

    monkeypatch.setattr(convolution_choice, "fastest", one_only)
    run, raw = tmp_path / "run", experiment_settings(lane_convolutions="measured")
    digest = quick_run.run(raw, run, ranks=3)
    assert asked == [3]
    assert stored_config(run, []).runtime.lane_convolutions == "im2col"
    assert digest == quick_run.run(experiment_settings(lane_convolutions="im2col"), tmp_path / "named")

    longer = configuration.parse({**raw, "training": {**raw["training"], "rounds": 3}})
    assert resumed_config(run, longer).runtime.lane_convolutions == "im2col"
    assert quick_run.resume(run, ("training.rounds=3",), ranks=2) and asked == [3]
    other = configuration.parse(experiment_settings(lane_convolutions="grouped"))
    with pytest.raises(CheckpointError, match="lane_convolutions = 'im2col' in the run, 'grouped' now"):
        resumed_config(run, other)


def test_where_gpus_compute_a_rank_without_one_does_not_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = build.prepare(configuration.parse(experiment_settings(lane_convolutions="measured")), HOST)
    monkeypatch.setattr(
        convolution_choice, "fastest", lambda tasks, lanes: {"cpu": "grouped", "meta": "im2col"}[tasks[0].device.type]
    )

    def choose(transport: Transport) -> str:
        device = torch.device("meta") if transport.rank else HOST  # in the place of a GPU
        mine = replace(experiment, tasks=tuple(task.replace(device=device) for task in experiment.tasks))
        chosen = convolution_choice.choose_convolutions(mine, transport, on_gpu=True)
        return chosen.config.runtime.lane_convolutions

    assert run_ranks(3, choose) == ["im2col"] * 3


@pytest.mark.parametrize(
    ("sections", "chosen"),
    [
        ({"runtime": {"executor": "loop", "lane_convolutions": "measured"}}, "grouped"),
        ({"runtime": {"executor": "loop", "lane_convolutions": "im2col"}}, "grouped"),
        ({"model": {"name": "mlp"}, "runtime": {"executor": "lanes", "lane_convolutions": "measured"}}, "grouped"),
        ({"runtime": {"executor": "lanes", "lane_convolutions": "measured"}}, "measured"),
        ({"runtime": {"executor": "lanes", "lane_convolutions": "im2col"}}, "im2col"),
    ],
)
def test_nothing_is_measured_without_convolutions_in_lanes(sections: dict[str, Any], chosen: str) -> None:
    raw = quick_run.settings({"model": {"name": "cnn", "kernel": 3, "padding": 1, "hidden": 8}, **sections})
    assert build.prepare(configuration.parse(raw), HOST).config.runtime.lane_convolutions == chosen


@pytest.mark.parametrize(("faster", "too_large"), [("grouped", None), ("im2col", None), ("im2col", "im2col")])
def test_the_faster_way_is_taken_that_has_enough_memory(
    faster: str, too_large: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = build.prepare(configuration.parse(experiment_settings()), HOST).tasks
    entered: list[str] = []

    def enter(way: str) -> Any:
        entered.append(way)
        return convolutions(way)

    def seconds_of(call: Callable[[], object], device: torch.device) -> float:
        if entered[-1] == too_large:
            raise torch.OutOfMemoryError
        call()
        return 1.0 if entered[-1] == faster else 2.0

    monkeypatch.setattr(lane_convolutions, "convolutions", enter)
    monkeypatch.setattr(lane_convolutions, "seconds_of", seconds_of)
    assert fastest(tasks, 3) == ("grouped" if too_large else faster)
