"""Shell completion of commands, options, names and keys, by argcomplete.

Names and keys are repeated here, because importing the modules that define them takes seconds; a test compares them.
"""

# ruff: noqa: SIM905

import argparse
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import entry_points

_NAMES = {
    "algorithm": """
        apfl ditto fedadagrad fedadam fedala fedamp fedavg fedavg_ft fedavgm fedbabu fedbn fedcp fedfcd fedfomo fedgh
        fedgmh fednova fedpac fedper fedproto fedprox fedrep fedrod fedyogi fesem gpfl l2gd lgfedavg local moon
        perfedavg pfedafe pfedcfr pfedme pfedpm scaffold
    """.split(),
    "data": "cifar10 cifar100 digits emnist fashion_mnist femnist mnist".split(),
    "model": "cnn dnn dropout_cnn lenet logistic mlp protocnn resnet18".split(),
    "partition": "dirichlet exdir iid lognormal nway_kshot pathological writers".split(),
}
_KEYS = {
    "data": """
        name path label task client layout normalize transform root download split test_share test_per_class
        validation limit resident
    """.split(),
    "training": """
        rounds stop participation selection dropout step_seconds step_spread deadline without_clients epochs steps
        batch_size micro_batch drop_last lr schedule lr_decay decay_rounds decay_floor decay_by warmup optimizer
        momentum beta1 beta2 epsilon keep_optimizer weight_decay clip_norm label_smoothing precision init bn
    """.split(),
    "uplink": "clip noise top_k quantise delta".split(),
    "evaluation": "every absent when batch_size unseen unseen_updates measures".split(),
    "checkpoint": "every keep".split(),
    "output": ["trackers", "events"],
    "runtime": """
        transport device gpus gpu_memory between_gpus mixed_gpus executor lanes state scratch threads timeout
        spare server client_errors cache
    """.split(),
}


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and end the process; return if argcomplete is not installed."""
    with suppress(ImportError):
        import argcomplete

        for command in [parser, *_commands(parser)]:
            for action in command._actions:
                if action.dest in ("overrides", "name"):
                    action.completer = _overrides if action.dest == "overrides" else _every_name  # type: ignore[attr-defined]
        argcomplete.autocomplete(parser)


def names(section: str) -> list[str]:
    """The names in a section: the package's own, and those of installed packages."""
    group = "pflmpi.data" if section == "data" else f"pflmpi.{section}s"
    return [*_NAMES[section], *(point.name for point in entry_points(group=group))]


def keys() -> list[str]:
    """The keys of sections whose keys do not depend on a name."""
    return [f"{section}.{field}" for section, fields in _KEYS.items() for field in fields]


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def _every_name(**_: object) -> list[str]:
    return [*(name for section in _NAMES for name in names(section)), *_KEYS]


def _overrides(prefix: str, **others: object) -> list[str]:
    key, equals, _ = prefix.partition("=")
    if equals:
        section = key.removesuffix(".name")
        return [f"{key}={name}" for name in names(section)] if section in _NAMES else []
    every_key = [*(f"{section}.name" for section in _NAMES), *keys()]
    return [f"{key}=" for key in dict.fromkeys(every_key)]
