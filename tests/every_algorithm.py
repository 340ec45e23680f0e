"""Every registered algorithm with every variant that it declares, so that a new one is tested without being named."""

from typing import Any, get_args, get_type_hints

from pflmpi.algorithms import ALGORITHMS

# Where the defaults would not show much: models of a few rounds are near each other, so FedAMP's scale is small.
OPTIONS: dict[str, dict[str, Any]] = {"fedamp": {"alpha": 0.5, "sigma": 2.0}}


def every_algorithm() -> dict[str, dict[str, Any]]:
    """Return the `algorithm` section of each, by a name for the test."""
    cases: dict[str, dict[str, Any]] = {}
    for name, kind in ALGORITHMS.items():
        section = {"name": name, **OPTIONS.get(name, {})}
        hints = get_type_hints(kind)
        if "variant" not in hints:
            cases[name] = section
        for variant in get_args(hints.get("variant")):
            cases[f"{name}-{variant}"] = {**section, "variant": variant}
    return cases
