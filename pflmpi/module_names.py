"""Names of a model's arrays in an ordinary torch module; needs no torch."""

from collections.abc import Iterable

_PARTS = ("body/", "head/", "stats/")


def module_names(paths: Iterable[str], head: str | None = None) -> dict[str, str]:
    """Map the paths of arrays to names in a module.

    Body and statistics have no prefix. The head is called `head` if that is given; otherwise "fc" in a residual network
    as in torchvision ("fc.2" after a hidden layer), and "head" in others. Other arrays keep their path, with dots.

    >>> module_names(["body/fc1/weight", "head/bias", "means"])
    {'body/fc1/weight': 'fc1.weight', 'head/bias': 'head.bias', 'means': 'means'}
    """
    names = list(paths)
    if head is None and any(path.startswith("body/layer4/") for path in names):
        head = "fc.2" if "body/fc/0/weight" in names else "fc"
    return {path: _name(path, head or "head") for path in names}


def _name(path: str, head: str) -> str:
    part = next((prefix for prefix in _PARTS if path.startswith(prefix)), "")
    rest = path.removeprefix(part).replace("/", ".")
    return f"{head}.{rest}" if part == "head/" else rest
