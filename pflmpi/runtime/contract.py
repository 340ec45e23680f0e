"""Checks of the contract of an algorithm: declarations before the start, results while it runs, errors by name."""

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
from pflmpi.learning.diagnostics import NAME
from pflmpi.learning.local_training import OPTIMIZER
from pflmpi.learning.parts import has
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
from pflmpi.store.checksums import crc32
from pflmpi.text import format_ranges, join_truncated, pluralize, short_repr
from pflmpi.tree import Tree

RECEIVED = "received"  # where a client's last reply is kept, beside the algorithm's state
ANSWERED = "answered"  # where a client's newest kept messages are, beside it too
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
_ADVICE_BY_ERROR = {  # by what the error of PyTorch, or of a frozen dataclass, says
    "does not have a deterministic implementation": "; with this operation a run on GPUs could not be repeated: choose "
    "another one (as pooling, that to 1 x 1 can), or runtime.device = 'cpu'",
    "called random operation": f"; {_RANDOM_ADVICE}",
    "Expected more than 1 value per channel": "; a batch has one sample, of which batch norm has no variance: "
    "training.drop_last = true leaves out incomplete batches, and a module may have model.norm = 'group'",
    "cannot assign to field": _STATE_ADVICE,
    "with respect to argument 'running_mean'": "; statistics of batch norm are not trained: of several models in one "
    "`train`, name them, as by frozen=('fed/stats', 'own/stats')",
    "Cannot access storage": f"; pflmpi.tree.clone copies a tree{IN_LANES}",
    "data-dependent control flow": f"; torch.where chooses by values without an `if`{IN_LANES}",
}


class ChangedInPlace(Exception):
    """A tensor that an algorithm was given to read has changed; the text names it."""


def collect_inputs(state: Tree, down: Messages, class_counts: Tensor) -> Tree:
    """Inputs of a method for one client by name, without the optimizer's state, which is not the algorithm's."""
    own = {name: value for name, value in state.items() if name != OPTIMIZER}
    return {"client": own, "down": {**down}, "data.class_counts": class_counts}


def check_declarations(algorithm: Algorithm, task: Task) -> None:
    """Raise `ConfigError` for a name that an algorithm declares and does not have."""
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
        if not NAME.fullmatch(name):
            raise ConfigError(f"{kind}.diagnostics names {name!r}: use lower-case letters, digits and underscores")
    if isinstance(personal, NotAModel) and type(algorithm).predict is Algorithm.predict:
        raise ConfigError(f"{kind}.personal says that clients predict with {personal.why}; then it needs `predict`")
    with calling(algorithm, "init_client", 0):
        state = initial_client(algorithm, task.replace(device=HOST), 0)
    if problem := find_tree_problem(state):
        raise ConfigError(f"{kind}.init_client returned {problem}")
    _check_initial_client(kind, personal, passes, state)


def _check_messages(where: str, declared: Mapping[str, object], kinds: Any, model: str) -> None:
    """Raise `ConfigError` for a declared message of no kind, or without content."""
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
    """Raise `ConfigError` for leaves whose sums their type may not hold."""
    for path, leaf in tree.leaves(message.like):
        if not leaf.is_floating_point() and leaf.dtype != torch.int64:
            raise ConfigError(
                f"{where} adds up {path} of type {str(leaf.dtype)[6:]}, in which sums would be wrong; declare and send "
                "int64 or float32"
            )


def _check_mean(where: str, message: Mean) -> None:
    """Raise `ConfigError` for a mean of which nothing would be averaged."""
    types = sorted({leaf.dtype for _, leaf in tree.leaves(message.like)}, key=str)
    if types and not any(kind.is_floating_point for kind in types):
        raise ConfigError(
            f"{where} is a Mean of {', '.join(str(kind)[6:] for kind in types)} alone, of which the server would get "
            "one client's; declare and send float32, or a Sum of int64"
        )


def _check_initial_client(kind: str, personal: Personal, passes: Mapping[str, Pass], state: Tree) -> None:
    """Raise `ConfigError` for a path that a client's state does not have, and for a part that is kept beside it."""
    for path in sorted(kept(personal)):
        if path and not has(state, path):
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
    """Raise `ConfigError` for kept `Rows`, kept `Own` messages or such of kept rows that do not fit each other."""
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
    """The kept `Own` messages of one client, by name."""
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
    """Raise `ConfigError` for unlike models that the algorithm cannot have, or that make messages differ in shape."""
    if len(tasks) > 1 and not algorithm.unlike_models:
        raise ConfigError(
            f"{type(algorithm).__name__} sends whole models or bodies and needs one architecture; "
            f"the configuration has {len(tasks)}: {join_truncated(_distinct_names(tasks))}"
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
    """Raise `ConfigError` for a head that does more than x W^T + b where the algorithm computes with its matrix."""
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
    """Raise `ConfigError` for a frozen head, or parts named as personal, where these have no meaning."""
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
    """Name the class, method, round and clients in any error of an algorithm.

    Args:
        reads: what the method is given, by the names of its arguments.
        batch: samples of a client at once, for the error of a GPU without memory left.
        first: the round in which the method is called first; up to it, more is checked.

    Raises:
        AlgorithmError: the method raised, or changed in place what it was given, or, up to its first round, did so
            through `.data`, drew from a global generator of random numbers, or kept something in the algorithm.
    """
    where = f"{type(algorithm).__name__}.{method} (round {round}{_format_clients(clients)})"
    inputs: Tree = dict(tree.leaves({**(reads or {})}))  # these tensors, also where the dicts get others
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
            at_once = (
                f"{pluralize(len(clients), 'client')} at once, in batches of {batch}" if batch else "on the server"
            )
            raise AlgorithmError(f"{where}, {at_once}: {limits.problem(error)}") from error
        what = f"{where}: {type(error).__name__}: {error}; at {_find_line(algorithm, error)}"
        otherwise = IN_LANES if in_lanes and isinstance(error, RuntimeError) else ""
        advice = next((advice for text, advice in _ADVICE_BY_ERROR.items() if text in str(error)), otherwise)
        raise AlgorithmError(what + advice) from error
    if changed := [path for path, leaf, version in versions if leaf._version != version]:
        raise AlgorithmError(f"{where} changes {changed[0]}{_IN_PLACE_ADVICE}")
    if before is not None:
        before.check(where, _Snapshot.now(algorithm, inputs))


def _is_interrupt(error: BaseException) -> bool:
    """Whether it was raised while an interrupt passed: one that comes where `vmap` begins makes its end fail."""
    earlier: BaseException | None = error
    while earlier is not None and not isinstance(earlier, KeyboardInterrupt):
        earlier = earlier.__context__
    return earlier is not None


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """What no method changes; compared in the first rounds alone, as it takes 0.1 ms and more.

    Attributes:
        inputs: CRC-32 of what the method is given, by path.
        generators: states of the global generators of random numbers.
        kept: values of the algorithm's fields and other attributes, and of attributes of classes from outside the
            package, pickled, by name; what a `cached_property` holds follows from the rest.
    """

    inputs: Mapping[str, int]
    generators: tuple[object, ...]
    kept: Mapping[str, bytes]

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
        kept = {name: _pickle(value) for name, value in values.items()}
        return cls(checksums, global_generators.states(on_gpu), kept)

    def check(self, where: str, after: "_Snapshot") -> None:
        """Raise `AlgorithmError` for what has changed."""
        for path, checksum in self.inputs.items():
            if after.inputs[path] != checksum:
                raise AlgorithmError(f"{where} changes {path}{_IN_PLACE_ADVICE}")
        for name in sorted(self.kept.keys() | after.kept.keys()):
            if after.kept.get(name) != self.kept.get(name):
                raise AlgorithmError(f"{where} changes {name}{_STATE_ADVICE}")
        if after.generators != self.generators:
            raise AlgorithmError(
                f"{where} draws random numbers from a global generator, so that a run could not be repeated; "
                f"{_RANDOM_ADVICE}"
            )


def _pickle(value: object) -> bytes:
    """The bytes that tell whether a value has changed; none of one that cannot be pickled, such as a property."""
    try:
        return pickle.dumps(value)
    except Exception:  # of any type: it is raised by code of the value's class
        return b""


def find_tree_problem(value: object) -> str:
    """The first part of a value that is no tensor in nested dicts, or of no allowed type, in words; "" without one."""
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
    """The first key of nested dicts that a path could not name."""
    deeper = (_find_key_with_slash(part) for part in value.values() if isinstance(part, dict))
    return next((key for key in (*value, *deeper) if key is not None and "/" in str(key)), None)


def check_returned(algorithm: Algorithm, method: str, returned: object) -> None:
    """Raise `AlgorithmError` for a returned state, or messages by name, that is no tree of tensors."""
    if problem := find_tree_problem(returned):
        raise AlgorithmError(f"{type(algorithm).__name__}.{method} returned {problem}")


def state_and_messages(algorithm: Algorithm, method: str, returned: object) -> tuple[Tree, Messages]:
    """The two values of a client's update; raise `AlgorithmError` for anything else."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise AlgorithmError(
            f"{type(algorithm).__name__}.{method} returned a {type(returned).__name__}; expected the new state and the "
            "messages, two dicts: return state, {name: message}"
        )
    check_returned(algorithm, method, returned[1])
    return returned


def check_state(algorithm: Algorithm, method: str, state: object, expected: Tree) -> None:
    """Raise `AlgorithmError` unless a returned state has the leaves, shapes and types of the one before."""
    where = f"{type(algorithm).__name__}.{method}"
    if not isinstance(state, dict):
        raise AlgorithmError(f"{where} returned a {type(state).__name__} as state; allowed is a dict of tensors")
    check_returned(algorithm, method, state)
    if problems := tree.differences(state, expected):
        initial = "init_server" if method == "server_update" else "init_client"
        leaves, before = dict(tree.leaves(state)), dict(tree.leaves(expected))
        other = next((path for path in before if path in leaves and leaves[path].dtype != before[path].dtype), None)
        advice = "return every leaf, also one that did not change"
        if other is not None:
            advice = f"convert it, as by .to({before[other].dtype}), or begin with {str(leaves[other].dtype)[6:]}"
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
    """The name of each model, with the values that are not the same in all."""
    values = [
        {**dataclasses.asdict(task.architecture), "frozen": [*task.frozen.paths], "personal": [*task.personal]}
        for task in tasks
    ]
    keys = [key for key in values[0] if key != "name" and any(other.get(key) != values[0][key] for other in values)]
    return [f"{own['name']} ({', '.join(f'{key} = {short_repr(own.get(key))}' for key in keys)})" for own in values]


def _find_shape(kind: Uplink | Downlink) -> object:
    if isinstance(kind, ClassMeans):
        return [kind.num_features]
    return {path: list(leaf.shape) for path, leaf in tree.leaves(kind.like)}


def _format_clients(clients: Sequence[int]) -> str:
    if not len(clients):
        return ""
    return f", client{'s' if len(clients) > 1 else ''} {format_ranges([int(client) for client in clients])}"


def _find_line(algorithm: Algorithm, error: BaseException) -> str:
    """The last line of the algorithm's own file, or of code from outside, that an error went through, or its origin."""
    file = outside.file_of(type(algorithm))
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    return outside.place(error) or f"{Path(frame.filename).name}:{frame.lineno}"
