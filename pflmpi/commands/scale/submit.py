"""Points submitted as Slurm jobs."""

import argparse
import os
import shlex
from pathlib import Path

from pflmpi import arguments
from pflmpi.cluster import batch_script, submission
from pflmpi.cluster.jobs import queue
from pflmpi.commands.scale.requested import requested_experiment
from pflmpi.config.load import load
from pflmpi.scaling import experiment, slurm
from pflmpi.scaling.experiment import Scaling
from pflmpi.scaling.points import folder
from pflmpi.terminal import print_surely


def submit(options: argparse.Namespace) -> int:
    """Submit a job for each point that is not measured yet."""
    given, others = batch_script.given(options), options.sbatch
    slurm.check(given, options.setup)
    arguments.check_config(options.config)
    config = load(options.config, options.overrides)
    scaling, out = requested_experiment(options, config, slurm.asks_for_gpus(given, others), None)
    jobs = slurm.jobs(scaling, out, _words(options, scaling, out), given, others, options.mpi, options.setup)
    if options.dry_run:
        print("\n".join(batch_script.script(job) for job in jobs.values()), end="")
        return 0
    submission.refuse_without_slurm()
    experiment.write(scaling, out)
    queued = queue(os.environ)
    for ranks in scaling.ranks:
        if ranks not in jobs:
            print(f"ranks {ranks}: measured")
        elif job := submission.working_in(folder(out, ranks), queued):
            print(f"ranks {ranks}: job {job.id} is {job.state} already")
        else:
            submission.make_folders(folder(out, ranks))
            number = submission.submit(jobs[ranks], folder(out, ranks))
            print_surely(f"ranks {ranks}: job {number}, log {submission.log_of(jobs[ranks].options, number)}")
    print(
        f"when they have ended: pflmpi report {shlex.quote(str(out))}; the same command submits what has failed again"
    )
    return 0


def _words(options: argparse.Namespace, scaling: Scaling, out: Path) -> list[str]:
    """The command line of the job of a point, but for `--only`."""
    words = ["scale", str(options.config), *arguments.words_of_overrides(options), "--mpi", options.mpi]
    words += ["--ranks", ",".join(map(str, scaling.ranks)), "--mode", scaling.mode, "--out", str(out)]
    return [*words, "--repeats", str(scaling.repeats), "--rounds", str(scaling.rounds)]
