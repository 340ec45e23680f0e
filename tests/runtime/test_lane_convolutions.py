"""The ways to compute convolutions in lanes that a benchmark compares are the same convolution."""

import re
from typing import Any

import pytest
import torch

from project import ROOT

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
