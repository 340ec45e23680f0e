"""Names that a model's arrays have in an ordinary torch module; needs no torch."""

from collections.abc import Iterable

_PARTS = ("body/", "head/", "stats/")


def module_names(paths: Iterable[str], head: str | None = None) -> dict[str, str]:
    """Path -> name in a module.

    A model's body and statistics have no prefix; its head is "head", and in a residual network, as in torchvision, "fc"
    ("fc.2" after a hidden layer); `head` gives another name. Arrays outside a model keep their path, with dots.

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
