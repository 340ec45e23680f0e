"""Every registered algorithm with every variant that it declares, so that a new one is tested without being named."""

import copy
from functools import cache
from typing import get_args, get_type_hints

from pflmpi.algorithms import ALGORITHMS

# `fedbn` refuses models without batch norm; its conformance is in tests/algorithms/test_fedbn.py.
ON_ANY_MODEL = tuple(name for name in ALGORITHMS if name != "fedbn")

# Where the defaults would not show much in a few rounds of a small model: nearer scales, shorter passes.
OPTIONS = {
    "fedala": {"longest": 13, "threshold": 0.02, "share": 0.6},
    "fedavg_ft": {"fine_tuning_epochs": 2},
    "fedbabu": {"fine_tuning_epochs": 2},
    "fedamp": {"alpha": 0.5, "sigma": 2.0},
    "fedrep": {"head_epochs": 2},
    "pfedcfr": {"alpha": 0.5, "sigma": 2.0},
    "pfedme": {"inner_steps": 2},
}
# Options that change what travels or how the server works, beside those called `variant`.
MORE = {
    "fedamp-cosine": {"weighting": "cosine", "start": "cloud", "sigma": 1e6},
    "ditto-personal_epochs": {"personal_epochs": 2},
    "fedfcd-batch": {"alternation": "batch"},
    "fesem-samples": {"weighting": "samples"},
    "fedavg-clients": {"weighting": "clients"},
    "scaffold-gradient": {"control": "gradient", "server_lr": 0.5},
    "fedproto-as_printed": {"class_mean_weighting": "as_printed"},
    "fedgmh-mixed": {"evaluated": "mixed"},
    "fedproto-means": {"loss_on": "means"},
    "pfedpm-relation": {"relation": True},
    "perfedavg-hessian_free": {"order": "hessian_free"},
    "pfedcfr-no_personal_layers": {"num_personal_layers": 0},
    "pfedcfr-tensor": {"layer_unit": "tensor", "num_personal_layers": 1},
    "pfedpm-bounds": {"bounds": True},
    "fedgmh-turnover": {"label_turnover": 1},
    "fedgmh-repository": {
        "server_batch_size": 1,
        "critical_from": "own",
        "importance": "squared_change",
        "ranked": "tensor",
        "evaluated": "mixed",
    },
}
# Those that need every client in every round, and those that refuse momentum.
TRAINING = {"l2gd": {"participation": 1.0}, "scaffold": {"momentum": 0.0}}
# Cases that have every kind of message between them: means, sums, what is compared and mixed, what is offered and
# chosen, rows and own rows, class means and what is shared by all, rows of the classes held, introductions.
MESSAGE_KINDS = ("fedavg", "scaffold", "fedamp", "fedfomo", "fesem", "fedproto", "fedgmh-full", "fedfcd-full")
# Algorithms whose clients are tested each in a way of its own: with what they keep or receive, parts of both, a mixture
# of models, an answer of the server, models of others, after an adaptation.
TESTED = (
    *("fedavg", "local", "fedper", "fedproto", "fedgmh", "fedfcd", "fedamp", "fedfomo", "fesem", "apfl"),
    *("pfedafe", "perfedavg"),
)
# Cases whose clients train each with a loss or a loop of its own.
LOSSES = ("fedavg", "fedproto", "fedfcd-full", "apfl", "fedcp", "gpfl", "pfedpm-relation")


def every_algorithm():
    """Return the sections `algorithm` and `training` of each, by a name for the test."""
    return copy.deepcopy(_sections())


@cache  # thirty files ask for them, and type hints take long to read
def _sections():
    sections = {}
    for name in ON_ANY_MODEL:
        kind = ALGORITHMS[name]
        section = {"name": name, **OPTIONS.get(name, {})}
        hints = get_type_hints(kind)
        if "variant" not in hints:
            sections[name] = section
        for variant in get_args(hints.get("variant")):
            sections[f"{name}-{variant}"] = {**section, "variant": variant}
    for case, options in MORE.items():
        name = case.split("-")[0]
        sections[case] = {"name": name, **OPTIONS.get(name, {}), **options}
    return {
        case: {"algorithm": section, "training": TRAINING.get(section["name"], {})}
        for case, section in sections.items()
    }
