"""What an algorithm does where a configuration says nothing more than its name; every default with its source."""

import dataclasses

import pytest

from pflmpi.algorithms import ALGORITHMS

# By algorithm, in the order in which they are declared. Weighting "samples": n_i over the sum, as FedAvg; "clients":
# the plain mean that a paper writes.
DEFAULTS = {
    "apfl": {"weighting": "clients", "alpha": 0.5, "adaptive": True, "alpha_lr": None},  # the authors' code: 0.5
    "ditto": {
        "weighting": "clients",
        "prox_weight": 1.0,
        "personal_epochs": None,
        "personal_steps": None,
    },  # lambda = 1 of {0.1, 1, 2}
    # tau, beta1, beta2 of the paper; eta, which it tunes, is ours
    "fedadagrad": {"weighting": "clients", "server_lr": 0.1, "beta1": 0.0, "tau": 1e-3},
    "fedadam": {
        "weighting": "clients",
        "server_lr": 0.1,
        "beta1": 0.9,
        "tau": 1e-3,
        "beta2": 0.99,
    },
    "fedala": {
        "adaptive_layers": 1,
        "share": 0.8,
        "weight_lr": 1.0,
        "threshold": 0.1,
        "longest": 30,
    },
    "fedamp": {
        "alpha": 1e4,  # paper, section 5: alpha_k, sigma, lambda
        "prox_weight": 1.0,
        "sigma": 1e6,
        "weighting": "distance",
        "cosine_scale": 10.0,
        "self_weight": 0.5,
        "start": "own",
    },
    "fedavg": {"weighting": "samples"},
    "fedavg_ft": {"weighting": "samples", "fine_tuning_epochs": 10, "fine_tuned": "model"},
    "fedavgm": {"weighting": "samples", "server_lr": 1.0, "server_momentum": 0.9},
    "fedbabu": {"weighting": "samples", "fine_tuning_epochs": 5, "fine_tuned": "model"},  # tau_f = 5
    "fedbn": {"weighting": "clients"},  # algorithm 1: 1/K
    "fedcp": {"weighting": "samples", "alignment_weight": 5.0},  # lambda of the authors' runs
    "fedfcd": {
        "align_weight": 1.0,
        "body_lr": None,
        "head_lr": None,
        "global_head_lr": 0.01,
        "alternation": "epoch",
        "class_mean_weighting": "samples",
        "server_epochs": 1,
        "server_batch_size": None,
        "variant": "full",
    },
    "fedfomo": {"received_models": 5, "held_out": 0.2, "exploration": 0.3, "exploration_decay": 0.05},
    "fedgh": {"global_head_lr": 0.01, "server_epochs": 1, "server_batch_size": 1},  # a step for each pair, rate 0.01
    "fedgmh": {
        "critical_share": 0.5,
        "head_lr": 1.0,
        "server_epochs": 1,
        "server_batch_size": 1,  # eq. 6 and the authors' repository: a step for every mean
        "variant": "full",
        "critical_from": "global",
        "importance": "change",
        "ranked": "head",
        "label_turnover": None,
        "evaluated": "trained",
    },
    "fednova": {"weighting": "samples"},
    "fedpac": {"alignment_weight": 1.0, "head_epochs": 1, "head_lr": 0.1, "combine_heads": True},
    "fedper": {"weighting": "samples", "personal_layers": 1},  # eq. 4: n_j / n; K_P of the paper is 1 to 4
    "fedproto": {
        "prototype_weight": 1.0,
        "class_mean_weighting": "samples",
        "predict_with": "prototypes",
        "loss_on": "samples",
    },
    "fedprox": {"weighting": "samples", "prox_weight": 0.01},  # mu of {0.001, 0.01, 0.1, 1}; 0 would be FedAvg
    # The authors' runs: 10 epochs of the head, then the body
    "fedrep": {"weighting": "clients", "personal_layers": 1, "head_epochs": 10},
    "fedrod": {"weighting": "samples", "predict_with": "personal"},
    "fedyogi": {"weighting": "clients", "server_lr": 0.1, "beta1": 0.9, "tau": 1e-3, "beta2": 0.99},
    "fesem": {"num_clusters": 3, "weighting": "clients"},
    "gpfl": {"weighting": "samples", "magnitude_weight": 0.01, "guidance_decay": 0.1},  # lambda, mu of the CNN runs
    "l2gd": {"prox_weight": 1.0, "aggregation_probability": 0.2},
    "lgfedavg": {"weighting": "clients"},
    "local": {},
    "moon": {"weighting": "samples", "contrast_weight": 5.0, "temperature": 0.5},  # mu of CIFAR-10, tau = 0.5
    "perfedavg": {"weighting": "clients", "order": "first", "inner_lr": 0.01, "adapt_steps": 1, "difference": 1e-3},
    "pfedafe": {
        "weighting": "clients",
        "personal_layers": 1,
        "beta_init": 0.5,
        "beta_steps": 10,
        "beta_lr": 0.1,
        "adaptive": True,
    },
    "pfedcfr": {
        "num_personal_layers": None,
        "thresholds": None,
        "rules": None,
        "layer_unit": "module",
        "alpha": 1e4,
        "sigma": 1e6,
        "prox_weight": 1.0,
        "decision_prox_weight": 1e-3,
        "start": "fused",
    },
    "pfedme": {"weighting": "clients", "prox_weight": 15.0, "personal_lr": 0.09, "inner_steps": 5, "server_mix": 1.0},
    "pfedpm": {
        "own_weight": 0.3,
        "prototype_weight": 1.0,
        "distance": "l2",
        "norm_epsilon": 0.0,
        "class_mean_weighting": "samples",
        "relation": False,
        "relation_lr": None,
        "bounds": False,
    },
    "scaffold": {"weighting": "clients", "server_lr": 1.0, "control": "steps"},  # option II, eta_g = 1
}


def test_every_algorithm_is_in_the_list():
    assert sorted(DEFAULTS) == sorted(ALGORITHMS)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_those_of_the_list(name):
    assert {field.name: field.default for field in dataclasses.fields(ALGORITHMS[name])} == DEFAULTS[name]
