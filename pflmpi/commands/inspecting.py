"""`pflmpi inspect`: what is in a checkpoint, whether it is whole, and its digest."""

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from pflmpi.commands.display import size
from pflmpi.errors import CheckpointError
from pflmpi.store import run_folder


def inspect(run: Path, round: int | None, digest_only: bool) -> None:
    """Show one checkpoint of a run (the newest good one by default), or only its digest.

    Raises:
        CheckpointError: no run, no such round, or a damaged one, with everything that is wrong.
    """
    newest, passed_over = run_folder.newest_good(run)
    console = Console()
    for problem in passed_over if not digest_only else []:
        console.print(f"damaged: {problem}", style="red")
    chosen = newest if round is None else round
    if chosen not in (there := run_folder.rounds(run)):
        raise CheckpointError(f"{run} has no checkpoint of round {chosen}; it has {', '.join(map(str, there))}")
    problems = run_folder.verify(run, chosen) if chosen != newest else []
    if problems:
        raise CheckpointError(f"round {chosen} is damaged: {'; '.join(problems)}; round {newest} is good")
    if digest_only:
        print(run_folder.digest(run, chosen))
        return
    console.print(_contents(run, chosen))
    console.print(f"checkpoints: {', '.join(map(str, there))}")
    console.print(f"digest: {run_folder.digest(run, chosen)}", soft_wrap=True)


def _contents(run: Path, round: int) -> Table:
    table = Table("array", "shape", "type", "size", title=f"{run}, round {round}", title_justify="left")
    layout = run_folder.read_layout(run, round)
    everyone = np.flatnonzero(layout.file >= 0)
    groups = {"server": run_folder.read_server(run, round)}
    for cohort, (_, arrays) in run_folder.read_clients(run, round, everyone).items():
        groups["clients" if len(layout.cohorts) == 1 else f"clients/{cohort}"] = arrays
    groups["metrics"], groups["bytes"] = run_folder.read_metrics(run, round), run_folder.read_bytes(run, round)
    for group, arrays in groups.items():
        for path, array in sorted(arrays.items()):
            value = f" = {array.item():.6g}" if array.ndim == 0 else ""
            table.add_row(f"{group}/{path}{value}", str(list(array.shape)), str(array.dtype), size(array.nbytes))
    return table
