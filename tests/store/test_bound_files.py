"""Files are bound to their round and run: one put in another's place is found, and nothing continues from it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

import quick_run
from described import about
from pflmpi.analysis.integrity import check
from pflmpi.analysis.run import open_run
from pflmpi.cli import main
from pflmpi.errors import CheckpointError, UserError
from pflmpi.store import checked_hdf5, config_file, metrics_file, probe_file, run_folder, verify


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
def test_a_file_of_another_round_or_run_is_found(exchange, runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    assert verify.problems(run, 3) == []
    exchange(run, runs[1])
    (problem,) = verify.problems(run, 3)
    assert EXCHANGES[exchange] in problem


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.__name__)
def test_nothing_is_exported_or_drawn_from_an_exchanged_file(exchange, runs, tmp_path, capfd):
    run = shutil.copytree(runs[0], tmp_path / "run")
    exchange(run, runs[1])
    reading = [
        ["export", "--client", "1", "--round", "3", "-o", str(tmp_path / "model.npz")],
        ["probe", "--round", "3"],
    ]
    for words in [*reading, ["inspect", "--diff", "2", "3"]]:
        assert main([words[0], str(run), *words[1:]]) == 2
        assert EXCHANGES[exchange] in capfd.readouterr().err, words
    assert main(["report", str(run), "--out", str(tmp_path / "report")]) == 2
    assert EXCHANGES[exchange] in capfd.readouterr().err
    assert main(["inspect", str(run), "--digest"]) == 2
    assert EXCHANGES[exchange] in capfd.readouterr().err
    good = main(["inspect", str(run), "--digest", "--allow-older"]) == 0
    assert good == (exchange in (older_shard, foreign_round, renamed_round)), "the round before is good"
    assert EXCHANGES[exchange] in capfd.readouterr().err, "whose digest it is, or is not, is said"


def foreign_probe(run: Path, other: Path) -> None:
    shutil.copy(probe_file.path(other, 3), run)


def renamed_probe(run: Path, other: Path) -> None:
    shutil.move(probe_file.path(run, 3), probe_file.path(run, 2))


def shard_as_probe(run: Path, other: Path) -> None:
    shutil.copy(shard(run, 3), probe_file.path(run, 3))


@pytest.mark.parametrize(
    ("exchange", "problem"),
    [(foreign_probe, "belongs to run"), (renamed_probe, "is the probe of round 3"), (shard_as_probe, "cannot be read")],
)
def test_a_probe_of_another_round_or_run_is_found_and_not_drawn(exchange, problem, runs, tmp_path):
    run, other = (shutil.copytree(each, tmp_path / each.name) for each in runs)
    layers = {"fc1": probe_file.LayerSimilarity(np.arange(2), np.eye(2))}
    for each in (run, other):
        probe_file.write(each, probe_file.Probe(3, 9, layers))
    assert not any(checked.problems for checked in check(run))
    exchange(run, other)
    (checked,) = [each for each in check(run) if each.problems]
    assert problem in checked.problems[0]
    with pytest.raises(CheckpointError, match=problem):
        probe_file.read(run, probe_file.rounds(run)[0])


def lost_config(run: Path) -> None:
    (run / "config.yaml").unlink()


def dangling_round(run: Path) -> None:
    (run / "round_00002.h5").unlink()
    (run / "round_00002.h5").symlink_to("nowhere")


@pytest.mark.parametrize(("loss", "problem"), [(lost_config, "is missing"), (dangling_round, "is a link to nothing")])
def test_a_lost_file_is_named(loss, problem, runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    loss(run)
    assert [problem in text for checked in check(run) for text in checked.problems] == [True]


def with_attribute(run: Path, name: str, value: object, section: str = "run") -> Path:
    """Change an attribute of the file of round 3, as with a tool; None removes it."""
    path = run / "round_00003.h5"

    def fill(writer: checked_hdf5.HDF5Writer) -> None:
        with h5py.File(path, "r") as source:
            for group in source:
                source.copy(group, writer.file)
            writer.about |= about(source)
        attributes = writer.about[section] | {name: value}
        writer.about[section] = {key: item for key, item in attributes.items() if item is not None}

    draft = path.with_name("other")
    checked_hdf5.write(draft, fill)
    draft.replace(path)
    return path


@pytest.mark.parametrize("name", ["personal", "diagnostics"])
@pytest.mark.parametrize("value", [None, "x", "[1]", "5"])
def test_a_description_that_cannot_be_read_is_one_error(name, value, runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    with_attribute(run, name, value)
    with pytest.raises(CheckpointError, match=f"attribute '{name}'|before checkpoints described themselves"):
        getattr(open_run(run).round(3), name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("round", None), ("run", [0, 0]), ("config", 5), ("round", "x")],
        *[("versions", "x"), ("unseen", True), ("class_names", "{")],
        pytest.param("fork", "[" * 100_000, id="fork-deep"),
    ],
)
def test_a_round_file_that_does_not_say_what_it_is_is_found(name, value, runs, tmp_path):
    """Its checksum is right: it was changed with a tool."""
    run = shutil.copytree(runs[0], tmp_path / "run")
    path = with_attribute(run, name, value)
    problems = verify.problems(run, 3)
    assert len(problems) == 1 and f"{path} cannot be read: its attribute '{name}' is" in problems[0], problems
    assert verify.find_newest_good(run)[0] == 2


def test_a_configuration_in_a_checkpoint_that_is_none_is_one_error(runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    with_attribute(run, "config", "3")
    (run / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"newest checkpoint of .* holds no mapping"):
        open_run(run)


@pytest.mark.parametrize("mean", [None, 3.0])
def test_a_round_is_shown_whatever_it_says_of_its_samples(mean, runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    with_attribute(run, "mean", mean, "normalisation")
    assert main(["inspect", str(run)]) == 0


@pytest.mark.parametrize("config", ["a: 1", "model: 3", "model: []"])
def test_a_model_is_exported_whatever_the_configuration_says_of_it(config, runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    with_attribute(run, "config", config)
    (run / "config.yaml").unlink()
    assert main(["export", str(run), "--client", "0", "-o", str(tmp_path / "model.npz")]) == 0


def test_a_run_continues_from_the_round_before_an_exchanged_file(runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    renamed_round(run, runs[1])
    assert verify.find_newest_good(run)[0] == 2
    assert quick_run.resume(run, ("training.rounds=3",), 3) == quick_run.digest(runs[0])


def test_a_run_whose_files_are_all_foreign_is_refused(runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    foreign_config(run, runs[1])
    with pytest.raises(UserError, match="belongs to run"):
        quick_run.resume(run, ("training.rounds=4",))


def test_a_changed_value_in_the_configuration_is_refused_by_name(runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("\n  lr: 0.1\n", "\n  lr: 0.3\n"))
    before = config.read_bytes()
    with pytest.raises(UserError, match=r"training.lr = 0.1 in the run, 0.3 now; put it back"):
        quick_run.resume(run, ("training.rounds=4",))
    assert config.read_bytes() == before


def test_a_damaged_metrics_file_is_refused_and_a_missing_one_begins_anew(runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    metrics = run / "metrics.csv"
    content = metrics.read_bytes()
    for damaged, place in (
        (content.replace(b"\n2,", b"\n7,"), "lines 3 to 4"),
        (content.replace(b"\n3,", b"\n8,"), "line 4"),  # told by the checksums of the rounds before
        (content[: len(content) // 2], "line"),
        (b"\0\xff" + content, "line"),
        (b"", "line"),
    ):
        metrics.write_bytes(damaged)
        (problem,) = [text for checked in check(run) if checked.path == metrics for text in checked.problems]
        assert "differs from what round 3 recorded" in problem or "damaged" in problem or "cannot be read" in problem
        with pytest.raises(
            UserError, match=rf"metrics.csv differs .* in {place}.*; put it back from a copy, or delete it"
        ):
            quick_run.resume(run, ("training.rounds=4",))
        assert metrics.read_bytes() == damaged
    metrics.unlink()
    more = ["-s", "training.rounds=4", "-s", "output.events=true"]
    assert quick_run.command(["resume", str(run), *more, "--ranks=1"]) == 0
    lines = metrics.read_text().splitlines()
    assert [line.split(",")[:3] for line in lines[1:4]] == [[str(round), "0", ""] for round in (1, 2, 3)]
    assert lines[4].startswith("4,") and lines[4].split(",")[2] and not problems(run)


def test_a_finished_run_without_its_metrics_has_new_ones_and_goes_on_from_them(runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    metrics_file.path(run).unlink()
    quick_run.resume(run)
    opened, lost = open_run(run), metrics_file.read_bytes(run)
    assert opened.notes == ["metrics of round 1-3 are lost: totals, and costs to a target, are unknown"]
    assert not problems(run)
    opened.fork(tmp_path / "fork", round=2)
    assert metrics_file.read_bytes(tmp_path / "fork") == b"".join(lost.splitlines(keepends=True)[:3])
    assert main(["export", str(run), "--all", "-o", str(tmp_path / "one.h5")]) == 0
    assert main(["inspect", str(tmp_path / "one.h5"), "--verify"]) == 0
    metrics_file.path(run).write_bytes(lost.replace(b"\n2,0", b"\n2,1"))
    with pytest.raises(UserError, match="differs from what round 3 recorded"):
        quick_run.resume(run)


def problems(run: Path) -> list[str]:
    return [problem for checked in check(run) for problem in checked.problems]


@pytest.mark.parametrize("name", ["config.yaml", "partition.csv", "metrics.csv"])
def test_every_flipped_bit_of_a_text_file_is_found(name, runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    content = (run / name).read_bytes()
    for position in range(0, len(content), 1 + len(content) // 15):
        bit = 1 << position % 8
        (run / name).write_bytes(content[:position] + bytes([content[position] ^ bit]) + content[position + 1 :])
        try:
            assert any(name in problem for checked in check(run) for problem in checked.problems), (position, bit)
        except UserError as error:  # no longer a run
            assert name in str(error)


def test_a_damaged_partition_file_is_written_anew_by_a_continuation(runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    content = (run / "partition.csv").read_bytes()
    shutil.copy(runs[1] / "partition.csv", run)
    assert "partition.csv is not as it was written" in problems(run)[0]
    quick_run.resume(run, ("training.rounds=4",))
    assert (run / "partition.csv").read_bytes() == content and not problems(run)


def test_a_damaged_configuration_is_refused_and_once_deleted_taken_from_the_checkpoint(runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    config = run / "config.yaml"
    content = config.read_bytes()
    config.write_bytes(content.replace(b"rounds: 3", b"rounds: 7"))  # which may change, but not so
    with pytest.raises(UserError, match=r"config.yaml is not as it was written.*delete it"):
        quick_run.resume(run)
    config.unlink()
    assert quick_run.resume(run) == quick_run.digest(runs[0])
    quick_run.resume(run, ("training.rounds=4",))
    assert not problems(run) and run_folder.read_attributes(run, 4)["run"] == run_folder.read_attributes(run, 3)["run"]


def test_fewer_rounds_than_a_run_has_are_refused_and_as_many_leave_its_configuration_alone(runs, tmp_path, capsys):
    run = shutil.copytree(runs[0], tmp_path / "run")
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(UserError, match=r"training.rounds = 1, but .* has reached round 3"):
        quick_run.resume(run, ("training.rounds=1",))
    assert quick_run.resume(run, (), 2) == quick_run.digest(runs[0])
    assert "nothing is left to do" in capsys.readouterr().out
    assert (run / "config.yaml").read_bytes() == before


def test_other_names_of_the_same_classes_are_said_on_resume(tmp_path, caplog):
    x, y = np.random.default_rng(0).random((60, 8), np.float32), np.arange(60) % 3
    names = np.array(["ant", "cat", "dog"])
    np.savez(tmp_path / "numbers.npz", x=x, y=y)
    np.savez(tmp_path / "texts.npz", x=x, y=names[y])
    quick_run.run(quick_run.settings(data={"name": None, "path": str(tmp_path / "numbers.npz")}), tmp_path / "run")
    for file in ("texts", "numbers"):
        quick_run.resume(tmp_path / "run", (f"data.path={tmp_path / file}.npz",))
    (message,) = (record.message for record in caplog.records if "classes" in record.message)
    assert message == 'the names of the classes are now ["ant", "cat", "dog"]; up to round 3 they are ["0", "1", "2"]'


def test_a_directory_with_the_name_of_a_checkpoint_is_refused(runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    (run / "round_00006.h5").mkdir()
    with pytest.raises(UserError, match=r"round_00006.h5 is a directory named like a checkpoint; move it away"):
        quick_run.resume(run, ("training.rounds=7",))


def test_a_configuration_that_was_cut_off_is_damaged(tmp_path):
    quick_run.run(quick_run.settings(), tmp_path)
    lines = config_file.path(tmp_path).read_text().splitlines(keepends=True)
    cut = [line for line in lines[:-1] if not line.startswith(("  run: ", "  partition_csv: "))]
    for text, good in ((lines, True), (lines[:-1], False), (cut, False), ([], False)):
        config_file.path(tmp_path).write_text("".join(text))
        assert (config_file.find_damage(tmp_path) is None) == good, len(text)
