"""Descriptions, as data, of the model with which a client predicts; checkpoints store them for any reader.

An algorithm builds one of `Kept`, `Received`, `Merge`, `Add` and `Mix`, or says with `NotAModel` why there is no such
model. The same description applies to tensors during a run and to arrays in a checkpoint; nothing here needs torch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

State = Mapping[str, Any]  # nested: a mapping of names to arrays or tensors, or to further mappings

MODEL_PARTS = ("body", "head", "stats")


@dataclass(frozen=True)
class Kept:
    """A part of the client's state.

    Attributes:
        path: names joined by "/"; "" for the whole state.
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
    """Models laid over one another: of arrays with the same name, the later one's is used."""

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
        share: path of a scalar in the client's state.
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
        nearest: the model on which the prediction is based, for comparing clients.
    """

    why: str
    nearest: ModelExpression


Personal = ModelExpression | NotAModel


def assemble(model: ModelExpression, client: State, received: State) -> dict[str, Any]:
    """The body, head and statistics of a model, nested, from a client's state and the messages that it received."""
    whole = _assemble(model, client, received)
    return {part: whole[part] for part in MODEL_PARTS if part in whole}


def walk(personal: Personal) -> Iterator[Personal]:
    """The description and all of its parts."""
    yield personal
    match personal:
        case NotAModel(_, nearest):
            yield from walk(nearest)
        case Merge(models):
            yield from chain.from_iterable(map(walk, models))
        case Add(first, second) | Mix(first, second):
            yield from chain(walk(first), walk(second))


def messages(personal: Personal) -> set[str]:
    """Names of the messages that a model uses."""
    return {part.message for part in walk(personal) if isinstance(part, Received)}


def kept(personal: Personal) -> set[str]:
    """Paths of the client's state that a model uses."""
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
    """The description from the values of `to_json`."""
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
                whole = _combine(whole, _assemble(part, client, received), lambda first, later: later, union=True)
            return whole
        case Add(first, second):
            a, b = (_assemble(operand, client, received) for operand in (first, second))
            return _combine(a, b, _floats(lambda a, b: a + b))
        case Mix(first, second, path, times):
            share = _at(client, path) if times == 1 else _at(client, path) * times
            a, b = (_assemble(operand, client, received) for operand in (first, second))
            return _combine(a, b, _floats(lambda a, b: share * a + (1 - share) * b))


def _floats(combine: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Like `tree.mix`, but also for arrays of NumPy: other arrays than floating ones are the first model's."""
    return lambda a, b: combine(a, b) if "float" in str(a.dtype) else a


def _at(state: State, path: str) -> Any:
    for name in path.split("/") if path else ():
        state = state[name]
    return state


def _under(at: str, value: Any) -> State:
    for name in reversed(at.split("/") if at else ()):
        value = {name: value}
    return value  # type: ignore[no-any-return]


def _combine(first: State, second: State, function: Callable[[Any, Any], Any], union: bool = False) -> State:
    """The first state with `function` applied where both have an array; `union` adds the second's other arrays."""
    combined = dict(first)
    for name, value in second.items():
        if name in first:
            nested = isinstance(first[name], Mapping) and isinstance(value, Mapping)
            combined[name] = _combine(first[name], value, function, union) if nested else function(first[name], value)
        elif union:
            combined[name] = value
    return combined
