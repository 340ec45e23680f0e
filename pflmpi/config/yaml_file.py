"""Reading and writing YAML for configurations and tables."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pflmpi.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as everybody expects."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$|^[-+]?\d[\d_]*\.[\d_]*$|^[-+]?\.(inf|Inf|INF)$|^\.nan$"
    ),
    list("-+0123456789."),
)


def read(path: Path) -> dict[str, Any]:
    """Contents of a YAML file that holds a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read {path}: {reason}") from error
    content = parse(text, str(path))
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no mapping; it must have lines of the form `key: value`")
    return content


def parse(text: str, where: str) -> Any:
    """Value of a YAML text; `where` names its place in the error if it is invalid."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error


def dump(values: Mapping[str, Any]) -> str:
    """Plain values as YAML."""
    text: str = yaml.safe_dump(dict(values), sort_keys=False, default_flow_style=None, width=120)
    return text
