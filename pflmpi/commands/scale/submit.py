"""Points submitted as Slurm jobs."""

import argparse
import os
import shlex
from pathlib import Path

from pflmpi import arguments
from pflmpi.cluster import sbatch, submission
from pflmpi.cluster.script import script
from pflmpi.commands.scale.requested import requested_experiment
from pflmpi.config.load import load
from pflmpi.scaling import experiment, slurm
from pflmpi.scaling.experiment import Scaling
from pflmpi.terminal import print_surely

_OURS = ["--ranks", "--mode", "--repeats", "--rounds", "--out", "--submit", "--mpi", "--setup", "--dry-run", "--set"]
_OURS += ["--debug"]


def submit(options: argparse.Namespace) -> int:
    """Submit a job for each point that is not measured yet."""
    # As in submit: a parser that does not know sbatch's options takes the value of one for the configuration.
    words, given = sbatch.split(options.words)
    words.remove(options.command)
    options, unknown = options.parser.parse_known_args(words)
    sbatch.refuse_unknown(unknown, _OURS, "scale takes one CONFIG")
    slurm.check(given, options.setup)
    arguments.check_config(options.config)
    config = load(options.config, options.overrides)
    scaling, out = requested_experiment(options, config, slurm.asks_for_gpus(given), None)
    jobs = slurm.jobs(scaling, out, _words(options, scaling, out), given, options.mpi, options.setup)
    if options.dry_run:
        print("\n".join(script(job) for job in jobs.values()), end="")
        return 0
    submission.refuse_without_slurm()
    experiment.write(scaling, out)
    for ranks in scaling.ranks:
        if ranks not in jobs:
            print(f"ranks {ranks}: measured")
        elif job := slurm.running(out, ranks, os.environ):
            print(f"ranks {ranks}: job {job.id} is {job.state} already")
        else:
            number = submission.submit(script(jobs[ranks]), jobs[ranks].options)
            log = str(jobs[ranks].options["output"]).replace("%%", "%").replace("%j", number)
            print_surely(f"ranks {ranks}: job {number}, log {log}")
    print(
        f"when they have ended: pflmpi report {shlex.quote(str(out))}; the same command submits what has failed again"
    )
    return 0


def _words(options: argparse.Namespace, scaling: Scaling, out: Path) -> list[str]:
    """The command line of the job of a point, but for `--only`."""
    words = ["scale", str(options.config), *arguments.words_of_overrides(options), "--mpi", options.mpi]
    words += ["--ranks", ",".join(map(str, scaling.ranks)), "--mode", scaling.mode, "--out", str(out)]
    return [*words, "--repeats", str(scaling.repeats), "--rounds", str(scaling.rounds)]
