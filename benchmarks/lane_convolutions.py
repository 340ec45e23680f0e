"""A training step of convolutions in lanes: one grouped convolution against im2col and a batched matrix product.

    python benchmarks/lane_convolutions.py [--device cuda:0] [--repeats N]

What they are for: a run takes what `runtime.lane_convolutions` says, and this shows what is faster on a device. On a
CPU im2col is not. A third way, im2col with a product for each image, is here alone.

Forward and backward of the convolutional part of `cnn` (5x5, 32 and 64 channels, pools), each lane with weights of its
own, as the executor calls it: vmap of one client's gradient. The ways take turns; medians, in milliseconds. `loop` is
one lane after the other.
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))

import torch
from torch import Tensor
from torch.nn import functional as F

from pflmpi.learning.training import TrainingConfig
from pflmpi.models.conv_net import channels_last
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.runtime.devices import fix_kernels
from pflmpi.runtime.executors.lane_convolutions import im2col
from pflmpi.runtime.stopwatch import seconds_of

Convolution = Callable[[Tensor, Tensor, Tensor], Tensor]
SITUATIONS = [(4, 1, 28, 10), (10, 1, 28, 10), (32, 1, 28, 10), (10, 3, 32, 10), (32, 3, 32, 10), (10, 3, 32, 50)]


def direct(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """torch's convolution, which vmap turns into a grouped one."""
    return F.conv2d(x, weight, bias)


def columns_of_each(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """im2col with a product for each image, so that no image is moved between them."""
    kernel = weight.shape[-1]
    side = x.shape[2] - kernel + 1
    return (weight.flatten(1) @ F.unfold(x, kernel) + bias[:, None]).unflatten(-1, (side, side))


def step(convolution: Convolution) -> Callable[[dict[str, Tensor], Tensor], dict[str, Tensor]]:
    """The gradient of one client's loss."""

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        x = channels_last(x) if x.is_cpu else x  # as the model has it
        for number in ("1", "2"):
            x = convolution(x, params["w" + number], params["b" + number])
            x = F.relu(F.max_pool2d(x.contiguous(), 2))
        return x.square().mean()

    return torch.func.grad(loss)


def ways() -> dict[str, Callable[[dict[str, Tensor], Tensor], dict[str, Tensor]]]:
    """What is compared: functions of parameters and images with a leading axis of lanes."""

    def one_by_one(params: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        found = [step(direct)({name: leaf[i] for name, leaf in params.items()}, x[i]) for i in range(len(x))]
        return {name: torch.stack([one[name] for one in found]) for name in params}

    batched = {"grouped": direct, "im2col": im2col, "im2col each": columns_of_each}
    return {"loop": one_by_one, **{name: torch.func.vmap(step(each)) for name, each in batched.items()}}


def inputs(lanes: int, channels: int, side: int, batch: int, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """Parameters of every lane, and its images."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"w1": (32, channels, 5, 5), "b1": (32,), "w2": (64, 32, 5, 5), "b2": (64,)}
    params = {name: 0.05 * torch.randn(lanes, *shape, generator=generator).to(device) for name, shape in shapes.items()}
    return params, torch.randn(lanes, batch, channels, side, side, generator=generator).to(device)


def error(params: dict[str, Tensor], x: Tensor) -> float:
    """The largest difference of a way from the loop, as a share of the largest entry of its leaf."""
    one_by_one, *others = (way(params, x) for way in ways().values())
    return max(
        float((each[name] - leaf).abs().max() / leaf.abs().max())
        for each in others
        for name, leaf in one_by_one.items()
    )


def launches() -> dict[str, int]:
    """What a step asks of a GPU, by way, counted on a device that is not there, beside which no GPU can be used."""
    import stub_device

    found = {}
    for name, way in ways().items():
        with stub_device.stub_device() as stub:
            given = inputs(4, 1, 28, 10, stub_device.DEVICE)
            before = stub.counts.launches
            way(*given)
            found[name] = stub.counts.launches - before
    return found


def depends_on_mates(way: Callable[[dict[str, Tensor], Tensor], dict[str, Tensor]], device: torch.device) -> bool:
    """Whether the bits of a lane change with the number of the others, or with what they are."""
    params, x = inputs(10, 1, 28, 10, device)
    whole = way(params, x)
    for lanes in ([0], [0, 3], [0, *range(9, 0, -1)]):
        some = way({name: leaf[lanes] for name, leaf in params.items()}, x[lanes])
        if any(not torch.equal(some[name][0], leaf[0]) for name, leaf in whole.items()):
            return True
    return False


def main() -> None:
    """Print launches, whether lanes depend on each other, milliseconds, and how far the ways are from the loop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    device = torch.device(options.device)
    fix_kernels(device, RuntimeConfig(), TrainingConfig())
    if device.type == "cpu":
        print("launches of a step with 4 lanes:", launches())
    print("bits depend on the other lanes:", {name: depends_on_mates(way, device) for name, way in ways().items()})
    print(f"{'lanes':>5} {'images':>10} {'batch':>5}  " + "".join(f"{name:>13}" for name in ways()) + "   at most off")
    for situation in SITUATIONS:
        given = inputs(*situation, device)
        times: dict[str, list[float]] = {name: [] for name in ways()}
        for number in range(1 + options.repeats):
            for name, way in ways().items():
                took = seconds_of(functools.partial(way, *given), device)
                times[name] += [took] if number else []
        lanes, channels, side, batch = situation
        shown = "".join(f"{1000 * statistics.median(each):13.2f}" for each in times.values())
        print(f"{lanes:5} {f'{channels}x{side}x{side}':>10} {batch:5}  {shown}   {error(*given):.1e}", flush=True)


if __name__ == "__main__":
    main()
