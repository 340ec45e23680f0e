"""The same bits under launchers as in this process, for each kind of message."""

import json
import os
import sys
from functools import cache
from pathlib import Path

import pytest

import everywhere_worker
import processes
from every_algorithm import MESSAGE_KINDS
from pflmpi.transports.detect import ALONE
from pflmpi.transports.inprocess import InProcessTransport

pytestmark = pytest.mark.slow

WORKER = Path(everywhere_worker.__file__)
LAUNCHES = [("mpirun", 5), ("torchrun", 3)]


def command(way, ranks):
    if way == "mpirun":
        return [str(processes.BIN / "mpirun"), "-n", str(ranks), sys.executable, str(WORKER)]
    return [str(processes.BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", str(WORKER)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """All cases of one launch; each launch is made once."""
    root = os.environ.get("PFLMPI_DATA")

    @cache
    def get(way, ranks):
        folder = tmp_path_factory.mktemp(f"{way}{ranks}")
        if way == "in process":
            return everywhere_worker.run_cases(InProcessTransport(), ALONE, folder, root)
        words = [*command(way, ranks), str(folder), *([root] if root else [])]
        done = processes.call(words, timeout=2 * processes.PATIENCE)
        assert done.returncode == 0, done.stderr
        outcomes = json.loads((folder / "results.json").read_text())
        assert outcomes.pop("transport") == ["mpi" if way == "mpirun" else "torch", ranks]
        return outcomes

    return get


@pytest.mark.parametrize("dataset", ["digits", "fashion_mnist"])
@pytest.mark.parametrize("way, ranks", LAUNCHES)
def test_state_and_scores_have_the_bits_of_a_run_in_process(way, ranks, dataset, results, request):
    if dataset != "digits":
        request.getfixturevalue("data_root")  # skips where there is no such data
    expected, outcomes = results("in process", 1), results(way, ranks)
    names = [name for name in outcomes if name.startswith(dataset)]
    assert len(names) == 2 * len(MESSAGE_KINDS)
    for key in ("digest", "rounds"):
        assert {name: outcomes[name][key] for name in names} == {name: expected[name][key] for name in names}, key


@pytest.mark.parametrize("way, ranks", LAUNCHES)
def test_models_folded_in_slices_have_the_bits_of_a_run_in_process(way, ranks, results):
    expected, outcomes = results("in process", 1), results(way, ranks)
    names = [name for name in outcomes if name.startswith("slices")]
    assert len(names) == 2
    assert {name: outcomes[name]["digest"] for name in names} == {name: expected[name]["digest"] for name in names}


def test_clients_are_uneven_and_few_of_them_take_part(results):
    for name, result in results("in process", 1).items():
        assert max(result["samples"]) > 2 * min(result["samples"]), name
        chosen = {tuple(selection["participants"]) for selection in result["rounds"]}
        if name != "slices 1.0":  # which all take part in
            assert {len(selection) for selection in chosen} == {3} and len(chosen) > 1, name
