"""Descriptions of the model that a client predicts with, as data: a checkpoint stores it, any reader applies it.

An algorithm says it with `Kept`, `Received`, `Merge`, `Add` and `Mix`, or states with `NotAModel` why there is no such
model. The same description serves tensors during a run and arrays in a checkpoint; nothing here needs torch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

State = Mapping[str, Any]  # nested: a mapping of names to arrays or tensors, or to further mappings

MODEL_PARTS = ("body", "head", "stats")


@dataclass(frozen=True)
class Kept:
    """A part of what the client keeps.

    Attributes:
        path: names joined by "/"; "" for all that it keeps.
        at: where the part belongs in the model; "" for a whole model.
    """

    path: str = ""
    at: str = ""


@dataclass(frozen=True)
class Received:
    """A message from the server.

    Attributes:
        message: its name in `downlink`.
        at: where it belongs in the model; "" for a whole model.
    """

    message: str
    at: str = ""


@dataclass(frozen=True)
class Merge:
    """Models laid over one another: where two have an array of the same name, the later one counts."""

    models: tuple["ModelExpression", ...]


@dataclass(frozen=True)
class Add:
    """The first model, with the arrays of the second added to its own. Two linear heads added up give summed logits."""

    first: "ModelExpression"
    second: "ModelExpression"


@dataclass(frozen=True)
class Mix:
    """share * first + (1 - share) * second, where both have an array; elsewhere the first.

    Attributes:
        share: path of a scalar that the client keeps.
        times: a factor on it.
    """

    first: "ModelExpression"
    second: "ModelExpression"
    share: str
    times: float = 1.0


ModelExpression = Kept | Received | Merge | Add | Mix


@dataclass(frozen=True)
class NotAModel:
    """The client does not predict with one model.

    Attributes:
        why: what it predicts with, to complete "a client predicts with ...".
        nearest: the model that the prediction is built on, to compare clients by.
    """

    why: str
    nearest: ModelExpression


Personal = ModelExpression | NotAModel


def assemble(model: ModelExpression, client: State, received: State) -> dict[str, Any]:
    """The body, head and statistics of a model, nested.

    Args:
        model: how it is put together.
        client: what the client keeps.
        received: the messages by name.
    """
    whole = _assemble(model, client, received)
    return {part: whole[part] for part in MODEL_PARTS if part in whole}


def walk(personal: Personal) -> Iterator[Personal]:
    """The description and all that it is made of."""
    yield personal
    match personal:
        case NotAModel(_, nearest):
            yield from walk(nearest)
        case Merge(models):
            yield from chain.from_iterable(map(walk, models))
        case Add(first, second) | Mix(first, second):
            yield from chain(walk(first), walk(second))


def messages(personal: Personal) -> set[str]:
    """Names of the messages that a model is put together from."""
    return {part.message for part in walk(personal) if isinstance(part, Received)}


def kept(personal: Personal) -> set[str]:
    """Paths of a client's state that a model is put together from."""
    parts = list(walk(personal))
    shares = {part.share for part in parts if isinstance(part, Mix)}
    return shares | {part.path for part in parts if isinstance(part, Kept)}


def to_json(personal: Personal) -> dict[str, Any]:
    """Plain values for JSON.

    >>> to_json(Merge((Received("body"), Kept())))
    {'merge': [{'received': 'body', 'at': ''}, {'kept': '', 'at': ''}]}
    """
    match personal:
        case Kept(path, at):
            return {"kept": path, "at": at}
        case Received(message, at):
            return {"received": message, "at": at}
        case Merge(models):
            return {"merge": [to_json(model) for model in models]}
        case Add(first, second):
            return {"add": [to_json(first), to_json(second)]}
        case Mix(first, second, share, times):
            return {"mix": [to_json(first), to_json(second)], "share": share, "times": times}
        case NotAModel(why, nearest):
            return {"not_a_model": why, "nearest": to_json(nearest)}


def from_json(values: Mapping[str, Any]) -> Personal:
    """The description that `to_json` has written."""
    if "not_a_model" in values:
        return NotAModel(values["not_a_model"], _model(values["nearest"]))
    return _model(values)


def _model(values: Mapping[str, Any]) -> ModelExpression:
    if "kept" in values:
        return Kept(values["kept"], values["at"])
    if "received" in values:
        return Received(values["received"], values["at"])
    if "merge" in values:
        return Merge(tuple(map(_model, values["merge"])))
    if "add" in values:
        first, second = values["add"]
        return Add(_model(first), _model(second))
    first, second = values["mix"]
    return Mix(_model(first), _model(second), values["share"], values["times"])


def _assemble(model: ModelExpression, client: State, received: State) -> State:
    match model:
        case Kept(path, at):
            return _under(at, _at(client, path))
        case Received(message, at):
            return _under(at, received[message])
        case Merge(models):
            whole: State = {}
            for part in models:
                whole = _combine(whole, _assemble(part, client, received), lambda below, above: above, keep=True)
            return whole
        case Add(first, second):
            a, b = (_assemble(operand, client, received) for operand in (first, second))
            return _combine(a, b, _floats(lambda a, b: a + b))
        case Mix(first, second, path, times):
            share = _at(client, path) if times == 1 else _at(client, path) * times
            a, b = (_assemble(operand, client, received) for operand in (first, second))
            return _combine(a, b, _floats(lambda a, b: share * a + (1 - share) * b))


def _floats(both: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """As `tree.mix`, for arrays of NumPy and tensors: arrays of integers are the first model's."""
    return lambda a, b: both(a, b) if "float" in str(a.dtype) else a


def _at(state: State, path: str) -> Any:
    for name in path.split("/") if path else ():
        state = state[name]
    return state


def _under(at: str, value: Any) -> State:
    for name in reversed(at.split("/") if at else ()):
        value = {name: value}
    return value  # type: ignore[no-any-return]


def _combine(first: State, second: State, both: Callable[[Any, Any], Any], keep: bool = False) -> State:
    """The first state, changed by `both` where the second has an array too; `keep` adds what the second has alone."""
    combined = dict(first)
    for name, value in second.items():
        if name in first:
            nested = isinstance(first[name], Mapping) and isinstance(value, Mapping)
            combined[name] = _combine(first[name], value, both, keep) if nested else both(first[name], value)
        elif keep:
            combined[name] = value
    return combined
