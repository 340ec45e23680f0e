"""The metrics as a run of Weights & Biases, by default offline below RUN/wandb, for `wandb sync`."""

from importlib import import_module
from typing import Literal

from pflmpi.runtime.trackers.base import Line, Tracked, Tracker, values

_LAST = "last_round"  # file with the newest round that was added; an offline run cannot be asked


class WeightsAndBiases(Tracker):
    """One run there with the id of this one: what a resumed run adds has the same id, and is joined by `wandb sync`."""

    def __init__(self, run: Tracked, mode: Literal["offline", "online"]) -> None:
        library = import_module("wandb")
        folder = run.folder / "wandb"
        folder.mkdir(exist_ok=True)
        self._file = folder / _LAST
        self.last = int(self._file.read_text()) if self._file.exists() else 0
        self._run = library.init(
            project="pflmpi",
            id=run.id,
            name=run.folder.name,
            dir=str(run.folder),
            config=dict(run.options),
            mode=mode,
            resume="allow",
            settings=library.Settings(console="off", silent=True),
        )

    def add(self, line: Line, at: float) -> None:
        self._run.log({**values(line), "_timestamp": at}, step=int(line["round"]))
        new = self._file.with_suffix(".new")
        new.write_text(str(line["round"]))
        new.replace(self._file)  # a killed run leaves a whole number

    def close(self, completed: bool) -> None:
        self._run.finish(exit_code=0 if completed else 1)
