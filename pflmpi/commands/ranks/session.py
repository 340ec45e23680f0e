"""The ranks of a run from its start to its end, who may become more meanwhile."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from pflmpi.commands.ranks.context import context_of
from pflmpi.config.load import Config
from pflmpi.experiment.execute import Paused, RankContext
from pflmpi.experiment.joining import enlarge
from pflmpi.experiment.start import resume_joined
from pflmpi.runtime.progress import Observer
from pflmpi.runtime.stopping import Stop
from pflmpi.transports.base import Transport
from pflmpi.transports.detect import Launch

Start = Callable[[Config, Path, RankContext, Observer], Path]  # starts or continues a run; its folder


class Session:
    """This rank among those of its run.

    Attributes:
        transport: to the ranks that there are now.
        folder: of the run.
    """

    def __init__(self, transport: Transport, launch: Launch, folder: Path) -> None:
        self.transport, self.folder = transport, folder
        self._launch = launch

    def run(self, config: Config, start: Start, stop: Stop, observe: Observer, take_over: bool = False) -> Path:
        """Run all rounds, and let others join between them; the folder of the run.

        Args:
            config: the configuration.
            start: starts or continues the run.
            stop: whether it has a reason to stop.
            observe: called on rank 0 after every round.
            take_over: take the run from a process that still writes it.
        """
        with ExitStack() as at_end:
            while True:
                placed, context = context_of(config, self.transport, self._launch, stop, take_over)
                try:
                    return start(placed, self.folder, context, observe)
                except Paused as paused:
                    pause = paused.with_traceback(None)  # which would keep the state of the clients in memory
                at_end.callback(pause.lock.release)
                config, self.folder = pause.experiment.config, pause.run
                self.transport = enlarge(self.folder, pause.experiment, self.transport)
                start = partial(resume_joined, federation=pause.experiment.division.everyone, held=pause.lock)
