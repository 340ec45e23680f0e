"""The figures of a table, by hand from metrics files, and how they are printed and written."""

import csv
import math
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import yaml

import table_file
from pflmpi.analysis.metrics import parse_columns
from pflmpi.analysis.table import Entry, Value, compute_entries, pick_value
from pflmpi.analysis.table_text import format_entries_csv, format_latex, format_markdown, format_tables, format_tabular
from pflmpi.cli import main
from pflmpi.config.yaml_file import dump
from pflmpi.store import config_file, metrics_file, verify
from pflmpi.sweep.table import list_cells, load


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def metrics(run, scores):
    """Write the metrics of a run, None for a round without evaluation."""
    run.mkdir(parents=True)
    metrics_file.restart(run, 0)
    for round, of_round in enumerate(scores, 1):
        texts = ["", "", ""] if of_round is None else [f"{score:.6f}" for score in of_round]
        line = [round, 3, *texts]
        metrics_file.append(run, [*line, *[0] * (len(metrics_file.COLUMNS) - len(line))])
    return parse_columns(verify.metrics(run, len(scores)))


def made(cell, out, means):
    """Write what a sweep leaves of a cell: its configuration and the metrics of its run."""
    metrics(cell.run(out), [(mean, mean - 0.1, 0.25) for mean in means])
    cell.config(out).write_text(dump(cell.raw))
    rounds = max(cell.raw["training"]["rounds"], len(means))
    config_file.write(cell.run(out), dump(cell.raw | {"training": {**cell.raw["training"], "rounds": rounds}}))


def small(folder, **changes):
    """The small table with one column and two seeds, and its cells."""
    table = load(table_file.write(folder, columns={"few": {}}, **changes))
    return table, list_cells(table, [], None)


def of(table, among, out):
    return {entry.row: entry for entry in compute_entries(table, among, out)}


# --- figures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metric, figure, expected",
    [
        ("mean", "best", 50.0),
        ("mean", "last", 40.0),
        ("mean", "last10", (10 + 50 + 40) / 3),
        ("weighted", "best", 60.0),
        ("weighted", "last", 60.0),
        ("spread", "best", 30.0),  # of the round with the best mean
        ("spread", "last", 5.0),
    ],
)
def test_a_figure_is_taken_from_the_evaluated_rounds(metric, figure, expected, tmp_path):
    scores = [(0.1, 0.1, 0.4), (0.5, 0.2, 0.3), None, (0.4, 0.6, 0.05)]
    assert pick_value(metrics(tmp_path / "run", scores), metric, figure) == pytest.approx(expected)


def test_the_best_loss_is_the_lowest_and_values_sent_are_thousands_of_4_bytes():
    rounds = {"train_loss": [0.5, 0.75], "test_loss": [np.nan, 1.25], "up_bytes": [9000, 8000]}
    of_run = {name: np.array(values) for name, values in rounds.items()}
    assert pick_value(of_run, "train_loss", "best") == 0.5 and pick_value(of_run, "train_loss", "last") == 0.75
    assert pick_value(of_run, "test_loss", "best") == 1.25 and pick_value(of_run, "parameters", "best") == 2.0


def test_the_last_ten_are_evaluated_rounds(tmp_path):
    scores = []
    for percent in range(1, 13):
        scores += [None, (percent / 100, 0, 0)]
    assert pick_value(metrics(tmp_path / "run", scores), "mean", "last10") == pytest.approx(7.5)  # 3 to 12


def test_the_best_of_the_last_twenty_evaluated_rounds_leaves_out_those_before(tmp_path):
    scores = [(0.9, 0.9, 0), (0.4, 0.2, 0), None, *[(0.3, 0.1, 0)] * 18, (0.1, 0.1, 0)]
    lines = metrics(tmp_path / "run", scores)
    assert pick_value(lines, "mean", "best20") == pytest.approx(40) and pick_value(
        lines, "mean", "best"
    ) == pytest.approx(90)


def test_seeds_give_mean_and_sample_standard_deviation_beside_the_published_figure(tmp_path):
    table, among = small(tmp_path, published={"FedAvg": {"few": [86, 0.5]}, "Local": {"few": 70}})
    made(among[0], tmp_path / "out", [0.8, 0.7])
    made(among[1], tmp_path / "out", [0.6, 0.9])
    entry = of(table, among, tmp_path / "out")["FedAvg"]
    assert entry.ours == Value(pytest.approx(85.0), pytest.approx(50**0.5))  # of 80 and 90, over n - 1
    assert entry.last_ten == Value(pytest.approx(75.0), pytest.approx(0.0))
    assert entry.over_clients == pytest.approx(25.0)
    assert entry.published == Value(86, 0.5) and entry.difference == pytest.approx(-1.0)
    assert (entry.finished, entry.seeds, entry.done, entry.rounds, entry.state) == (2, 2, 4, 4, "")


def test_a_seed_without_a_value_is_said_to_be_left_out(tmp_path):
    table, among = small(tmp_path)
    made(among[0], tmp_path / "out", [0.8, 0.7])
    made(among[1], tmp_path / "out", [math.nan, math.nan])
    entry = of(table, among, tmp_path / "out")["FedAvg"]
    assert entry.ours == Value(pytest.approx(80.0)) and entry.finished == 2
    assert any(
        note.endswith("the mean is of 1 of 2 seeds; of the others the metric has no value") for note in entry.notes
    )


@pytest.mark.parametrize("other, expected", [(math.inf, Value(math.inf)), (-math.inf, None)])
def test_the_mean_of_infinite_seeds_has_no_deviation_and_of_both_signs_there_is_none(other, expected, tmp_path):
    table, among = small(tmp_path)
    made(among[0], tmp_path / "out", [0.8, math.inf])
    made(among[1], tmp_path / "out", [0.8, other])
    entry = of(table.model_copy(update={"figure": "last"}), among, tmp_path / "out")["FedAvg"]
    assert entry.ours == entry.last_ten == expected


def test_one_seed_has_no_spread(tmp_path):
    table, among = small(tmp_path, seeds=[5])
    made(among[0], tmp_path / "out", [0.8, 0.7])
    assert of(table, among, tmp_path / "out")["FedAvg"].ours == Value(pytest.approx(80.0), None)


@pytest.mark.parametrize(
    "first, second, state, finished",
    [
        ([], [], "missing", 0),
        ([0.5], [], "1/4 rounds", 0),
        ([0.5, 0.6], [0.5], "1 of 2 seeds", 1),
        ([0.5, 0.6, 0.7], [], "other configuration", 0),  # more rounds than the table wants
    ],
)
def test_what_is_missing_or_unfinished_is_told(first, second, state, finished, tmp_path):
    table, among = small(tmp_path)
    for cell, means in zip(among[:2], (first, second), strict=True):
        if means:
            made(cell, tmp_path / "out", means)
    entry = of(table, among, tmp_path / "out")["FedAvg"]
    assert (entry.state, entry.finished) == (state, finished)
    assert (entry.ours is None) == (finished == 0)


def test_a_run_made_with_another_configuration_is_not_used(tmp_path):
    table, among = small(tmp_path)
    made(among[0], tmp_path / "out", [0.5, 0.6])
    made(among[1], tmp_path / "out", [0.7, 0.8])
    raw = yaml.safe_load(among[0].config(tmp_path / "out").read_text())
    raw["training"]["lr"] = 0.5
    among[0].config(tmp_path / "out").write_text(yaml.safe_dump(raw))
    entry = of(table, among, tmp_path / "out")["FedAvg"]
    assert entry.ours == Value(pytest.approx(80.0)) and entry.state == "1 of 2 seeds, other configuration"
    raw["training"].pop("lr")
    raw["checkpoint"] = {"keep": 1}  # a continuation may change it
    among[0].config(tmp_path / "out").write_text(yaml.safe_dump(raw))
    assert of(table, among, tmp_path / "out")["FedAvg"].state == ""


def test_a_default_that_is_written_or_left_out_makes_no_other_configuration(tmp_path):
    table, among = small(tmp_path)
    made(among[0], tmp_path / "out", [0.5, 0.6])
    made(among[1], tmp_path / "out", [0.7, 0.8])
    path = among[0].config(tmp_path / "out")
    defaults = {"momentum": 0.0, "participation": 1}
    path.write_text(dump(among[0].raw | {"training": {**among[0].raw["training"], **defaults}}))
    assert of(table, among, tmp_path / "out")["FedAvg"].state == ""
    path.write_text(dump(among[0].raw | {"training": {**among[0].raw["training"], "momentum": 0.9}}))
    entry = of(table, among, tmp_path / "out")["FedAvg"]
    assert entry.state == "1 of 2 seeds, other configuration"
    why = f"training.momentum = 0.9 in {path}, 0.0 in the table; change the table back, or sweep into another --out"
    assert f"{among[0].run(tmp_path / 'out')} is left out: {why}" in entry.notes


def test_seeds_that_unlike_code_has_made_are_shown_and_said_to_be(tmp_path, capsys):
    _, among = small(tmp_path)
    for cell, code in zip(among[:2], ("d2e1", "35f7"), strict=True):
        made(cell, tmp_path / "out", [0.8, 0.7])
        config_file.write(cell.run(tmp_path / "out"), dump(cell.raw | {"recorded": {"code": {"algorithm": code}}}))
    out = str(tmp_path / "out")
    assert main(["table", str(tmp_path / "small.yaml"), "--out", out, "--only", "FedAvg/*", "--write", out]) == 0
    note = "FedAvg, few: the code of algorithm is not the same in all seeds"
    assert note in capsys.readouterr().out
    for kind in ("md", "tex"):
        text = (tmp_path / "out" / f"small.{kind}").read_text()
        assert note in text and "80.00" in text


@pytest.mark.parametrize("name, mine", [("data.npz", True), ("hard/data.npz", False), ("other.npz", False)])
def test_a_run_on_another_file_is_left_out_unless_the_file_has_moved(name, mine, tmp_path):
    base = {**table_file.TABLE["base"], "data": {"path": "easy/data.npz"}}
    _, among = small(tmp_path, base=base)
    for cell in among[:2]:
        made(cell, tmp_path / "out", [0.5, 0.6])
    for folder in ("easy", "hard"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "data.npz").touch()
    if name == "data.npz":
        (tmp_path / "easy" / name).rename(tmp_path / name)
    entry = of(*small(tmp_path, base={**base, "data": {"path": name}}), tmp_path / "out")["FedAvg"]
    assert entry.state == ("" if mine else "other configuration")
    assert any("data.path = " in note for note in entry.notes) is not mine


def test_runs_that_record_other_data_than_the_first_of_the_same_section_are_named(tmp_path):
    base = {**table_file.TABLE["base"], "data": {"path": "my.npz"}}
    table, among = small(tmp_path, base=base)
    for cell, digest in zip(among, ("a", "b", "a", "b"), strict=True):
        made(cell, tmp_path / "out", [0.5, 0.6])
        config_file.write(cell.run(tmp_path / "out"), dump(cell.raw | {"recorded": {"data": digest}}))
    first, *_ = (cell.run(tmp_path / "out") for cell in among)
    for row, entry in of(table, among, tmp_path / "out").items():
        run = tmp_path / "out" / row / "few" / "seed1"
        assert f"{row}, few: {run} has other data than {first} (recorded.data)" in entry.notes
        assert sum("recorded.data" in note for note in entry.notes) == 1


def test_a_run_with_more_rounds_than_training_stop_of_the_table_allows_is_left_out(tmp_path):
    base = {**table_file.TABLE["base"], "training": {"rounds": 4}}
    _, among = small(tmp_path, base=base)
    made(among[0], tmp_path / "out", [0.5, 0.4, 0.3, 0.6])
    stop = {"metric": "accuracy_mean", "patience": 2}
    table, among = small(tmp_path, base={**base, "training": {"rounds": 4, "stop": stop}})
    made(among[1], tmp_path / "out", [0.7, 0.6, 0.5])
    entry = of(table, among, tmp_path / "out")["FedAvg"]
    assert (entry.state, entry.ours) == ("1 of 2 seeds, other configuration", Value(pytest.approx(70.0)))
    assert any("it has 4 rounds, and ends after 3 in the table" in note for note in entry.notes)


def test_a_damaged_run_is_left_out_and_named(tmp_path):
    table, among = small(tmp_path)
    made(among[0], tmp_path / "out", [0.5, 0.6])
    made(among[1], tmp_path / "out", [0.7, 0.8])
    path = metrics_file.path(among[0].run(tmp_path / "out"))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[2], lines[1]]))
    entry = of(table, among, tmp_path / "out")["FedAvg"]
    assert entry.ours == Value(pytest.approx(80.0)) and entry.state == "1 of 2 seeds, 1 damaged"
    (problem,) = entry.problems
    assert problem.startswith(f"{path} is damaged: line 2 is of round '2', and 1 is to follow")
    assert any("are not vouched for by a checkpoint" in note for note in entry.notes), "a run without checkpoints"


# --- texts --------------------------------------------------------------------------------------------------------


def an_entry(row, **known):
    values = {"ours": None, "last_ten": None, "over_clients": None, "published": None, "state": ""}
    return Entry(row, "few", **{**values, **known}, finished=2, seeds=2, done=4, rounds=4)


ENTRIES = [
    an_entry("FedAvg", ours=Value(98.634, 0.1), last_ten=Value(98.5, 0.2), published=Value(98.66, 0.3)),
    an_entry("Local", published=Value(70), state="1/4 rounds"),
]


def test_markdown_has_ours_beside_the_published_figure_and_then_the_mean_of_the_last_ten(tmp_path):
    table, _ = small(tmp_path, notes=["first note"])
    text = format_markdown(table, ENTRIES, ["pflmpi sweep small.yaml"])
    assert [line for line in text.splitlines() if line.startswith(("|", "#", "-", "pflmpi"))] == [
        "# A small table",
        "pflmpi sweep small.yaml",
        "|  | few |",
        "| --- | --- |",
        "| FedAvg | 98.63 ± 0.10, 2 seeds (98.66 ± 0.30, -0.03, inside) |",
        "| Local | 1/4 rounds (70.00) |",
        "|  | few |",
        "| --- | --- |",
        "| FedAvg | 98.50 ± 0.20 |",
        "| Local | 1/4 rounds |",
        "- first note",
    ]
    assert "nobody 2024, table 3" in text and "best round" in text
    assert "mean of the last 10 evaluated rounds, or of all of fewer" in text


def test_markdown_shows_names_with_signs_of_tables_and_of_html(tmp_path):
    table = load(table_file.write(tmp_path, columns={"<few>": {}}, rows={"x|y <b>": {}}))
    entry = replace(an_entry("x|y <b>", ours=Value(98.634)), column="<few>", partitions=["1a"])
    text = format_markdown(table, [entry], [])
    assert r"| x\|y \<b> | 98.63, 2 seeds |" in text and r"- partition of \<few>: 1a" in text


def test_csv_has_a_line_with_everything_for_each_cell(tmp_path):
    table, _ = small(tmp_path)
    first, second = csv.DictReader(format_entries_csv(table, ENTRIES).splitlines())
    assert first == {
        "row": "FedAvg", "column": "few", "metric": "mean", "figure": "best", "ours": "98.63", "ours_std": "0.10",
        "published": "98.66", "published_spread": "0.30", "difference": "-0.03", "fit": "inside", "last10": "98.50",
        "last10_std": "0.20", "std_over_clients": "", "seeds_finished": "2", "seeds": "2", "rounds_done": "4",
        "rounds": "4", "state": "done", "partitions": "",
    }  # fmt: skip
    assert (second["ours"], second["difference"], second["fit"], second["state"]) == ("", "", "", "1/4 rounds")


@pytest.mark.parametrize(
    "ours, published, expected",
    [
        (98.36, Value(98.66, 0.3), "inside"),
        (98.34, Value(98.66, 0.3), "within a point"),
        (95.0, Value(98.66, 4.0), "inside"),
        (99.66, Value(98.66), "within a point"),
        (99.67, Value(98.66), "outside"),
        (97.65, Value(98.66, 0.3), "outside"),
    ],
)
def test_a_figure_is_inside_the_published_spread_within_a_point_or_outside(ours, published, expected, tmp_path):
    entry = an_entry("FedAvg", ours=Value(ours, 0.1), published=published)
    table, _ = small(tmp_path)
    (line,) = csv.DictReader(format_entries_csv(table, [entry]).splitlines())
    assert line["fit"] == expected
    assert format_tables(table, [entry])[0].rows[0][1].endswith(f", {expected})")
    alone = format_tables(table, [an_entry("FedAvg", ours=Value(ours, 0.1))])
    assert "(published, " in format_tables(table, [entry])[0].caption and not any(
        "published" in entry.caption for entry in alone
    )
    losses, _ = small(tmp_path, metric="train_loss")
    (line,) = csv.DictReader(format_entries_csv(losses, [entry]).splitlines())
    assert line["fit"] == "" and expected not in format_tables(losses, [entry])[0].rows[0][1]  # no points


def test_a_row_of_latex_does_not_begin_with_what_the_command_before_takes():
    rows = format_tabular(["", "a"], [["[12pt]", "1"], ["* b", "2"], ["c*", "3"]])[4:-2]
    assert rows == [r"{}[12pt] & 1 \\", r"{}* b & 2 \\", r"c* & 3 \\"]


def test_latex_escapes_text_and_sets_signs(tmp_path):
    table, _ = small(tmp_path, rows={"A & B_1 #50% {x}": {}}, title="100 %\nsure")
    lines = format_latex(table, [an_entry("A & B_1 #50% {x}", **vars_of(ENTRIES[0]))], []).splitlines()
    assert r"A \& B\_1 \#50\% \{x\} & 98.63 $\pm$ 0.10, 2 seeds (98.66 $\pm$ 0.30, $-$0.03, inside) \\" in lines
    assert lines.count(r"\begin{tabular}{lr}") == lines.count(r"\bottomrule") == 2
    assert lines[:2] == ["% 100 %", "% sure"]


def test_latex_sets_signs_that_its_default_font_encoding_has_in_no_place_of_their_own():
    (row,) = format_tabular(["", "a"], [["x<1|y>2", "1"]])[4:-2]
    assert row == r"x\textless{}1\textbar{}y\textgreater{}2 & 1 \\"


def vars_of(entry):
    return {name: getattr(entry, name) for name in ("ours", "last_ten", "published")}


# --- the command --------------------------------------------------------------------------------------------------


def test_the_report_prints_the_table_and_writes_three_files(tmp_path, capsys):
    _, among = small(tmp_path, published={"FedAvg": {"few": 80}}, notes=["a [note]"])
    made(among[0], tmp_path / "out", [0.8, 0.7])
    words = ["table", str(tmp_path / "small.yaml"), "--out", str(tmp_path / "out"), "--seeds", "1"]
    assert main([*words, "--write", str(tmp_path / "written")]) == 0
    shown = capsys.readouterr().out
    ours = "80.00, 1 seed (80.00, +0.00, within a point)"
    for text in ("A small table", ours, "75.00", "missing", "nobody 2024, table 3", "a [note]"):
        assert text in shown
    assert sorted(path.name for path in (tmp_path / "written").iterdir()) == ["small.csv", "small.md", "small.tex"]
    text = (tmp_path / "written" / "small.md").read_text(encoding="utf-8")
    assert "80.00, 1 seed (80.00, +0.00, within a point)" in text
    assert f"pflmpi sweep {tmp_path}/small.yaml --out {tmp_path}/out --seeds 1\n" in text
    assert not list((tmp_path / "out").glob("small.*"))


def test_a_table_written_again_replaces_its_files_which_stay_whole_until_then(tmp_path):
    _, among = small(tmp_path)
    made(among[0], tmp_path / "out", [0.8, 0.7])
    words = ["table", str(tmp_path / "small.yaml"), "--out", str(tmp_path / "out"), "--write"]
    assert main([*words, str(tmp_path / "written")]) == 0
    shutil.copytree(tmp_path / "written", tmp_path / "before", copy_function=os.link)
    assert main([*words, str(tmp_path / "written")]) == 0
    assert [path.stat().st_nlink for path in (tmp_path / "written").iterdir()] == [1, 1, 1], "another file each"


@pytest.mark.parametrize("kind", ["md", "csv", "tex"])
def test_a_file_that_is_no_earlier_table_is_not_replaced(kind, tmp_path, capfd):
    words = ["table", str(table_file.write(tmp_path)), "--write", str(tmp_path)]
    assert main(words) == 0
    for other in {"md", "csv", "tex"} - {kind}:
        (tmp_path / f"small.{other}").unlink()
    assert main(words) == 0, "it is known by itself"
    (tmp_path / f"small.{kind}").write_text("mine")
    assert main(words) == 2 and (tmp_path / f"small.{kind}").read_text() == "mine"
    assert f"small.{kind} exists and is not known to be from pflmpi; choose another --write" in capfd.readouterr().err


def test_the_partitions_of_the_finished_runs_are_printed_and_written(tmp_path, capsys):
    _, among = small(tmp_path)
    for cell, digit in zip(among, "aabc", strict=True):
        made(cell, tmp_path / "out", [0.8, 0.7] if digit != "c" else [0.8])
        of_run = cell.raw | {"recorded": {"partition": digit * 64}}
        config_file.write(cell.run(tmp_path / "out"), dump(of_run))
    assert main(["table", str(tmp_path / "small.yaml"), "--out", str(tmp_path / "out")]) == 0
    assert f"partition of few: {'a' * 12}, {'b' * 12}\n" in capsys.readouterr().out
    lines = csv.DictReader((tmp_path / "out" / "small.csv").read_text().splitlines())
    assert [line["partitions"] for line in lines] == ["a" * 12, "b" * 12]
    assert f"- partition of few: {'a' * 12}, {'b' * 12}\n" in (tmp_path / "out" / "small.md").read_text()


def test_only_leaves_the_other_rows_and_columns_out(tmp_path, capsys):
    path = table_file.write(tmp_path)
    words = ["table", str(path), "--out", str(tmp_path / "out"), "--write", str(tmp_path / "out")]
    assert main([*words, "--only", "FedAvg/few", "--only", "Local/many*"]) == 0
    rows = [line for line in (tmp_path / "out" / "small.md").read_text().splitlines() if line.startswith("|")]
    assert rows[0] == "|  | few | many (M) |" and rows[2:4] == ["| FedAvg | missing | - |", "| Local | - | missing |"]
    assert main([*words, "--only", "fedavg/f*"]) == 0
    text = (tmp_path / "out" / "small.md").read_text()
    assert "many" not in text and "Local" not in text and "--only 'fedavg/f*'" in text
    capsys.readouterr()
    assert main([*words, "--only", "Fedper/*"]) == 2


@pytest.mark.parametrize("part", [["--only", "Local/*"], ["--seeds", "1"]])
def test_a_part_of_a_table_is_not_written_over_the_whole_one(part, tmp_path, capsys):
    words = ["table", str(table_file.write(tmp_path)), "--out", str(tmp_path / "out")]
    assert main([*words, "--only", "*", "--seeds", "2"]) == 0
    files = {file: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert len(files) == 3 and str(min(files)) in capsys.readouterr().out
    assert main([*words, *part]) == 0
    assert {file: file.read_bytes() for file in (tmp_path / "out").iterdir()} == files
    assert "a part of the table, which is not written; --write DIR writes it" in capsys.readouterr().out


def test_another_figure_of_the_same_runs_is_reported_from_them(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, among = small(tmp_path, seeds=[0])
    made(among[0], tmp_path / "sweeps" / "small", [0.8, 0.7])
    figure = {"title": "The spread", "source": "nobody 2024, figure 4", "metric": "spread", "runs_of": "small.yaml"}
    (tmp_path / "figure.yaml").write_text(yaml.safe_dump(figure))
    assert main(["table", "figure.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "The spread" in shown and "25.00" in shown and (tmp_path / "sweeps" / "small" / "figure.md").exists()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"seeds": [1]}, ["seeds", "small.yaml", "runs_of"]),
        ({"runs_of": "../small.yaml"}, ["'../small.yaml'", "folder of this file"]),
        ({"runs_of": "figure.yaml"}, ["figure.yaml", "no runs of its own"]),
        ({"runs_of": "absent.yaml"}, ["absent.yaml"]),
    ],
)
def test_a_figure_of_other_runs_decides_nothing_about_them(changes, words, tmp_path, capfd):
    table_file.write(tmp_path)
    figure = {"title": "t", "source": "nobody 2024, figure 4", "runs_of": "small.yaml", **changes}
    (tmp_path / "figure.yaml").write_text(yaml.safe_dump(figure))
    assert main(["table", str(tmp_path / "figure.yaml")]) == 2
    shown = capfd.readouterr().err
    assert all(word in shown for word in words), shown


def test_overrides_choose_the_runs_that_were_made_with_them(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table, _ = small(tmp_path, seeds=[0])
    quick = ["training.rounds=1", "training.lr=0.5"]
    made(list_cells(table, quick, None)[0], tmp_path / "sweeps" / "small", [0.8])
    overrides = [word for text in quick for word in ("-s", text)]
    assert main(["table", "small.yaml", *overrides]) == 0
    assert "80.00" in capsys.readouterr().out
    assert (tmp_path / "sweeps" / "small" / "small.tex").exists()
    assert main(["table", "small.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "80.00" not in shown and "other configuration" in shown
