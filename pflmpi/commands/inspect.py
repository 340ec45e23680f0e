"""Show what a run or a checkpoint in one file holds, check it, compare two rounds, print its digest.

pflmpi inspect runs/mine
pflmpi inspect runs/mine --diff 28 30
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pflmpi import arguments
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.terminal import console, print_json
from pflmpi.text import format_bytes, format_numbers, format_ranges

if TYPE_CHECKING:
    from rich.table import Table

    from pflmpi.analysis.difference import Change
    from pflmpi.store.one_file import Array


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a run, or a file that `pflmpi export --all` has written")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--digest", action="store_true", help="print the SHA-256 over server and clients")
    modes.add_argument(
        "--diff", type=int, nargs=2, metavar=("A", "B"), help="what changed from round A to round B, array by array"
    )
    modes.add_argument(
        "--verify", action="store_true", help="read every file of the run and name each problem; exit code 2 if any"
    )
    arguments.add_round(parser)
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    if options.round is not None and (options.diff is not None or options.verify):
        other = "--verify, which checks every file" if options.verify else "--diff, which names two rounds"
        raise ConfigError(f"--round {options.round} cannot go with {other}; leave one of them out")
    if options.run.is_file():
        options.run = options.run.resolve()  # files are not read through links, but the user may name one
        _show_file(options)
    elif options.verify:
        _verify(options.run, options.json)
    elif options.diff is not None:
        _show_difference(options.run, options.diff, options.json)
    else:
        _show_round(options.run, options)
    return 0


def _show_round(run: Path, options: argparse.Namespace) -> None:
    from pflmpi.analysis.run import read_run
    from pflmpi.store import run_folder, run_lock
    from pflmpi.store.one_file import Array

    number, rounds = _choose_round(run, options), run_folder.rounds(run)
    digest = run_folder.digest(run, number)
    if options.digest and not options.json:
        print(digest)
        return
    opened = read_run(run)
    checkpoint = opened.round(number)
    arrays = [
        Array(f"{group}/{path}", array.shape, array.dtype, array.nbytes, array.item() if array.ndim == 0 else None)
        for group in ("server", "clients", "metrics", "bytes", "normalisation")
        for path, array in sorted(getattr(checkpoint, group).items())
    ]
    if options.json:
        content = _checkpoint_as_json(run, number, rounds, digest, arrays)
        ending = {"stopped_early": opened.stopped_early or None, "written_by": run_lock.find_owner(run)}
        print_json({**content, "notes": opened.config_notes, **ending})
        return
    _show_arrays(f"{run}, round {number}", arrays)
    terminal = console()
    if checkpoint.normalisation.keys() >= {"mean", "std"}:
        mean, std = (format_numbers(checkpoint.normalisation[name].ravel().tolist()) for name in ("mean", "std"))
        terminal.print(f"samples are normalised: mean {mean}, deviation {std}", highlight=False)
    terminal.print(f"checkpoints: {', '.join(map(str, rounds))}")
    for note in opened.config_notes:
        terminal.print(note, soft_wrap=True, highlight=False)
    if fork := opened.forked_from:
        changed = ", ".join(fork.changes) or "nothing changed"
        terminal.print(f"fork of run {fork.run} after round {fork.round}: {changed}", soft_wrap=True, highlight=False)
    if early := opened.stopped_early:
        terminal.print(f"stopped early: {early}", soft_wrap=True)
    terminal.print(f"digest: {digest}", soft_wrap=True)
    if writer := run_lock.find_owner(run):
        terminal.print(f"being written by {writer}", soft_wrap=True)


def _choose_round(run: Path, options: argparse.Namespace) -> int:
    """The round of --round, or the newest good one; raise `CheckpointError` if it is missing or damaged."""
    from pflmpi.store import verify

    if options.round is None:
        newest, problems_of_newer = verify.find_newest_good(run, skips_unreadable=True)
        arguments.check_newest(run, newest, problems_of_newer, options.allow_older)
        return newest
    number: int = options.round
    if number not in (rounds := verify.list_rounds(run)):
        raise CheckpointError(f"{run} has no checkpoint of round {number}; it has {', '.join(map(str, rounds))}")
    if problems := verify.problems(run, number):
        newest, _ = verify.find_newest_good(run, skips_unreadable=True)
        raise CheckpointError(f"round {number} is damaged: {'; '.join(problems)}; round {newest} is good")
    return number


def _show_file(options: argparse.Namespace) -> None:
    """Check a checkpoint in one file, and show it; or only its digest, or that it is good."""
    from pflmpi.store import one_file

    path = options.run
    one_file.check(path, each_array=options.verify)
    if options.round is not None or options.diff is not None:
        raise ConfigError(f"{path} holds one round; leave --round and --diff out")
    if options.json:
        round = one_file.round(path)
        if options.verify:
            print_json(_verification_as_json(path, 1, path.stat().st_size, [round], []))
        else:
            content = _checkpoint_as_json(path, round, [round], one_file.digest(path), one_file.arrays(path))
            print_json({**content, "notes": [], "stopped_early": None, "written_by": None})
    elif options.digest:
        print(one_file.digest(path))
    elif options.verify:
        console().print(f"good: {path}, {format_bytes(path.stat().st_size)}", highlight=False)
    else:
        _show_arrays(str(path), one_file.arrays(path))
        console().print(f"digest: {one_file.digest(path)}", soft_wrap=True)


def _checkpoint_as_json(
    path: Path, round: int, rounds: Sequence[int], digest: str, arrays: "Sequence[Array]"
) -> dict[str, Any]:
    fields = [array._asdict() for array in arrays]
    return {"run": path, "round": round, "rounds": rounds, "digest": digest, "arrays": fields}


def _verification_as_json(
    run: Path, files: int, bytes: int, rounds: Sequence[int], problems: Sequence[str]
) -> dict[str, Any]:
    return {"run": run, "good": not problems, "files": files, "bytes": bytes, "rounds": rounds, "problems": problems}


def _show_arrays(title: str, arrays: "Sequence[Array]") -> None:
    from rich.table import Table

    table = Table("array", "shape", "type", "size")
    for path, shape, dtype, nbytes, value in arrays:
        number = "" if value is None else f" = {value:.6g}"
        table.add_row(f"{path}{number}", str(list(shape)), str(dtype), format_bytes(nbytes))
    _print_below(title, table)


def _print_below(title: str, table: "Table") -> None:
    """Print a title and a table below it; rich would wrap the title of a table at the table's width."""
    terminal = console(highlight=False)
    terminal.print(title, soft_wrap=True)
    terminal.print(table)


def _show_difference(run: Path, rounds: Sequence[int], as_json: bool) -> None:
    from rich.table import Table

    from pflmpi.analysis.difference import compute_changes
    from pflmpi.analysis.run import read_run
    from pflmpi.commands.progress import bar

    opened, (before, after) = read_run(run), rounds
    with bar("leaves") as update:
        changes = compute_changes(opened.round(before), opened.round(after), update)
    if as_json:
        print_json({"run": run, "before": before, "after": after, "arrays": [asdict(change) for change in changes]})
        return
    caption = "relative change: the norm of the difference over the norm before, of each client by itself"
    table = Table(caption=caption, style="")
    for name in ("array", "shape", "changed", "mean", "largest"):
        table.add_column(name, overflow="fold")
    for change in changes:
        table.add_row(*_row(change, before, after))
    _print_below(f"{run}, round {before} to {after}", table)
    console().print(f"changed: {sum(change.changed > 0 for change in changes)} of {len(changes)} arrays")


def _row(change: "Change", before: int, after: int) -> tuple[str, ...]:
    """The cells of an array: path, shape, what changed, mean and largest relative change."""
    shapes = ["" if shape is None else str(list(shape)) for shape in (change.shape_before, change.shape_after)]
    if not all(shapes):
        return change.path, "".join(shapes), f"only in round {before if shapes[0] else after}", "", ""
    if shapes[0] != shapes[1]:
        return change.path, " to ".join(shapes), "in shape", "", ""
    if not change.changed:
        return change.path, shapes[0], "unchanged", "", ""
    if not change.clients:
        return change.path, shapes[0], "changed", f"{change.mean:.3g}", ""
    client = "" if change.largest_client is None else f" (client {change.largest_client})"
    count = f"{change.changed} of {change.clients} clients"
    return change.path, shapes[0], count, f"{change.mean:.3g}", f"{change.largest:.3g}{client}"


def _verify(run: Path, as_json: bool) -> None:
    from pflmpi.analysis import integrity
    from pflmpi.analysis.run import read_run
    from pflmpi.commands.progress import bar
    from pflmpi.store import run_folder, verify

    opened = read_run(run)  # raises if there is no run
    terminal = console()
    num_expected, files = len(integrity.files(run)), []
    with bar("files") as update:
        for file in integrity.check(run):
            files.append(file)
            update(len(files), max(num_expected, len(files)))
            for problem in file.problems if not as_json else ():
                terminal.print(f"damaged: {problem}", style="red", soft_wrap=True, highlight=False)
    rounds = run_folder.rounds(run)
    if not rounds:
        raise CheckpointError(f"{run} has no checkpoint to check")
    num_bytes, damaged = sum(file.bytes for file in files), [file for file in files if file.problems]
    if as_json:
        problems = [problem for file in damaged for problem in file.problems]
        print_json(_verification_as_json(run, len(files), num_bytes, rounds, problems))
    text = f"{len(files)} files, {format_bytes(num_bytes)}, checkpoints {format_ranges(rounds)}"
    if damaged:
        newest, _ = verify.find_newest_good(run, skips_unreadable=True)
        raise CheckpointError(
            f"{len(damaged)} of {text} are damaged or miss another; round {newest} is the newest good checkpoint"
        )
    if as_json:
        return
    terminal.print(f"good: {text}", highlight=False)
    for note in opened.notes:
        terminal.print(note, soft_wrap=True, highlight=False)
