"""Reads and writes YAML for configurations and tables."""

import copy
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from pflmpi import regular_file
from pflmpi.errors import ConfigError
from pflmpi.text import UNSTORABLE, first_line, short_repr

try:  # libyaml is ten times as fast, and commands read the configuration of every run in a folder
    from yaml import CSafeDumper as SafeDumper
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # PyYAML was built without it
    from yaml import SafeDumper, SafeLoader  # type: ignore[assignment]

_MOST_BYTES = 16 << 20
_MOST_BITS = 63
_MOST_VALUES = 100_000
_MOST_LEVELS = 100
_FLOAT = re.compile(
    r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$|^[-+]?\d[\d_]*\.[\d_]*$|^[-+]?\.(inf|Inf|INF)$|^\.nan$"
)
_OLD_NUMBER = re.compile(r"^[-+]?0[\d_]|:")  # YAML 1.1 reads 0042 as octal, 34, and 1:30 as minutes, 90


class _Loader(SafeLoader):
    """YAML in which 1e-3 is a number, and whole numbers have at most 63 bits.

    Refuses numbers with a leading zero or a colon, which YAML 1.1 reads as octal or in base 60.
    """


class _Dumper(SafeDumper):
    """Quotes texts that `_Loader` would read as a number, such as the digest 24e9629048434664."""


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    _check_number(node)
    value: int = loader.construct_yaml_int(node) if len(node.value) < 99 else 1 << 99
    if value.bit_length() > _MOST_BITS:
        raise ValueError(f"the whole number in line {node.start_mark.line + 1} has more than {_MOST_BITS} bits")
    return value


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    _check_number(node)
    return float(loader.construct_yaml_float(node))


def _check_number(node: yaml.ScalarNode) -> None:
    if _OLD_NUMBER.search(node.value):
        instead = "in one unit, such as 90 for 1:30" if ":" in node.value else "it without the leading zero"
        raise ValueError(f"the number {short_repr(node.value)} in line {node.start_mark.line + 1}: write {instead}")


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)

for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def read(path: Path) -> dict[str, Any]:
    """Reads a YAML file that holds a mapping; it may be a pipe."""
    return parse_mapping(_read_text(path, lambda: _read_bytes(path)), str(path))


def read_stored(path: Path) -> dict[str, Any]:
    """As `read`, for the YAML file of a run, which must be a regular file."""
    return parse_stored(_read_text(path, lambda: regular_file.read(path, _MOST_BYTES)), str(path))


def parse_stored(text: str, where: str) -> dict[str, Any]:
    """As `parse_mapping`, for a text that is read again and again: for each client, or a dozen times in a resume."""
    return copy.deepcopy(_parse_once(text, where))


@lru_cache(maxsize=4)
def _parse_once(text: str, where: str) -> dict[str, Any]:
    return parse_mapping(text, where)


def _read_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return regular_file.read_some(file, path, _MOST_BYTES)


def _read_text(path: Path, read_bytes: Callable[[], bytes]) -> str:
    try:
        return read_bytes().decode()
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL byte, or no UTF-8
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read {path}: {reason}") from error


def parse_mapping(text: str, where: str) -> dict[str, Any]:
    """Parses a YAML text that holds a mapping; see `parse`."""
    values = parse(text, where)
    if not isinstance(values, dict):
        raise ConfigError(f"{where} holds no mapping; it must have lines of the form `key: value`")
    return values


def parse(text: str, where: str) -> Any:
    """Parses a YAML text; `where` says in errors what it is.

    Refuses repeated keys, and aliases that expand the text to more than `_MOST_VALUES` values.
    """
    try:
        loader = _Loader(text)  # raises for characters that no file can hold
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node, where, {}, 0)
        return _construct(loader, node, where)
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{where} is nested too deeply; a configuration has three levels") from error


def ends_with_comment(text: str) -> bool:
    """Whether a YAML text ends with a comment."""
    tokens = yaml.scan(text, Loader=_Loader)
    ends = [token.end_mark.index for token in tokens if token.start_mark.index < token.end_mark.index]
    return "#" in text[max(ends, default=0) :]


def _construct(loader: _Loader, node: yaml.Node, where: str) -> Any:
    try:
        return loader.construct_document(node)
    except (yaml.YAMLError, RecursionError):
        raise
    except Exception as error:  # PyYAML raises anything for a text that looks like a date or number, as 2026-99-99
        raise ConfigError(
            f"{where} has a value that cannot be read: {first_line(error)}; mend it, or quote it if it is text"
        ) from error


def _check(node: yaml.Node, where: str, sizes: dict[int, int], level: int) -> int:
    """Counts the values below a node, each alias in full; raises for too many values or levels, and repeated keys."""
    if level > _MOST_LEVELS:
        raise RecursionError
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise ConfigError(f"{where}: line {node.start_mark.line + 1} refers to itself; write the values out")
        return sizes[id(node)]
    sizes[id(node)] = 0  # until it is known
    if isinstance(node, yaml.ScalarNode) and UNSTORABLE.search(node.value):
        raise ConfigError(
            f"{where}: line {node.start_mark.line + 1} has a character that no file can hold; leave it out"
        )
    below: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        below = node.value
    elif isinstance(node, yaml.MappingNode):
        below = [value for _, value in node.value]
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                again = f"again in line {line}" if lines[name] != line else "again there"
                raise ConfigError(f"{where}: {name!r} is in line {lines[name]} and {again}; merge the two")
            lines[name] = line
    total = 1 + sum(_check(child, where, sizes, level + 1) for child in below)
    if total > _MOST_VALUES:
        raise ConfigError(f"{where} has more than {_MOST_VALUES} values, aliases counted in full; write fewer")
    sizes[id(node)] = total
    return total


def dump(values: Mapping[str, Any]) -> str:
    """Formats plain values as YAML."""
    text: str = yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)
    return text
