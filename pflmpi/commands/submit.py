"""Write a Slurm batch script and submit it.

pflmpi submit configs/quickstart.yaml --ntasks=4 --time=30 --requeue
pflmpi submit --array configs/papers/digits.yaml --ntasks=4 --time=60 -- --exclusive
"""

import argparse
import hashlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pflmpi import arguments, atomic
from pflmpi.cluster import batch_script
from pflmpi.errors import CheckpointError, ConfigError, RunError
from pflmpi.text import join_truncated, printable

if TYPE_CHECKING:
    from pflmpi.cluster.batch_script import BatchScript
    from pflmpi.config.load import Config

_WARNING = "USR1@120"  # signal to the ranks, and seconds before the time limit: enough for a round and a checkpoint
_TRIAL = 10  # minutes
_AUTO = (
    "auto: --ntasks=auto asks for as many ranks as have clients to train at once, on the GPUs or cores of the nodes; "
    "--mem=auto for what `pflmpi plan` counts for a node; --time=auto for 1.5 times what the rounds left would take by "
    "the slowest earlier run of the configuration, on as many ranks of the partition, in the folder or beside it, and "
    "10 minutes. Of an array the largest and the longest cell decide."
)
_SITE_OPTIONS = ("account", "partition", "qos", "mpi", "setup", "srun")


class Pending(NamedTuple):
    """The work left for a job."""

    out: Path  # the folder of the run or sweep
    words: list[str]  # the arguments of `pflmpi` in the job
    runs: "Mapping[Path, Config]"  # the folders of the runs that are not done, with their configurations
    text: str  # of the configuration or table, which the job reads from a copy: it runs what was submitted
    tasks: Sequence[int] = ()  # the number of each of these runs among the cells of the sweep; empty for a single run
    cells: int = 0  # how many cells the sweep has; 0 for a single run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, nargs="?", help="a YAML file; none with --array")
    arguments.add_overrides(parser)
    arguments.add_out(parser, "folder of the run, or of the sweep's runs (default: runs/NAME, sweeps/NAME)")
    arguments.add_changed_code(parser)
    parser.add_argument(
        "--mpi",
        choices=("none", "pmix", "pmi2"),
        help="what srun connects ranks with: pmix (Open MPI), pmi2 (MPICH), none (torch.distributed, the default)",
    )
    parser.add_argument("--srun", metavar="OPTIONS", help="more options of srun, such as --srun='--cpu-bind=cores'")
    requeue = "stop before the time limit, requeue the job and resume, until all rounds are done"
    parser.add_argument("--requeue", action="store_true", help=requeue)
    restarts = "start all ranks of a run again from the newest checkpoint when one was lost, up to N times (default: 0)"
    parser.add_argument("--restarts", type=int, default=0, metavar="N", help=restarts)
    setup = "shell commands that the job runs first, such as `module load`; may set `python`, the interpreter"
    parser.add_argument("--setup", type=Path, metavar="FILE", help=setup)
    site = "take what is not given from this profile in ~/.config/pflmpi/site.yaml, or in the file of $PFLMPI_SITE"
    parser.add_argument("--site", metavar="NAME", help=site)
    trial = "with --time=auto: where no earlier run says it, wait for a job of so many minutes that measures it "
    parser.add_argument("--trial", type=int, nargs="?", const=_TRIAL, metavar="MIN", help=f"{trial}(default: {_TRIAL})")
    parser.add_argument("--wait", action="store_true", help="wait for the end, with the exit code of the run")
    parser.add_argument("--test-only", action="store_true", help="say when the job would start, and submit nothing")
    parser.add_argument("--dry-run", action="store_true", help="print the batch script, and submit nothing")
    parser.add_argument("--array", type=Path, metavar="TABLE", help="submit a sweep as a job array, a cell per task")
    pack = "with --array: cells that a task runs one after another, within one --time (default: 1)"
    parser.add_argument("--pack", type=int, metavar="N", help=pack)
    parser.add_argument("--jobs", type=int, metavar="N", help="with --array: tasks at a time (default: all)")
    arguments.add_cells(parser)
    arguments.add_failed_cells(parser)
    parser.epilog = _AUTO
    parser.set_defaults(parsed=None)  # the `Config` of `pflmpi.submit`, which is in no file
    batch_script.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    pending = pending_work(options)
    if pending is not None and (options.dry_run or options.test_only):
        _preview(options, pending)
        return 0
    if pending is not None:
        pending = run_trial(options, pending)
    if pending is None:
        return 0
    number, log = submit(options, pending)
    cells = f", {len(pending.tasks)} of {pending.cells} cells" if pending.cells else ""
    print(printable(f"job {number}: {pending.out}{cells}"))
    print(f"log: {log}")
    print(f"watch: pflmpi status {number}    or: tail -F {'*'.join(map(shlex.quote, log.split('*')))}", flush=True)
    return _wait(number, pending) if options.wait else 0


def _preview(options: argparse.Namespace, pending: Pending) -> None:
    """Print the batch script of a job, or with --test-only when it would start."""
    from pflmpi.cluster.submission import predict_start

    job = _job(options, pending)
    _show_implied(options, job, pending)
    if options.test_only:
        print(predict_start(job, os.environ))
        return
    print(batch_script.format_script(job), end="")
    copy, overrides = copy_path(pending.out, pending.text), arguments.words_of_overrides(options)
    source = options.array or shlex.join([str(options.config), *overrides])
    instead = f"is written by `pflmpi submit`; to submit this yourself, put {source} in its place"
    print(f"pflmpi: {copy}, which the job reads, {instead}", file=sys.stderr)
    for folder in {path for path in batch_script.log_folders(job.options) if not path.is_dir()}:
        print(f"pflmpi: make {folder}/ before you submit this; Slurm would not", file=sys.stderr)


def _wait(number: str, pending: Pending) -> int:
    from pflmpi.cluster.status import describe_folder
    from pflmpi.cluster.waiting import wait

    code = wait([number], [*pending.runs], os.environ, bool(pending.tasks))
    print("\n".join(map(printable, describe_folder(pending.out, os.environ))))
    return code


def pending_work(options: argparse.Namespace) -> Pending | None:
    """The work left of a run or a sweep; None, and a line on the terminal, if it is done."""
    _apply_site(options)
    _check(options)
    return _pending_run(options) if options.array is None else _pending_sweep(options)


def run_trial(options: argparse.Namespace, pending: Pending) -> Pending | None:
    """Run a trial if --trial is given and no earlier run tells the time that --time=auto needs; return the work left.

    Raises:
        RunError: the trial ended before a round was complete.
    """
    if options.trial is None:
        return pending
    from pflmpi.cluster.jobs import wait
    from pflmpi.forecast.job import Unmeasured

    with suppress(Unmeasured):
        _job(options, pending)
        return pending
    short = argparse.Namespace(**{**vars(options), "time": str(options.trial), "requeue": False, "pack": None})
    number, log = submit(short, pending)
    print(f"job {number}, a trial of at most {options.trial} minutes, is waited for; log: {log}", flush=True)
    ended = wait(number, os.environ)
    left = pending_work(options)
    try:
        if left is not None:
            _job(options, left)
    except Unmeasured as error:
        states = ", ".join(dict.fromkeys(job.never_starts or job.state for job in ended)) or "unknown to Slurm"
        raise RunError(
            f"job {number}, the trial, has ended ({states}) before a round was complete; its log is {log}; mend what "
            "that says, or give a longer --trial=MIN, or a --time"
        ) from error
    return left


def submit(options: argparse.Namespace, pending: Pending) -> tuple[str, str]:
    """Submit a job for the work left; return its id, and its log with `*` for the task number of an array."""
    from pflmpi.cluster import submission

    job = _job(options, pending)
    submission.refuse_second(pending.out, options.sbatch, os.environ)
    submission.make_folders(*batch_script.log_folders(job.options), pending.out)
    write_copy(pending)
    _show_implied(options, job, pending)
    rounds = 0 if pending.tasks else pending.runs[pending.out].training.rounds
    tasks = list_tasks(pending, options.pack)
    cells = {str(run.relative_to(pending.out)): task for run, task in zip(pending.runs, tasks, strict=False)}
    number = submission.submit(job, pending.out, os.environ, rounds, cells)
    return number, submission.format_log_path(job.options, number)


def copy_path(out: Path, text: str) -> Path:
    """The file beside a run or a sweep with the configuration or table that its job reads; another text has another.

    >>> str(copy_path(Path("runs/a"), "seed: 0"))
    'runs/a.e1fb525f.yml'
    """
    # Not .yaml: beside the cell seed0 of a sweep, seed0.e1fb525f.yaml would be another cell.
    return Path(f"{out}.{hashlib.sha256(text.encode()).hexdigest()[:8]}.yml")


def write_copy(pending: Pending) -> None:
    path = copy_path(pending.out, pending.text)
    with atomic.explain_write_error(path, "choose another --out"):
        atomic.write(path, pending.text.encode())


def _apply_site(options: argparse.Namespace) -> None:
    """Fill options that were not given from the site profile, which becomes `options.profile`."""
    options.profile = None
    if options.site is not None:
        from pflmpi.cluster import site

        options.profile = site.load(options.site, os.environ)
        for name in _SITE_OPTIONS:
            if getattr(options, name) is None:
                setattr(options, name, getattr(options.profile, name))
        options.setup = options.setup and Path(options.setup)


def _check(options: argparse.Namespace) -> None:
    if (options.config is None) == (options.array is None):
        raise ConfigError("submit takes a CONFIG, for one run, or --array TABLE, for a sweep; give one of them")
    if options.array is None:
        for name in ("jobs", "pack", "seeds", "only", "failed", "anew"):
            if getattr(options, name) not in (None, [], False):
                raise ConfigError(f"--{name} is for --array TABLE, which is not given; leave it out")
    arguments.check_least(options, jobs=1, pack=1, restarts=0, trial=1)
    if options.trial is not None and options.time != "auto":
        raise ConfigError("--trial is for --time=auto, which is not given; leave it out")
    batch_script.check_setup(options.setup)


def _pending_run(options: argparse.Namespace) -> Pending | None:
    """The work left of a run; None, and a line on the terminal, if it is done."""
    from pflmpi.cluster.submission import refuse_transport
    from pflmpi.config import yaml_file
    from pflmpi.config.load import load
    from pflmpi.sweep.pending import find_run_state

    if options.parsed is None:
        arguments.check_config(options.config)
    config = options.parsed or load(options.config, options.overrides)
    refuse_transport(config, _launch(options)[0])
    out = options.out or Path("runs") / options.config.stem
    state = find_run_state(out, config, options.changed_code)
    if state.problem:
        raise CheckpointError(state.problem)
    if state.state == "done":
        reason = f"all {state.done} rounds of {out} are done"
        if state.done < config.training.rounds:
            reason = f"{out} has stopped early after round {state.done}"
        print(f"{reason}; nothing to submit")
        return None
    text = yaml_file.dump(config.resolved())
    words = ["run", str(copy_path(out, text)), *arguments.words_of_changed_code(options), "--out", str(out)]
    words += ["--continue", *["--has-checkpoint"] * (state.state == "continue")]
    return Pending(out, words, {out: config}, text)


def _pending_sweep(options: argparse.Namespace) -> Pending | None:
    """The cells of a table that are not done; None, and a line on the terminal, if all are done."""
    from pflmpi.cluster.submission import refuse_transport
    from pflmpi.sweep import table as tables
    from pflmpi.sweep.pending import has_failed, plan_cell

    out, mpi = tables.find_sweep_folder(options.array, options.out), _launch(options)[0]
    cells = tables.load_cells(options.array, options.overrides, options.seeds, options.only)
    tasks = {}
    for number, (cell, config) in enumerate(cells):
        refuse_transport(config, mpi)
        task = plan_cell(cell, config, out, None, options.changed_code, options.anew)
        if task.state != "done" and (not options.failed or has_failed(task, out)):
            tasks[number] = task
    if others := [task for task in tasks.values() if task.state == "other"]:
        names = [task.cell.name for task in others[1:]]
        more = f" ({len(names)} more: {join_truncated(names)})" if names else ""
        raise CheckpointError(f"{others[0].cell.name}: {others[0].problem}; or leave it out with --only{more}")
    if not tasks:
        reason = f"no cell in {out} has failed" if options.failed else f"all {len(cells)} cells in {out} are done"
        print(f"{reason}; nothing to submit")
        return None
    runs = {task.cell.run(out): cells[number][1] for number, task in tasks.items()}
    text = tables.dump(tables.load(options.array))
    words = arguments.words_of_cells(copy_path(out, text), out, options)
    words = ["sweep", *words, *arguments.words_of_changed_code(options), *["--anew"] * options.anew]
    return Pending(out, words, runs, text, [*tasks], len(cells))


def _launch(options: argparse.Namespace) -> tuple[str, list[str], str]:
    """The --mpi of srun, the words between srun and the interpreter, and a container's interpreter ("" for none)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--mpi", default=options.mpi or "none")
    known, words = parser.parse_known_args(arguments.split_words("--srun", options.srun or ""))
    if words and not words[0].startswith("-"):
        raise ConfigError(f"--srun={options.srun!r}: {words[0]!r} is no option of srun; give its options alone")
    in_container = any(word.startswith("--container-image") for word in words)
    if options.profile is not None and (image := options.profile.container):
        in_container = True
        words += ["apptainer", "exec", *arguments.split_words("container.options", image.options), image.apptainer]
    return known.mpi, words, "python" if in_container else ""


def pack_cells(cells: Sequence[int], size: int) -> list[Sequence[int]]:
    """Divide cells among the tasks of an array, `size` for each.

    >>> pack_cells([0, 1, 2, 5, 7], 2)
    [[0, 1], [2, 5], [7]]
    """
    return [cells[first : first + size] for first in range(0, len(cells), size)]


def list_tasks(pending: Pending, pack: int | None) -> list[int]:
    """The number of the array task of each pending run: that of its first cell; none for a single run."""
    return [cells[0] for cells in pack_cells(pending.tasks, pack or 1) for _ in cells]


def _job(options: argparse.Namespace, pending: Pending) -> "BatchScript":
    """The batch script for the work left, with every `auto` replaced."""
    id_pattern = "%j" if options.array is None else "%A_%a"
    ours: dict[str, str | None] = {
        "job-name": (options.config or options.array).stem,
        "chdir": os.getcwd(),
        "output": str(pending.out).replace("%", "%%") + f".{id_pattern}.log",
        "open-mode": "append",
    }
    packs = pack_cells(pending.tasks, options.pack or 1)
    if packs:
        ours["array"] = batch_script.format_tasks([pack[0] for pack in packs], options.jobs)
    given = batch_script.effective_options(options, os.environ)
    if options.requeue:
        ours |= {"requeue": None, "signal": _WARNING}
        effective = batch_script.resolve_options({**given, "signal": _WARNING}, options.sbatch)
        batch_script.check_warning(effective.get("time") or "", effective["signal"] or "")
    mpi, words, rank_python = _launch(options)
    job = batch_script.BatchScript(
        options=batch_script.merge_options(ours, given, options.sbatch),
        python=sys.executable,
        arguments=pending.words,
        mpi=mpi,
        others=options.sbatch,
        array=options.array is not None,
        requeue=options.requeue,
        restarts=options.restarts,
        setup=str(options.setup.resolve()) if options.setup else "",
        srun=words,
        rank_python=rank_python,
        packs=packs if options.pack else (),
    )
    if "mem" in job.options or "auto" in job.options.values():
        from pflmpi.forecast.job import resolve_auto_options

        job = resolve_auto_options(job, pending.runs, pending.out, os.environ)
    return _apply_profile(job, options)


def _show_implied(options: argparse.Namespace, job: "BatchScript", pending: Pending) -> None:
    """Print what replaces `auto`, and the number of ranks if no option states it."""
    given, threads = batch_script.collect_options(options), next(iter(pending.runs.values())).runtime.threads
    if replaced := {name: job.options[name] for name, value in given.items() if value == "auto"}:
        print(f"pflmpi: auto is {' '.join(batch_script.format_options(replaced))}", file=sys.stderr)
    # With those given, because the profile of a site may have turned --gpus-per-node into --gres.
    effective = batch_script.resolve_options({**given, **job.options}, job.others)
    if text := batch_script.count_ranks(effective, threads)[1]:
        print(f"pflmpi: {text}; --ntasks says otherwise", file=sys.stderr)


def _apply_profile(job: "BatchScript", options: argparse.Namespace) -> "BatchScript":
    """The job with GPUs in the form of the site, and a remark that its profile was used."""
    if options.profile is None:
        return job
    from pflmpi.cluster.site import profiles_file

    site_options = dict(job.options)
    if options.profile.gres and (gpus := site_options.pop("gpus-per-node", None)):
        site_options["gres"] = f"{options.profile.gres}:{gpus.rpartition(':')[2]}"
    remark = f"options of --site={options.site!r}: {str(profiles_file(os.environ))!r}"
    return replace(job, options=site_options, remark=remark)
