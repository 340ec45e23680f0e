"""Operations, copies and waits that a round asks of a GPU, counted on a device that is not there.

    python benchmarks/launches.py                                        # 5 algorithms on 3 models
    python benchmarks/launches.py --write tests/golden/gpu_costs.csv     # the figures that tests hold every change to

A round of 3 clients with 2 steps each, the executor that a GPU would get. Times do not follow from counts alone, but an
operation of a small model costs a GPU several microseconds however little it computes.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))

import torch

import stub_costs
from stub_device import Counts

ALGORITHMS = ("fedavg", "fedproto", "fedgmh-full", "ditto", "fedamp")
MODELS = {"mlp": "lanes", "cnn": "lanes", "resnet18": "loop"}


def table() -> None:
    """Print what a round costs: all launches and copies, those of a step, and copies of a unit in each direction."""
    print(f"{'':24} {'a round':>39}   {'a step':>15}   {'a unit':>13}   {'its test':>13}")
    print(f"{'':24} {'launches':>9} {'up':>9} {'down':>9} {'waits':>9}   {'launches':>8} {'copies':>6}", end="")
    print(f"   {'up':>6} {'down':>6}   {'up':>6} {'down':>6}")
    for model, executor in MODELS.items():
        for case in ALGORITHMS:
            done, costs = stub_costs.measure(case, model, executor)
            launches, up, down, waits = sum(done.counts.values(), Counts()).row()
            print(f"{case:12} {model:8} {executor:5} {launches:6} {up:9} {down:9} {waits:9}", end="")
            print(f"   {costs.step:8} {costs.step_copies:6}", end="")
            print(f"   {costs.unit_up:6} {costs.unit_down:6}   {costs.test_up:6} {costs.test_down:6}", flush=True)


def main() -> None:
    """Print the table, or write the figures of all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.write is None:
        table()
        return
    stub_costs.write(options.write, {one: stub_costs.measure(*one)[1] for one in stub_costs.situations()})


if __name__ == "__main__":
    main()
