"""The options of each command; nothing is imported here but what parses them."""

import argparse
from collections.abc import Mapping
from pathlib import Path

Parsers = Mapping[str, argparse.ArgumentParser]


def add_options(commands: Parsers) -> None:
    """Give each command its arguments and options."""
    for name in ("run", "resume", "probe", "partition", "sweep", "report", "submit", "plan"):
        commands[name].add_argument(
            "-s",
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            dest="overrides",
            help="override section.key",
        )
    for name in ("run", "partition", "plan"):
        commands[name].add_argument("config", type=Path, help="a YAML file (see `pflmpi schema`)")
    for name in ("resume", "inspect", "export", "probe"):
        commands[name].add_argument("run", type=Path, help="the folder of a run")
    _add_run_options(commands["run"], commands["resume"])
    _add_inspect_options(commands["inspect"])
    _add_export_options(commands["export"])
    _add_probe_options(commands["probe"])
    _add_table_options(commands["sweep"], commands["report"], commands["submit"])
    _add_cluster_options(commands["submit"], commands["status"])
    _add_place_options(commands["plan"], commands["doctor"])
    commands["partition"].add_argument(
        "--save", type=Path, metavar="FILE", help="write it, for `partition: {path: FILE}`"
    )
    for command in commands.values():
        command.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")


def _add_run_options(run: argparse.ArgumentParser, resume: argparse.ArgumentParser) -> None:
    run.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: runs/NAME-TIME)")
    run.add_argument(
        "--continue",
        action="store_true",
        dest="go_on",
        help="continue the run in --out if there is one (batch jobs that are requeued); it needs --out",
    )
    for command in (run, resume):
        command.add_argument(
            "--ranks",
            type=int,
            metavar="N",
            help="processes to start when started alone (default: one per GPU, or per core; 1 stays in this process)",
        )
        shown = command.add_mutually_exclusive_group()
        shown.add_argument("--quiet", action="store_true", help="no progress, only the result")
        shown.add_argument("--bar", action="store_true", help="a progress bar also where mpirun hides the terminal")


def _add_inspect_options(inspect: argparse.ArgumentParser) -> None:
    asked = inspect.add_mutually_exclusive_group()
    asked.add_argument("--digest", action="store_true", help="print the SHA-256 over server and clients")
    asked.add_argument(
        "--diff", type=int, nargs=2, metavar=("A", "B"), help="what changed from round A to round B, array by array"
    )
    asked.add_argument(
        "--verify", action="store_true", help="read every file of the run and name each problem; exit code 2 if any"
    )
    inspect.add_argument("--round", type=int, metavar="N", help="the checkpoint to look at (default: the newest)")


def _add_export_options(export: argparse.ArgumentParser) -> None:
    whose = export.add_mutually_exclusive_group(required=True)
    whose.add_argument("--client", type=int, metavar="K", help="the model that this client predicts with")
    whose.add_argument("--server", action="store_true", help="everything that the server keeps")
    export.add_argument("--round", type=int, metavar="N", help="the checkpoint (default: the newest)")
    export.add_argument(
        "-o",
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="a state dict: .pt (torch), .safetensors (library safetensors) or .npz (NumPy)",
    )
    export.add_argument(
        "--leaf",
        metavar="PATH",
        help="instead only this part of what the client or the server keeps, such as model or model/head; "
        "a dot for all of it (`pflmpi inspect RUN` lists the paths)",
    )
    export.add_argument("--force", action="store_true", help="overwrite FILE")


def _add_probe_options(probe: argparse.ArgumentParser) -> None:
    probe.add_argument("--round", type=int, metavar="N", help="the checkpoint (default: the newest)")
    probe.add_argument("--samples", type=int, default=256, metavar="N", help="at most so many test samples (256)")
    probe.add_argument(
        "--clients", type=int, default=20, metavar="N", help="at most so many clients, spread evenly (20)"
    )


def _add_table_options(
    sweep: argparse.ArgumentParser, report: argparse.ArgumentParser, submit: argparse.ArgumentParser
) -> None:
    sweep.add_argument("table", type=Path, help="a YAML file with rows, columns and seeds")
    sweep.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs (default: sweeps/NAME)")
    report.add_argument(
        "paths", type=Path, nargs="+", metavar="RUN|TABLE", help="folders of runs, or one YAML file with a table"
    )
    report.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="of runs: folder for the page and its figures (default: report); of a table: folder of its runs "
        "(default: sweeps/NAME)",
    )
    for command in (sweep, report, submit):
        command.add_argument("--seeds", type=int, metavar="N", help="only the first N seeds of the table")
        command.add_argument(
            "--only", action="append", default=[], metavar="PATTERN", help="only cells whose ROW/COLUMN is like this"
        )
    sweep.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    sweep.add_argument(
        "--ranks", type=int, metavar="N", help="processes of each run (default: cores or GPUs, shared among the jobs)"
    )
    sweep.add_argument("--dry-run", action="store_true", help="show what would be done, and start nothing")
    sweep.add_argument(
        "--cell", type=int, metavar="N", help="only the Nth of these cells, from 0 (a task of a job array)"
    )
    sweep.add_argument(
        "--launcher", default="", metavar="COMMAND", help="start each run with this, such as 'srun --mpi=pmix'"
    )
    report.add_argument("--write", type=Path, metavar="DIR", help="folder for the table (default: as --out)")


def _add_cluster_options(submit: argparse.ArgumentParser, status: argparse.ArgumentParser) -> None:
    submit.add_argument("config", type=Path, nargs="?", help="a YAML file; none with --array")
    submit.add_argument("--out", type=Path, metavar="DIR", help="folder (default: runs/NAME, sweeps/NAME)")
    submit.add_argument("--array", type=Path, metavar="TABLE", help="submit a sweep as a job array, a cell per task")
    submit.add_argument("--jobs", type=int, metavar="N", help="tasks of the array at a time (default: all)")
    submit.add_argument(
        "--mpi",
        choices=("none", "pmix", "pmi2"),
        default="none",
        help="what srun connects ranks with: pmix (Open MPI), pmi2 (MPICH), none (torch.distributed, the default)",
    )
    submit.add_argument(
        "--requeue", action="store_true", help="stop in time, requeue the job and go on, until all rounds are done"
    )
    submit.add_argument("--dry-run", action="store_true", help="print the batch script, and submit nothing")
    submit.epilog = (
        "any other --OPTION[=VALUE] is one of sbatch, such as --nodes=2 --ntasks=8 --gpus-per-task=1 --time=2:00:00"
    )
    status.add_argument("what", nargs="?", metavar="RUN|JOB", help="a run's folder or a job's id (default: my jobs)")


def _add_place_options(plan: argparse.ArgumentParser, doctor: argparse.ArgumentParser) -> None:
    plan.add_argument("--ranks", type=int, default=1, metavar="R", help="ranks to plan for (default: 1)")
    plan.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes they are spread over (default: 1)")
    plan.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs of each node (default: 0)")
    plan.add_argument("--memory", type=float, metavar="GIB", help="memory of a node (default: this one's)")
    plan.add_argument("--gpu-memory", type=float, metavar="GIB", help="memory of a GPU (default: this machine's)")
    plan.add_argument("--delay", type=float, metavar="MS", help="one way between nodes (default: as calibrated)")
    plan.add_argument(
        "--rate", type=float, metavar="MBIT", help="megabits per second between nodes (default: likewise)"
    )
    plan.add_argument("--calibrate", action="store_true", help="measure this machine anew")
    doctor.add_argument("--out", type=Path, metavar="DIR", help="look at this folder of a run (default: runs)")
    doctor.add_argument("--config", type=Path, metavar="CONFIG", help="look for this configuration's data too")
