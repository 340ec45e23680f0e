"""Checks of an algorithm's contract: its declarations before the start, its results and side effects in a run."""

import dataclasses
import pickle
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pflmpi import global_generators, limits, outside, tree
from pflmpi.algorithms.base import Algorithm, initial_client, initial_received
from pflmpi.errors import AlgorithmError, ConfigError, PflmpiError
from pflmpi.learning.diagnostics import DIAGNOSTIC_NAME
from pflmpi.learning.local_training import OPTIMIZER
from pflmpi.learning.parts import has_path
from pflmpi.learning.personal import Add, NotAModel, Personal, kept, messages, walk
from pflmpi.learning.task import HOST, Task
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import (
    ClassMeans,
    Downlink,
    Mean,
    Messages,
    Own,
    Rows,
    Shared,
    Sum,
    Uplink,
    tensor,
    with_rows,
)
from pflmpi.messages.packing import NUMPY_TYPES
from pflmpi.messages.uplink_transforms import RESIDUAL
from pflmpi.models.built_module import are_equal
from pflmpi.store.checksums import crc32
from pflmpi.text import format_ranges, join_truncated, pluralize, short_repr
from pflmpi.tree import Tree

RECEIVED = "received"  # part of a client's stored state with its last reply, beside the algorithm's own parts
ANSWERED = "answered"  # likewise with its newest kept messages
IN_LANES = (
    "; many clients were computed at once, by torch.func.vmap, which not all code suits: runtime.executor = 'loop' "
    "computes one after the other"
)
_RANDOM_ADVICE = (
    "in a module use nn.Dropout, in an algorithm `draws_noise` and `Batch.key` (pflmpi.learning.client.uniform), or "
    "`Round.stream` on the server"
)
_IN_PLACE_ADVICE = (
    " in place, which others may be given too, so that results would depend on the number of ranks; compute a new "
    "tensor, or change a copy (clone, pflmpi.tree.clone)"
)
_STATE_ADVICE = (
    "; nothing is kept in the algorithm itself: what a client keeps belongs in its state (`init_client`), what the "
    "server keeps in `init_server`"
)
_ADVICE_BY_ERROR = {  # by a part of the error text of PyTorch or of a frozen dataclass
    "does not have a deterministic implementation": "; with this operation a run on GPUs could not be repeated: choose "
    "another one (as pooling, that to 1 x 1 can), or runtime.device = 'cpu'",
    "called random operation": f"; {_RANDOM_ADVICE}",
    "Expected more than 1 value per channel": "; a batch has one sample, of which batch norm has no variance: "
    "training.drop_last = true leaves out incomplete batches (for a run that has begun by `pflmpi fork`), and a module "
    "of a new run may have model.norm = 'group'",
    "cannot assign to field": _STATE_ADVICE,
    "with respect to argument 'running_mean'": "; statistics of batch norm are not trained: of several models in one "
    "`train`, name them, as by frozen=('fed/stats', 'own/stats')",
    "Cannot access storage": f"; pflmpi.tree.clone copies a tree{IN_LANES}",
    "data-dependent control flow": f"; torch.where chooses by values without an `if`{IN_LANES}",
}


class ChangedInPlace(Exception):
    """An algorithm changed an input tensor in place; the text names the tensor."""


def collect_inputs(state: Tree, down: Messages, class_counts: Tensor) -> Tree:
    """Returns a client method's inputs by name, without the optimizer's state, which the algorithm does not see."""
    client = {name: value for name, value in state.items() if name != OPTIMIZER}
    return {"client": client, "down": {**down}, "data.class_counts": class_counts}


def check_declarations(algorithm: Algorithm, task: Task) -> None:
    """Raise `ConfigError` for declarations of an algorithm that are wrong or contradict each other."""
    kind, personal, passes = type(algorithm).__name__, algorithm.personal(task), algorithm.passes(task, 1)
    up, down = algorithm.uplink(task), algorithm.downlink(task)
    _check_messages(f"{kind}.uplink", up, Uplink, task.architecture.name)
    _check_messages(f"{kind}.downlink", down, Downlink, task.architecture.name)
    _check_kept_messages(algorithm, task, up, down)
    for where, what, names, declared in (
        ("predicts_with", "message of `downlink`", algorithm.predicts_with, down),
        ("adapts_with", "pass of `passes`", algorithm.adapts_with, passes),
        ("personal", "message in `predicts_with`", sorted(messages(personal)), algorithm.predicts_with),
    ):
        for name in names:
            if name not in declared:
                known = ", ".join(declared) or "none"
                raise ConfigError(f"{kind}.{where} names {name!r}, which is no {what}; known: {known}")
    for name in algorithm.diagnostics(task):
        if not DIAGNOSTIC_NAME.fullmatch(name):
            raise ConfigError(f"{kind}.diagnostics names {name!r}: use lower-case letters, digits and underscores")
    if isinstance(personal, NotAModel) and type(algorithm).predict is Algorithm.predict:
        raise ConfigError(f"{kind}.personal says that clients predict with {personal.why}; then it needs `predict`")
    with calling(algorithm, "init_client", 0):
        state = initial_client(algorithm, task.replace(device=HOST), 0)
    if problem := find_tree_problem(state):
        raise ConfigError(f"{kind}.init_client returned {problem}")
    if outside.is_from_outside(type(algorithm)):
        check_repeated(algorithm, "init_client", state, initial_client(algorithm, task.replace(device=HOST), 0))
    _check_initial_client(kind, personal, passes, state)


def _check_messages(where: str, declared: Mapping[str, object], kinds: Any, model: str) -> None:
    """Raise `ConfigError` for a declared message that is of no known kind, empty, or cannot be summed."""
    for name, message in declared.items():
        if not isinstance(message, kinds):
            raise ConfigError(
                f"{where}: {name!r} is a {type(message).__name__}; expected a kind of message of pflmpi.messages.kinds"
            )
        if not isinstance(message, Sum | Shared):
            continue
        if problem := find_tree_problem(message.like):
            raise ConfigError(f"{where}: {name!r} is declared with {problem}")
        if type(message) is Sum:
            _check_sum(f"{where}: {name!r}", message)
        if type(message) is Mean:
            _check_mean(f"{where}: {name!r}", message)
        if not any(tree.leaves(message.like)):
            raise ConfigError(f"{where}: {name!r} is empty with model {model}; choose another model or algorithm")


def _check_sum(where: str, message: Sum) -> None:
    """Raise `ConfigError` for leaves of a type that is too small for sums."""
    for path, leaf in tree.leaves(message.like):
        if not leaf.is_floating_point() and leaf.dtype != torch.int64:
            raise ConfigError(
                f"{where} adds up {path} of type {str(leaf.dtype)[6:]}, in which sums would be wrong; declare and send "
                "int64 or float32"
            )


def _check_mean(where: str, message: Mean) -> None:
    """Raise `ConfigError` for a mean of integers alone, which would not be averaged."""
    types = sorted({leaf.dtype for _, leaf in tree.leaves(message.like)}, key=str)
    if types and not any(kind.is_floating_point for kind in types):
        raise ConfigError(
            f"{where} is a Mean of {', '.join(str(kind)[6:] for kind in types)} alone, of which the server would get "
            "one client's; declare and send float32, or a Sum of int64"
        )


def _check_initial_client(kind: str, personal: Personal, passes: Mapping[str, Pass], state: Tree) -> None:
    """Raise `ConfigError` for declared paths that a client's state lacks, and for reserved names in it."""
    for path in sorted(kept(personal)):
        if path and not has_path(state, path):
            paths = ", ".join(path for path, _ in tree.leaves(state)) or "none"
            raise ConfigError(f"{kind}.personal names {path!r}, which `init_client` does not return; known: {paths}")
    for name, what in (
        (OPTIMIZER, "the optimizer's state"),
        (RECEIVED, "a client's last reply"),
        (ANSWERED, "a client's last answer"),
        (RESIDUAL, "what a client has not sent yet"),
    ):
        if name in state:
            raise ConfigError(
                f"{kind}.init_client has a part {name!r}, under which {what} is kept in checkpoints; give it another "
                "name"
            )
    integers = [path for path, leaf in tree.leaves(state) if leaf.dtype == torch.int64 and not leaf.ndim]
    for name, length in passes.items():
        if length.times and length.times not in integers:
            raise ConfigError(
                f"{kind}.passes: {name!r} has times = {length.times!r}, which is no int64 scalar of `init_client`; "
                f"known: {', '.join(integers) or 'none'}"
            )


def _check_kept_messages(
    algorithm: Algorithm, task: Task, up: Mapping[str, Uplink], down: Mapping[str, Downlink]
) -> None:
    """Raise `ConfigError` if kept `Rows` and `Own` messages do not match each other or the client's state."""
    kind, host = type(algorithm).__name__, task.replace(device=HOST)
    rows = {name: sent for name, sent in up.items() if isinstance(sent, Rows) and sent.kept}
    state = dict(tree.leaves(initial_client(algorithm, host, 0))) if rows else {}
    for name, sent in rows.items():
        for path, leaf in tree.leaves({name: sent.like}):
            if path not in state or tree.differences({path: leaf}, {path: state[path]}):
                raise ConfigError(
                    f"{kind}.uplink: {name!r} is kept, so that it is part of the client's state, and `init_client` has "
                    f"no {path} of shape {list(leaf.shape)} and type {str(leaf.dtype)[6:]}"
                )
    for name, own in down.items():
        if not isinstance(own, Own) or not (own.kept or own.of):
            continue
        if own.of:
            _check_rows_of(f"{kind}.downlink: {name!r}", own, rows)
        if name in algorithm.predicts_with:
            raise ConfigError(
                f"{kind}.predicts_with names {name!r}, which is for local training alone (`kept` or `of`); keep what a "
                "client predicts with in its state"
            )
    first = initial_received(algorithm, host, 0)
    if problems := tree.differences(dict(first), answer_templates(algorithm, task)):
        raise ConfigError(
            f"{kind}.init_received gives other messages than the kept ones of `downlink`: {'; '.join(problems)}"
        )


def answer_templates(algorithm: Algorithm, task: Task) -> Tree:
    """Returns the templates of the `Own` messages that a client keeps, by name."""
    down = algorithm.downlink(task)
    return {name: kind.like for name, kind in down.items() if isinstance(kind, Own) and kind.kept}


def _check_rows_of(where: str, own: Own, rows: Mapping[str, Rows]) -> None:
    """Raise `ConfigError` unless a message is the ids of M clients and the rows that these keep."""
    if own.kept:
        raise ConfigError(f"{where} is kept and of {own.of!r}; it can be one of both")
    if own.of not in rows:
        raise ConfigError(
            f"{where} is of {own.of!r}, which is no kept `Rows` message of `uplink`; known: {', '.join(rows) or 'none'}"
        )
    clients = own.like.get("clients")
    count = clients.numel() if isinstance(clients, Tensor) else 0
    needed: Tree = {"clients": tensor(count, dtype=torch.int64), own.of: with_rows(rows[own.of].like, count)}
    if problems := tree.differences(own.like, needed):
        raise ConfigError(f"{where} is not the ids of M clients and the rows that these keep: {'; '.join(problems)}")


def check_cohorts(algorithm: Algorithm, tasks: Sequence[Task]) -> None:
    """Raise `ConfigError` if the algorithm cannot have different models, or if they give messages different shapes."""
    if len(tasks) > 1 and not algorithm.unlike_models:
        if outside.is_from_outside(type(algorithm)):
            why = "does not say that clients may have unlike bodies (unlike_models = True in its class)"
        else:
            why = "sends whole models or bodies"
        raise ConfigError(
            f"{type(algorithm).__name__} {why} and needs one architecture; the configuration has {len(tasks)}: "
            f"{join_truncated(_distinct_names(tasks))}"
        )
    first = tasks[0]
    for task in tasks[1:]:
        for way in ("uplink", "downlink"):
            others = getattr(algorithm, way)(task)
            for name, message in getattr(algorithm, way)(first).items():
                shape, other_shape = _find_shape(message), _find_shape(others[name])
                if shape != other_shape:
                    model, other_model = _distinct_names([first, task])
                    raise ConfigError(
                        f"the {way} message {name!r} has shape {shape} with {model} and {other_shape} with "
                        f"{other_model}; choose models with the same number of features"
                    )


def check_heads(algorithm: Algorithm, tasks: Sequence[Task]) -> None:
    """Raise `ConfigError` if the algorithm computes with the head's matrix and a head does more than x W^T + b."""
    name = type(algorithm).__name__
    for task in tasks:
        added = any(isinstance(part, Add) for part in walk(algorithm.personal(task)))
        if not task.architecture.linear_head and (algorithm.linear_head or added):
            what = "adds heads up" if added else "computes with the head's weight and bias"
            raise ConfigError(
                f"{name} {what}, and model {task.architecture.name} has a head with a forward pass or hooks of its "
                "own; end the module with a plain nn.Linear, or choose another algorithm"
            )


def check_parts(algorithm: Algorithm, tasks: Sequence[Task]) -> None:
    """Raise `ConfigError` for a frozen head or `model.personal` if the algorithm does not support it."""
    name = type(algorithm).__name__
    for task in tasks:
        model = task.architecture.name
        if not algorithm.frozen_head and not task.personal and not task.like()["head"]:
            raise ConfigError(
                f"{name} treats the head of a model otherwise than its body, and that of {model} is not trained; train "
                "it (model.trainable), or choose an algorithm for whole models, such as fedavg"
            )
        if task.personal and not algorithm.personal_parts:
            raise ConfigError(
                f"model.personal of {model}: what stays with a client of {name} follows from the algorithm; leave the "
                "key out, or choose fedper or fedrep"
            )


@contextmanager
def calling(
    algorithm: Algorithm,
    method: str,
    round: int,
    clients: Sequence[int] = (),
    in_lanes: bool = False,
    reads: Mapping[str, Tensor | Tree] | None = None,
    batch: int = 0,
    first: int = 1,
) -> Iterator[None]:
    """Context of a call of an algorithm's method: errors name class, method, round and clients.

    Args:
        reads: inputs of the method by argument name, which it must not change.
        batch: samples of a client in one step, for out-of-memory errors; 0 on the server.
        first: the round in which the method is first called; the expensive checks are made up to this round.

    Raises:
        AlgorithmError: the method raised or changed an input in place; up to round `first` also if it changed one
            through `.data`, drew from a global random number generator, or stored something in the algorithm.
    """
    where = f"{type(algorithm).__name__}.{method} (round {round}{_format_clients(clients)})"
    inputs: Tree = dict(tree.leaves({**(reads or {})}))  # flat, because the method may put other tensors in the dicts
    before = _Snapshot.now(algorithm, inputs) if round <= first else None
    versions = [(path, leaf, leaf._version) for path, leaf in tree.leaves(inputs)]
    try:
        yield
    except PflmpiError:
        raise
    except ChangedInPlace as changed_batch:
        raise AlgorithmError(f"{where}, or the model, changes {changed_batch}{_IN_PLACE_ADVICE}") from None
    except (Exception, SystemExit) as error:
        if _is_interrupt(error):
            raise KeyboardInterrupt from error
        if isinstance(error, torch.OutOfMemoryError):
            load = f"{pluralize(len(clients), 'client')} at once, in batches of {batch}" if batch else "on the server"
            raise AlgorithmError(f"{where}, {load}: {limits.explain_limit(error)}") from error
        problem = f"{where}: {type(error).__name__}: {error}; at {_find_line(algorithm, error)}"
        raise AlgorithmError(problem + _find_advice(error, in_lanes)) from error
    if changed := [path for path, leaf, version in versions if leaf._version != version]:
        raise AlgorithmError(f"{where} changes {changed[0]}{_IN_PLACE_ADVICE}")
    if before is not None:
        before.check(where, _Snapshot.now(algorithm, inputs))


def _is_interrupt(error: BaseException) -> bool:
    """Whether the error followed a KeyboardInterrupt: one that comes while `vmap` starts makes its cleanup fail."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__context__
    return cause is not None


def _find_advice(error: BaseException, in_lanes: bool) -> str:
    for text, advice in _ADVICE_BY_ERROR.items():
        if text in str(error):
            return advice
    return IN_LANES if in_lanes and isinstance(error, RuntimeError) else ""


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """Everything that a method must not change; taken in the first rounds only, as it costs 0.1 ms or more.

    Attributes:
        inputs: CRC-32 of each input by path.
        generators: states of the global random number generators.
        attributes: by name, pickled attributes of the algorithm, and of its classes from outside the package; without
            each `cached_property`, which follows from the rest.
    """

    inputs: Mapping[str, int]
    generators: tuple[object, ...]
    attributes: Mapping[str, bytes]

    @classmethod
    def now(cls, algorithm: Algorithm, inputs: Tree) -> "_Snapshot":
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        checksums = {path: crc32(leaf.numpy()) for path, leaf in tree.leaves(tree.to_host(inputs))}
        values = {
            name: value
            for name, value in vars(algorithm).items()
            if not isinstance(getattr(type(algorithm), name, None), cached_property)
        }
        for kind in type(algorithm).__mro__:
            if outside.is_from_outside(kind):
                values |= {f"{kind.__name__}.{name}": value for name, value in vars(kind).items() if name[:2] != "__"}
        attributes = {name: _pickle(value) for name, value in values.items()}
        return cls(checksums, global_generators.read_states(on_gpu), attributes)

    def check(self, where: str, after: "_Snapshot") -> None:
        """Raise `AlgorithmError` for the first thing that differs in a later snapshot."""
        for path, checksum in self.inputs.items():
            if after.inputs[path] != checksum:
                raise AlgorithmError(f"{where} changes {path}{_IN_PLACE_ADVICE}")
        for name in sorted(self.attributes.keys() | after.attributes.keys()):
            if after.attributes.get(name) != self.attributes.get(name):
                raise AlgorithmError(f"{where} changes {name}{_STATE_ADVICE}")
        if after.generators != self.generators:
            raise AlgorithmError(
                f"{where} draws random numbers from a global generator, so that a run could not be repeated; "
                f"{_RANDOM_ADVICE}"
            )


def _pickle(value: object) -> bytes:
    """Pickles a value to detect changes; returns b"" if it cannot be pickled, such as a property."""
    try:
        return pickle.dumps(value)
    except Exception:  # may be of any type, because the value's own class raises it
        return b""


def find_tree_problem(value: object) -> str:
    """Describes the first part of a value that is not a tensor of an allowed type in nested dicts; "" if all are."""
    expected = "; expected are tensors in nested dicts"
    if not isinstance(value, Mapping):
        return f"a {type(value).__name__}{expected}"
    if (key := _find_key_with_slash(value)) is not None:
        return (
            f"the key {short_repr(key)}: in a path / separates keys; pflmpi.tree.unflatten makes the nested dicts of "
            "paths"
        )
    leaves: Iterator[tuple[str, object]] = tree.leaves({**value})
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor):
            instead = f", such as torch.tensor({leaf})" if isinstance(leaf, bool | int | float) else ""
            return f"{path} = {short_repr(leaf)}, a {type(leaf).__name__}{expected}{instead}"
        if leaf.dtype not in NUMPY_TYPES:
            allowed = ", ".join(str(dtype)[6:] for dtype in NUMPY_TYPES)
            return f"{path} of type {str(leaf.dtype)[6:]}, which is neither sent nor stored; convert it to {allowed}"
    return ""


def _find_key_with_slash(value: Mapping[str, object]) -> str | None:
    """Returns the first key of nested dicts that contains a slash; None without one."""
    deeper = (_find_key_with_slash(part) for part in value.values() if isinstance(part, dict))
    return next((key for key in (*value, *deeper) if key is not None and "/" in str(key)), None)


def call_server_method(
    algorithm: Algorithm, method: str, round: int, reads: Mapping[str, Tensor | Tree], *arguments: Any
) -> Any:
    """Calls a method of the server, up to round 1 twice if it is from outside; returns a tree of tensors.

    Raises:
        AlgorithmError: see `calling`; or it returned anything else, or other values at the second call.
    """
    with calling(algorithm, method, round, reads=reads):
        returned = getattr(algorithm, method)(*arguments)
    check_returned(algorithm, method, returned)
    if round <= 1 and outside.is_from_outside(type(algorithm)):
        with calling(algorithm, method, round, reads=reads):
            again = getattr(algorithm, method)(*arguments)
        check_repeated(algorithm, method, returned, again)
    return returned


def check_repeated(algorithm: Algorithm, method: str, returned: Tree, again: Tree) -> None:
    """Raise `AlgorithmError` if a second call with the same arguments returned other bits."""
    if paths := different_bits(returned, again):
        raise AlgorithmError(
            f"{type(algorithm).__name__}.{method} returns another {paths[0]} when it is called again with the same "
            f"arguments, so that a run could not be repeated; {_RANDOM_ADVICE}"
        )


def different_bits(one: Tree, other: Tree) -> list[str]:
    """Returns the paths whose leaves differ in any bit, or that only the first tree has."""
    others = dict(tree.leaves(other))
    return [path for path, leaf in tree.leaves(one) if path not in others or not are_equal(leaf, others[path])]


def check_returned(algorithm: Algorithm, method: str, returned: object) -> None:
    """Raise `AlgorithmError` if a returned state, or returned messages by name, are not a tree of tensors."""
    if problem := find_tree_problem(returned):
        raise AlgorithmError(f"{type(algorithm).__name__}.{method} returned {problem}")


def state_and_messages(algorithm: Algorithm, method: str, returned: object) -> tuple[Tree, Messages]:
    """Returns the new state and the messages of a client's update; raises `AlgorithmError` for anything else."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise AlgorithmError(
            f"{type(algorithm).__name__}.{method} returned a {type(returned).__name__}; expected the new state and the "
            "messages, two dicts: return state, {name: message}"
        )
    check_returned(algorithm, method, returned[1])
    return returned


def check_state(algorithm: Algorithm, method: str, state: object, expected: Tree) -> None:
    """Raise `AlgorithmError` unless a returned state has the leaves, shapes and types of the previous one."""
    where = f"{type(algorithm).__name__}.{method}"
    if not isinstance(state, dict):
        raise AlgorithmError(f"{where} returned a {type(state).__name__} as state; allowed is a dict of tensors")
    check_returned(algorithm, method, state)
    if problems := tree.differences(state, expected):
        initial = "init_server" if method == "server_update" else "init_client"
        leaves, advice = dict(tree.leaves(state)), "return every leaf, also one that did not change"
        for path, leaf in tree.leaves(expected):
            if path in leaves and leaves[path].dtype != leaf.dtype:
                advice = f"convert it, as by .to({leaf.dtype}), or begin with {str(leaves[path].dtype)[6:]}"
                break
        raise AlgorithmError(
            f"{where} returned another state than `{initial}` (returned against initial): {'; '.join(problems)}; "
            f"{advice}"
        )


def check_scores(algorithm: Algorithm, scores: Tensor, samples: int, of_sample: tuple[int, ...]) -> None:
    """Raise `AlgorithmError` unless scores are [B, K], or [B, *of_sample]."""
    if tuple(scores.shape) != (samples, *of_sample):
        raise AlgorithmError(
            f"{type(algorithm).__name__}.predict returned scores of shape {list(scores.shape)} for {samples} samples "
            f"and {of_sample[-1]} classes; allowed is {[samples, *of_sample]}"
        )


def _distinct_names(tasks: Sequence[Task]) -> list[str]:
    """Returns the name of each model with the settings in which the models differ."""
    values = [
        {**dataclasses.asdict(task.architecture), "frozen": [*task.frozen.paths], "personal": [*task.personal]}
        for task in tasks
    ]
    keys = [key for key in values[0] if key != "name" and any(other.get(key) != values[0][key] for other in values)]
    settings = [", ".join(f"{key} = {short_repr(own.get(key))}" for key in keys) for own in values]
    return [f"{own['name']} ({text})" if text else own["name"] for own, text in zip(values, settings, strict=True)]


def _find_shape(kind: Uplink | Downlink) -> object:
    if isinstance(kind, ClassMeans):
        return [kind.num_features]
    return {path: list(leaf.shape) for path, leaf in tree.leaves(kind.like)}


def _format_clients(clients: Sequence[int]) -> str:
    if not len(clients):
        return ""
    return f", client{'s' if len(clients) > 1 else ''} {format_ranges([int(client) for client in clients])}"


def _find_line(algorithm: Algorithm, error: BaseException) -> str:
    """Returns where the error passed last through outside code or the algorithm's file, else where it was raised."""
    file = outside.file_of(type(algorithm))
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    return outside.find_location(error) or f"{Path(frame.filename).name}:{frame.lineno}"
