"""What a run says first: what it computes, on how many ranks and GPUs, and where it writes."""

from pathlib import Path

from pflmpi.commands.ranks.launch import num_gpus
from pflmpi.config.load import Config
from pflmpi.store import run_folder
from pflmpi.text import counted, short_name, some


def start_line(config: Config, folder: Path, ranks: int) -> str:
    """The run in one line; a folder with checkpoints is one that goes on."""
    sections = config.resolved()
    models = sections["model"] if isinstance(sections["model"], list) else [sections["model"]]
    algorithm, *names = (short_name(section["name"]) for section in (sections["algorithm"], *models))
    clients = [counted(config.partition.clients, "client")] if config.partition.clients else []
    what = [f"{algorithm} with {some(list(dict.fromkeys(names)))} on {short_name(config.data.name)}", *clients]
    what.append(counted(config.training.rounds, "round"))
    if done := run_folder.rounds(folder)[-1:]:
        what.append(f"goes on after round {done[0]}")
    gpus = num_gpus(config.runtime)
    where = f"with {counted(gpus, 'GPU')} on this node" if gpus else "on CPU"
    return f"{', '.join(what)}; {counted(ranks, 'rank')}, {where}; writes {folder}"
