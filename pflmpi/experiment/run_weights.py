"""`model.weights: RUN@ROUND`: a run that starts from the models of another run after a round."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from pflmpi import tree
from pflmpi.config import yaml_file
from pflmpi.config.load import Config
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.learning import personal
from pflmpi.learning.personal import MODEL_PARTS, ModelExpression, NotAModel
from pflmpi.learning.task import SERVER, Task
from pflmpi.models.base import Model, run_reference
from pflmpi.runtime.client_state import tree_from_arrays
from pflmpi.runtime.contract import RECEIVED
from pflmpi.store import run_folder, verify
from pflmpi.store.layout import Layout
from pflmpi.text import join_truncated
from pflmpi.tree import Tree

_OF_TRAINING = {"check", *(field.name for field in fields(Model))}  # keys of a model that leave the network as it is
_SERVER_MODELS = ("model", "shared")  # keys under which algorithms keep a model; others keep its parts at the root


@dataclass(frozen=True, eq=False)
class RunWeights:
    """The models of a run after a round: the server's, and the clients' own if they keep any."""

    run: Path  # folder
    round: int  # of a checkpoint
    own: bool  # whether clients start with models of their own
    personal: ModelExpression  # how these are assembled
    layout: Layout  # where the clients' rows are

    @property
    def name(self) -> str:
        return f"model.weights = {str(self.run)!r}@{self.round}"

    @cached_property
    def server(self) -> Tree:
        """The parts of a model that the server keeps."""
        state = tree_from_arrays(run_folder.read_server(self.run, self.round))
        subtrees = [state[name] for name in _SERVER_MODELS if isinstance(state.get(name), dict)]
        for subtree in (*subtrees, state):
            assert isinstance(subtree, dict)
            if parts := {part: subtree[part] for part in MODEL_PARTS if part in subtree}:
                return parts
        return {}

    def model(self, client: int, like: Tree) -> Tree:
        """Returns the arrays that the model of a client, or `SERVER`, starts with; `like` has those of a whole model.

        Raises:
            ConfigError: they are of another model.
            CheckpointError: the run is missing or damaged.
        """
        own = self.own and 0 <= client < len(self.layout.file)  # unseen clients join as those of the run did
        model = self._own(client) if own else self.server
        expected = {path: tuple(leaf.shape) for path, leaf in tree.leaves(like)}
        for path, leaf in tree.leaves(model):
            if expected.get(path) != tuple(leaf.shape):
                here = f"here {list(expected[path])}" if path in expected else "here there is none"
                raise ConfigError(f"{self.name} is not of this model: {path} is {list(leaf.shape)}, {here}")
        return tree.clone(model)

    def check(self, task: Task, client: int) -> None:
        """Raise `ConfigError` unless the models of the server and of a client suit a task; see `model`."""
        if task.frozen.paths:
            raise ConfigError(
                f"{self.name} cannot go with parameters that are not trained, such as {task.frozen.paths[0]}; leave "
                "model.trainable out, or give model.weights a file"
            )
        self.model(SERVER, task.like())
        if missing := self.drawn(task.like(), client) if self.own else []:
            raise ConfigError(
                f"{self.name}: its clients keep no {join_truncated(missing)}; give a run of the whole model"
            )

    def drawn(self, like: Tree, client: int = SERVER) -> list[str]:
        """Returns the paths of the arrays that the model of a client, or the server's, lacks."""
        paths = dict(tree.leaves(self.model(client, like)))
        return [path for path, _ in tree.leaves(like) if path not in paths]

    def differing(self, data: str, partition: str) -> str:
        """Returns whether data or partition of the run differ from these hashes: "data", "partition", or ""."""
        recorded = run_folder.read_attributes(self.run, self.round)
        return "data" if recorded["data"] != data else "partition" if recorded["partition"] != partition else ""

    def trained_with(self, config: Config, code: Mapping[str, str]) -> list[str]:
        """Describes what the run has otherwise than a configuration: normalisation, model and its code (a hash)."""
        recorded = run_folder.read_attributes(self.run, self.round)
        config_before = yaml_file.parse(str(recorded["config"]), self.name)
        before = _settings(config_before, json.loads(str(recorded.get("code", "{}"))))
        now = _settings(config.resolved(), code)
        both = before.keys() & now.keys()
        return [f"{key} = {before[key]!r} (here {now[key]!r})" for key in sorted(both) if before[key] != now[key]]

    def _own(self, client: int) -> Tree:
        block = _read_block(self, client // _block_length(self.run, self.round))
        kept, received = block[client]
        return personal.assemble(self.personal, kept, received)


def _settings(config: Mapping[str, Any], code: Mapping[str, str]) -> dict[str, Any]:
    """Returns what a model computes by, as far as its sizes do not show it."""
    values = {"data.normalize": config["data"]["normalize"]} if "normalize" in config["data"] else {}
    for number, model in enumerate(config["model"] if isinstance(config["model"], list) else [config["model"]]):
        place = f"model/{number}" if number else "model"
        values |= {f"{place}.{key}": value for key, value in model.items() if key not in _OF_TRAINING}
        values[f"{place}.name"] = model["name"].rpartition(":")[2]  # its file may have been moved
        values[f"code of {place}"] = code.get(place, "none")[:12]
    return values


_block_length = lru_cache(maxsize=1)(run_folder.count_clients_per_block)


@lru_cache(maxsize=1)  # clients are initialised one after the other
def _read_block(weights: RunWeights, number: int) -> dict[int, tuple[Tree, Tree]]:
    """Reads what a block of clients keep and what they have received, by id."""
    length = _block_length(weights.run, weights.round)
    ids = np.arange(len(weights.layout.file))[number * length : (number + 1) * length]
    messages = run_folder.read_received(weights.run, weights.round, ids)
    block: dict[int, tuple[Tree, Tree]] = {}
    states = run_folder.split_by_client(run_folder.read_clients_of_layout(weights.run, weights.layout, ids))
    for client, arrays in states.items():
        kept = tree_from_arrays({path: _as_number(np.array(array)) for path, array in arrays.items()})
        received = tree_from_arrays({path: np.array(rows[client - ids[0]]) for path, rows in messages.items()})
        kept_messages = kept.get(RECEIVED)
        if isinstance(kept_messages, dict):
            received |= kept_messages
        block[client] = kept, received
    return block


def _as_number(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype == bool else array  # a mixing weight may be a boolean


def run_weights(config: Config, num_clients: int) -> RunWeights | None:
    """Opens the models that the clients of a configuration start with; None where they are drawn."""
    references = {run_reference(getattr(model, "weights", None)) for model in config.models}
    if references == {None}:
        return None
    if len(references) > 1 or (reference := references.pop()) is None:
        raise ConfigError("model.weights names a run for some models of the list, or several; give all the same one")
    run, round = Path(reference[0]), reference[1]
    if round not in (rounds := run_folder.rounds(run)):
        has = f"it has {', '.join(map(str, rounds))}" if rounds else "it is no run"
        raise ConfigError(f"model.weights = {str(run)!r}@{round}: there is no such checkpoint; {has}")
    if problems := verify.checkpoint(run, round, whole=False):
        raise CheckpointError("; ".join(problems.values()))
    weights = _open(run, round)
    if weights.own and len(weights.layout.file) != num_clients:
        raise ConfigError(
            f"{weights.name}: its {len(weights.layout.file)} clients keep models of their own, and here are "
            f"{num_clients} clients; give a run of as many"
        )
    if not weights.own and not weights.server:
        raise ConfigError(f"{weights.name}: neither its server nor its clients keep a model; give another run")
    return weights


def _open(run: Path, round: int) -> RunWeights:
    attributes, layout = run_folder.read_attributes(run, round), run_folder.read_layout(run, round)
    try:
        expression = personal.from_json(json.loads(str(attributes["personal"])))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"round {round} of {run} does not say how its models are put together") from error
    if isinstance(expression, NotAModel):
        expression = expression.nearest
    keep_state = any(run_folder.read_kinds(run, round).values())
    return RunWeights(run, round, keep_state and bool(personal.kept(expression)), expression, layout)
