"""What was measured as tables: two CSV files for analysis, and one table to read."""

from collections.abc import Iterator
from math import isnan

import numpy as np

from pflmpi import atomic
from pflmpi.errors import ConfigError
from pflmpi.scaling.experiment import WARM_UP
from pflmpi.scaling.results import PARTS, MeasuredRun, Point, Results
from pflmpi.text import comma_separated, size

Value = str | int | float
_ABOUT = ("device", "transport", "nodes", "host", "cpu", "cores", "gpus", "driver")
_VERSIONS = ("pflmpi", "torch", "numpy", "mpi4py", "h5py", "python", "commit", "job")
TITLES = {
    "strong": "the same work on every number of ranks",
    "weak": "clients in proportion to the ranks",
    "packing": "the same cores or GPUs on every number of ranks",
}


def write_tables(results: Results) -> None:
    """Write scale.csv, a line for each run, and rounds.csv, a line for each round of each."""
    lines = [line for point in results.points for line in _run_lines(results, point)]
    header: list[Value] = list(lines[0])
    rounds = [line for point in results.measured for run in point.runs for line in _round_lines(point, run)]
    files: dict[str, list[list[Value]]] = {
        "scale.csv": [header, *([line[str(name)] for name in header] for line in lines)],
        "rounds.csv": [list(rounds[0]) if rounds else ["ranks"], *(list(line.values()) for line in rounds)],
    }
    try:
        for name, content in files.items():
            atomic.write(results.out / name, comma_separated(content).encode())
    except OSError as error:
        raise ConfigError(f"cannot write in {results.out}: {error.strerror}; {atomic.remedy(error)}") from error


def readable(results: Results) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table to read, a row for each point."""
    scaling = results.scaling
    named = {"weak": ["clients"], "packing": ["threads"], "strong": []}[scaling.mode]
    columns = ["ranks", *named, "seconds per round", "quartiles", "speed-up", "efficiency", *PARTS]
    columns += ["largest rank", "all ranks", "bytes between ranks", "bits"]
    return columns, [_row(results, point, named) for point in results.points]


def _row(results: Results, point: Point, named: list[str]) -> list[str]:
    first = [str(point.ranks), *(str(getattr(point, name)) for name in named)]
    if not point.runs:
        return [*first, "failed" if any(point.problems.values()) else "not measured", *[""] * (len(PARTS) + 7)]
    low, high = point.spread
    return [
        *first,
        f"{point.seconds:.3f}",
        f"{low:.3f}-{high:.3f}",
        f"{results.speed_up(point):.2f}",
        f"{results.efficiency(point):.2f}",
        *(f"{seconds:.3f}" for seconds in point.parts.values()),
        _bytes(point.most("memory_rank_bytes")),
        _bytes(point.most("memory_bytes")),
        _bytes(point.wire_bytes),
        "the same" if point.same_bits else "OTHER",
    ]


def _bytes(count: float) -> str:
    return "" if isnan(count) else size(count)


def _run_lines(results: Results, point: Point) -> Iterator[dict[str, Value]]:
    """The lines of a point in scale.csv."""
    clients = "" if point.clients is None else point.clients
    head: dict[str, Value] = {"mode": results.scaling.mode, "ranks": point.ranks, "threads": point.threads}
    head |= {"clients": clients}
    by_repeat = {run.one.repeat: run for run in point.runs}
    for repeat in range(1, results.scaling.repeats + 1):
        run = by_repeat.get(repeat)
        measured = _figures(results, point, run) if run else _unmeasured(point.problems[repeat])
        plan = {f"predicted_{name}": point.plan.get(name, "") for name in ("memory_rank_bytes", "wire_bytes")}
        known = run.record if run else {}
        yield {
            **head,
            "repeat": repeat,
            **measured,
            **plan,
            **{name: str(known.get(name, "")) for name in (*_ABOUT, *_VERSIONS)},
        }


def _figures(results: Results, point: Point, run: MeasuredRun) -> dict[str, Value]:
    seconds = float(np.median(run.seconds))
    speed_up = results.speed_up(point) * point.seconds / seconds
    low, high = np.quantile(run.seconds, [0.25, 0.75]).tolist()
    memory = {name: int(run.columns[name].max()) for name in ("memory_rank_bytes", "memory_bytes")}
    return {
        "rounds": len(run.seconds),
        "seconds": seconds,
        "seconds_low": low,
        "seconds_high": high,
        **{f"{name}_seconds": float(run.measured(run.parts[name]).mean()) for name in PARTS},
        **{name: value or "" for name, value in memory.items()},
        "wire_bytes": run.wire_bytes,
        "speed_up": speed_up,
        "ideal_speed_up": results.ideal(point),
        "efficiency": speed_up / results.ideal(point),
        "digest": run.record["digest"],
        "same_bits": int(point.same_bits),
        "problem": "",
    }


def _unmeasured(problem: str) -> dict[str, Value]:
    names = ("seconds", "seconds_low", "seconds_high", *(f"{name}_seconds" for name in PARTS), "memory_rank_bytes")
    others = ("memory_bytes", "wire_bytes", "speed_up", "ideal_speed_up", "efficiency", "digest", "same_bits")
    return {"rounds": 0, **dict.fromkeys((*names, *others), ""), "problem": problem or "not measured"}


def _round_lines(point: Point, run: MeasuredRun) -> Iterator[dict[str, Value]]:
    columns = run.columns
    for i, number in enumerate(columns["round"].tolist()):
        yield {
            "ranks": point.ranks,
            "threads": point.threads,
            "repeat": run.one.repeat,
            "round": number,
            "warm_up": int(i < WARM_UP),
            "seconds": float(columns["seconds"][i]),
            **{f"{name}_seconds": float(values[i]) for name, values in run.parts.items()},
            "participants": int(columns["participants"][i]),
            "wire_bytes": int(columns["wire_up_bytes"][i] + columns["wire_down_bytes"][i]),
        }
