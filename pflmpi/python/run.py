"""`pflmpi.run`: in a notebook or script its ranks are processes; under a launcher each rank calls it."""

import os
import time
from collections.abc import Callable
from os import PathLike
from pathlib import Path

from pflmpi.analysis.run import Run, open_run
from pflmpi.config.argument_checks import as_path, wrong_type
from pflmpi.config.keywords import Config
from pflmpi.config.load import Config as Checked
from pflmpi.errors import ConfigError
from pflmpi.python import processes, this_rank
from pflmpi.python.rounds import OnRound
from pflmpi.text import short_name
from pflmpi.transports.detect import detect

__all__ = ["run"]

_CONFIG = "a pflmpi.Config, or the path of a YAML file; pflmpi.Config(**sections) makes one from a mapping of sections"


def run(
    config: "Checked | str | PathLike[str]",
    *,
    out: "str | PathLike[str] | None" = None,
    ranks: int | None = None,
    on_round: OnRound | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> Run:
    """Run a configuration to its end, and open the run.

    Alone, as in a notebook, the ranks are processes of this machine, and this process stays as it is. Under mpirun,
    torchrun or srun every rank calls it, with the same arguments, as often as it likes. An interrupt (Ctrl-C) stops
    after the round with a checkpoint, a second one at once; `resume=True` goes on.

    Args:
        config: a `pflmpi.Config`, or the path of a YAML file.
        out: folder of the run (default: runs/NAME-TIME).
        ranks: processes to start (default: one per GPU, or per core); under a launcher it must be what that started.
        on_round: called after each round with its line of metrics.csv, under a launcher only on rank 0; if it raises,
            the run stops after that round and the error is raised here.
        resume: go on with the run in `out` if there is one, as `pflmpi run --continue` does.
        quiet: show no progress.

    Raises:
        UserError: what cannot be run; nothing was started. `ConfigError` where `out` holds a run already.
        RunError: a fault during the run; what is on disk stays intact.
        Stopped: the run was asked to stop, by a signal or the end of a batch job, and did so after a complete round.
    """
    if ranks is not None and (not isinstance(ranks, int) or ranks < 1):
        raise ConfigError(f"ranks = {ranks!r}: must be a whole number of at least 1")
    if out == "":
        raise ConfigError("out = '' names no folder; give one, or None for runs/NAME-TIME")
    if resume and out is None:
        raise ConfigError("resume=True without out: give the folder of the run to go on with")
    if on_round is not None and not callable(on_round):
        raise wrong_type("on_round", on_round, "a function of one argument, the line of metrics.csv")
    given = config if isinstance(config, Checked) else as_path("config", config, _CONFIG)
    checked = given if isinstance(given, Checked) else Config.load(given)
    name = checked.resolved()["algorithm"]["name"] if isinstance(given, Checked) else given.stem
    default = Path("runs", f"{short_name(name)}-{time.strftime('%Y%m%d-%H%M%S')}")
    folder = default if out is None else as_path("out", out)
    launch = detect(os.environ)
    start: Callable[..., Path] = processes.run if launch.kind == "alone" else this_rank.run
    return open_run(start(checked, folder, ranks, on_round, resume, quiet))
