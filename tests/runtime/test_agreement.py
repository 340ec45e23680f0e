"""Ranks that have come to different set-ups stop before the first round; a run continues on the devices it began on."""

from dataclasses import replace

import pytest
import torch
import yaml

import quick_run
from pflmpi.config import load as configuration
from pflmpi.errors import UserError
from pflmpi.experiment import build
from pflmpi.experiment.run import RankContext, run
from pflmpi.runtime.faults import CollectiveError
from pflmpi.store import run_folder
from thread_transport import run_ranks


@pytest.mark.parametrize(
    ("sections", "part"),
    [
        ({"training": {"lr": 0.2}}, "the configuration"),
        ({"data": {"limit": 399}}, "the configuration"),
        ({"runtime": {"server": "dedicated"}}, "the configuration"),
    ],
)
def test_a_rank_with_another_set_up_is_named(sections, part, tmp_path):
    def work(transport):
        raw = quick_run.settings(**(sections if transport.rank == 2 else {}))
        context = RankContext(transport, torch.device("cpu"), slots=3)
        run(configuration.parse(raw), tmp_path / "run", context, lambda _: None)

    with pytest.raises(CollectiveError, match=rf"rank 2: {part} is not rank 0's; use one environment"):
        run_ranks(3, work)
    assert run_folder.rounds(tmp_path / "run") == []


def test_a_rank_that_places_clients_elsewhere_is_named(tmp_path):
    def work(transport):
        context = RankContext(transport, torch.device("cpu"), slots=1 + transport.rank)
        run(configuration.parse(quick_run.settings()), tmp_path / "run", context, lambda _: None)

    with pytest.raises(CollectiveError, match="rank 1: the placement of clients is not rank 0's"):
        run_ranks(2, work)


def test_all_ranks_run_in_the_folder_of_rank_0(tmp_path):
    """Without `--out` it is named by the time, which may be another second on another rank."""

    def work(transport):
        context = RankContext(transport, torch.device("cpu"), slots=2)
        config = configuration.parse(quick_run.settings(training={"rounds": 1}))
        return run(config, tmp_path / f"run{transport.rank}", context, lambda _: None)

    assert run_ranks(2, work) == [tmp_path / "run0"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["run0"] and run_folder.rounds(tmp_path / "run0") == [0, 1]


def test_other_data_under_the_same_configuration_is_named(tmp_path):
    def work(transport):
        config = configuration.parse(quick_run.settings())
        federation = build.load_federation(config)
        if transport.rank == 1:
            federation = replace(federation, dataset=replace(federation.dataset, digest="0"))
        context = RankContext(transport, torch.device("cpu"), slots=2)
        run(config, tmp_path / "run", context, lambda _: None, federation=federation)

    with pytest.raises(CollectiveError, match="rank 1: the data is not rank 0's"):
        run_ranks(2, work)


def test_gpus_decide_the_executor_wherever_the_rank_itself_is():
    config = configuration.parse(quick_run.settings(model={"name": "cnn", "kernel": 3, "padding": 1, "hidden": 8}))

    def chosen(*gpu_models):
        return build.prepare(config, torch.device("cpu"), gpu_models)

    assert chosen().config.runtime.executor == "loop"
    assert chosen("A100").config.runtime.executor == "lanes", "rank 0 serves from the CPU"


def test_a_run_continues_on_its_own_devices_unless_others_are_allowed(tmp_path, monkeypatch):
    def recorded():
        return str(yaml.safe_load((run / "config.yaml").read_text())["recorded"]["device"])

    run = tmp_path / "run"
    quick_run.run(quick_run.settings(training={"rounds": 1}), run)
    began = recorded()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(UserError, match=rf"computed on {began}, and would be continued on riscv64.*mixed_gpus"):
        quick_run.resume(run, ("training.rounds=2",))
    assert recorded() == began
    quick_run.resume(run, ("training.rounds=2", "runtime.mixed_gpus=allow"))
    assert recorded() == f"{began} + riscv64"
