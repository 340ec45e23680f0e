"""Files are bound to their round and run: one put in another's place is found, and nothing continues from it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import quick_run
from pflmpi.analysis.integrity import check
from pflmpi.errors import UserError
from pflmpi.store import run_folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs that differ in their seed, with all checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (3, 4):
        quick_run.run(quick_run.settings(seed=seed, checkpoint={"keep": 0}), folder / str(seed), 2)
    return folder / "3", folder / "4"


def shard(run: Path, round: int) -> Path:
    return sorted((run / "shards").glob(f"round_{round:05d}_*.h5"))[0]


def older_shard(run: Path, other: Path) -> None:
    shutil.copy(shard(run, 1), shard(run, 3))


def foreign_shard(run: Path, other: Path) -> None:
    shutil.copy(shard(other, 0), shard(run, 0))


def foreign_round(run: Path, other: Path) -> None:
    shutil.copy(other / "round_00003.h5", run)


def renamed_round(run: Path, other: Path) -> None:
    shutil.copy(run / "round_00002.h5", run / "round_00003.h5")


def foreign_config(run: Path, other: Path) -> None:
    shutil.copy(other / "config.yaml", run)


EXCHANGES: dict[Callable[[Path, Path], None], str] = {
    older_shard: "is not the file that the checkpoint was made of",
    foreign_shard: "is not the file that the checkpoint was made of",
    foreign_round: "belongs to run",
    renamed_round: "is the file of round 2",
    foreign_config: "belongs to run",
}


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.__name__)
def test_a_file_of_another_round_or_run_is_found(
    exchange: Callable[[Path, Path], None], runs: tuple[Path, Path], tmp_path: Path
) -> None:
    run = shutil.copytree(runs[0], tmp_path / "run")
    assert run_folder.verify(run, 3) == []
    exchange(run, runs[1])
    (problem,) = run_folder.verify(run, 3)
    assert EXCHANGES[exchange] in problem


def test_a_run_continues_from_the_round_before_an_exchanged_file(runs: tuple[Path, Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs[0], tmp_path / "run")
    renamed_round(run, runs[1])
    assert run_folder.newest_good(run)[0] == 2
    assert quick_run.resume(run, ("training.rounds=3",), 3) == quick_run.digest(runs[0])


def test_a_run_whose_files_are_all_foreign_is_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs[0], tmp_path / "run")
    foreign_config(run, runs[1])
    with pytest.raises(UserError, match="belongs to run"):
        quick_run.resume(run, ("training.rounds=4",))


def test_a_changed_value_in_the_configuration_is_refused_by_name(runs: tuple[Path, Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs[0], tmp_path / "run")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(" lr: 0.1,", " lr: 0.3,"))
    before = config.read_bytes()
    with pytest.raises(UserError, match=r"training.lr = 0.3, written with 0.1; put it back"):
        quick_run.resume(run, ("training.rounds=4",))
    assert config.read_bytes() == before


def test_a_moved_and_copied_run_is_the_same_run(runs: tuple[Path, Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs[0], tmp_path / "elsewhere")
    quick_run.resume(run, ("training.rounds=4",))
    assert run_folder.newest_good(run) == (4, [])


def test_a_checkpoint_of_round_0_survives_its_continuation(tmp_path: Path) -> None:
    whole = quick_run.run(quick_run.settings(), tmp_path / "whole")
    quick_run.run(quick_run.settings(training={"rounds": 0}), tmp_path / "parts", 1)
    assert run_folder.verify(tmp_path / "parts", 0) == []
    assert quick_run.resume(tmp_path / "parts", ("training.rounds=3",), 2) == whole


def test_a_damaged_metrics_file_is_found_and_restored_by_a_continuation(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    run = shutil.copytree(runs[0], tmp_path / "run")
    metrics = run / "metrics.csv"
    whole = metrics.read_bytes()
    for damaged in (whole.replace(b"\n2,", b"\n7,"), whole[: len(whole) // 2], b"\0\xff" + whole, b""):
        metrics.write_bytes(damaged)
        (problem,) = [text for each in check(run) if each.path == metrics for text in each.problems]
        assert "differs from what round 3 recorded" in problem or "damaged" in problem or "cannot be read" in problem
        quick_run.resume(run, ("training.rounds=3",))
        assert metrics.read_bytes() == whole


@pytest.mark.parametrize(
    "exchange", [older_shard, foreign_round, renamed_round], ids=lambda exchange: exchange.__name__
)
def test_inspect_verify_names_an_exchanged_file(
    exchange: Callable[[Path, Path], None], runs: tuple[Path, Path], tmp_path: Path
) -> None:
    run = shutil.copytree(runs[0], tmp_path / "run")
    assert not [problem for each in check(run) for problem in each.problems]
    exchange(run, runs[1])
    assert any(EXCHANGES[exchange] in problem for each in check(run) for problem in each.problems)
