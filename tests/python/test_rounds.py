"""Rounds of another process, read from its metrics file while it is written."""

import math
from pathlib import Path

from pflmpi.python.rounds import NewRounds, Row
from pflmpi.store import metrics_file

LINE = {"participants": 3, "accuracy_mean": "0.5", "accuracy_weighted": "", "up_bytes": 10}


def add(run: Path, *rounds: int) -> None:
    for round in rounds:
        line = {**dict.fromkeys(metrics_file.COLUMNS, 0), **LINE, "round": round}
        metrics_file.append(run, list(line.values()))


def numbers(rows: NewRounds) -> list[int | float]:
    return [row["round"] for row in rows]


def test_a_line_becomes_numbers_and_what_is_missing_nan(tmp_path: Path) -> None:
    with NewRounds(tmp_path, 0) as rows:
        assert not list(rows)
        metrics_file.restart(tmp_path, 0)
        add(tmp_path, 1)
        (row,) = list[Row](rows)
    assert (row["round"], row["participants"], row["accuracy_mean"], row["up_bytes"]) == (1, 3, 0.5, 10)
    assert math.isnan(row["accuracy_weighted"]) and isinstance(row["round"], int)


def test_each_round_comes_once_also_when_the_file_is_written_anew(tmp_path: Path) -> None:
    with NewRounds(tmp_path, 0) as rows:
        metrics_file.restart(tmp_path, 0)
        add(tmp_path, 1, 2)
        assert numbers(rows) == [1, 2]
        with open(metrics_file.path(tmp_path), "a") as file:
            file.write("3,3,0.")  # is being written
        assert numbers(rows) == []
        metrics_file.restart(tmp_path, 1)  # after the loss of a rank
        add(tmp_path, 2, 3)
        assert numbers(rows) == [3]


def test_the_rounds_of_an_earlier_run_are_not_new(tmp_path: Path) -> None:
    metrics_file.restart(tmp_path, 0)
    add(tmp_path, 1, 2, 3)
    with NewRounds(tmp_path, 2) as rows:
        assert numbers(rows) == []
        metrics_file.restart(tmp_path, 2)
        add(tmp_path, 3, 4)
        assert numbers(rows) == [3, 4]


def test_a_file_that_is_written_anew_twice_between_two_looks_is_another(tmp_path: Path) -> None:
    """As a continuation does; the second may get the number of the first, which is free by then."""
    metrics_file.restart(tmp_path, 0)
    add(tmp_path, 1, 2)
    with NewRounds(tmp_path, 2) as rows:
        for _ in range(2):
            metrics_file.restart(tmp_path, 2)
        add(tmp_path, 3)
        assert numbers(rows) == [3]
