"""The papers' tables as files: a run can start from every cell, and the published figures are those of the papers."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import torch

from every_algorithm import ON_ANY_MODEL
from pflmpi import tree
from pflmpi.config import load as configuration
from pflmpi.config import yaml_file
from pflmpi.data import dataset
from pflmpi.data.config import DataConfig, PartitionConfig
from pflmpi.data.federation import build
from pflmpi.experiment.build import prepare
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Sum
from pflmpi.models.resnet18 import ResNet18
from pflmpi.sweep.table import find_sweep_folder, list_cells, load
from project import ROOT

PAPERS = ROOT / "configs" / "papers"
FILES = sorted(PAPERS.rglob("*.yaml"))
WITH_RUNS = [path for path in FILES if not load(path).runs_of]
# Shape of an image, number of classes, training and test samples of each.
SIZES = {
    "digits": ((1, 8, 8), 10, 180, 0),
    "mnist": ((1, 28, 28), 10, 6000, 1000),
    "fashion_mnist": ((1, 28, 28), 10, 6000, 1000),
    "cifar10": ((3, 32, 32), 10, 5000, 1000),
    "cifar100": ((3, 32, 32), 100, 500, 100),
    "femnist": ((1, 28, 28), 62, 2000, 200),
}


def cell(name, row, column):
    """The cell of a file, with the first seed."""
    return next(
        table_cell
        for table_cell in list_cells(load(PAPERS / name), (), 1)
        if (table_cell.row, table_cell.column) == (row, column)
    )


def published(name):
    return load(PAPERS / name).published


bind_once = functools.cache(ResNet18.bind)  # which takes longer than everything else here together


@functools.cache
def federation(name, partition, split, test_share):
    """The clients of a partition of samples as many as a dataset has, without the dataset."""
    shape, num_classes, train, test = SIZES[name]
    labels = np.tile(np.arange(num_classes), train + test)
    images = np.broadcast_to(np.uint8(0), (len(labels), *shape))
    official_test = np.arange(len(labels)) >= num_classes * train
    blank = dataset.assemble(name, images[:, :1, :1, :1], labels, official_test, num_classes, digest="0")
    blank = dataclasses.replace(blank, images=images)  # a view of one number, which `assemble` would copy
    section = PartitionConfig(**json.loads(partition))
    return build(blank, section, DataConfig(name=name, split=split, test_share=test_share), 0)


# Every table and figure with data of the five papers, a part with a quantity of its own counted by itself.
PUBLISHED = {
    "fedfcd": ("table1", "table2", "table3", "figure3", "figure5", "figure6", "figure7"),
    "pfedpm": ("table1", "table1_parameters", "table2", "table2_parameters", "figure3"),
    "pfedafe": ("figure2", "figure4", "figure5"),
    "pfedcfr": ("table2", "table3", "figure2", "figure2_loss", "figure3"),
    "fedgmh": ("table2", "table3", "table4", "table5", "table6", "table7", "figure3", "figure4"),
}


def test_there_is_a_file_for_every_table_and_figure_of_the_papers():
    paths = {str(path.relative_to(PAPERS).with_suffix("")) for path in FILES}
    assert paths == {
        "digits",
        "digits_unseen",
        "examples",
        "messages",
        "tuned",
        "tuned_fashion",
        *(f"{paper}/{paper}_{name}" for paper, names in PUBLISHED.items() for name in names),
    }


def test_a_file_has_a_sweep_folder_of_its_own_or_that_of_the_runs_it_shows():
    assert len({find_sweep_folder(path, None) for path in WITH_RUNS}) == len(WITH_RUNS)
    for path in set(FILES) - set(WITH_RUNS):
        assert find_sweep_folder(path, None) in {
            find_sweep_folder(sibling, None) for sibling in WITH_RUNS if sibling.parent == path.parent
        }


@pytest.mark.parametrize("path", WITH_RUNS, ids=lambda path: path.stem)
def test_a_run_can_start_from_every_row_and_every_column(path, monkeypatch):
    """All cells are valid configurations; the clients are made for the first cell of each row and of each column."""
    monkeypatch.setattr(ResNet18, "bind", bind_once)
    rows: set[str] = set()
    columns: set[str] = set()
    for cell in list_cells(load(path), (), 1):
        config = configuration.parse(cell.raw)
        if cell.row in rows and cell.column in columns:
            continue
        rows.add(cell.row)
        columns.add(cell.column)
        data, partition = config.data, json.dumps(config.partition.__dict__)
        loaded = federation(data.name, partition, data.split, data.test_share)
        prepare(config, torch.device("cpu"), federation=loaded)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_names_its_source_and_its_figures_are_percentages(path):
    table = load(path)
    assert len(table.source) > 5 and "\n" not in table.source
    low, high = {"train_loss": (0, 3), "parameters": (1, 1e6)}.get(table.metric, (1, 100))
    for columns in table.published.values():
        for value, *spread in columns.values():
            assert low < value < high and all(0 < deviation < 15 for deviation in spread)


@pytest.mark.parametrize("path", WITH_RUNS, ids=lambda path: path.stem)
def test_data_folders_are_left_to_the_user_and_disks_do_not_fill(path):
    for table_cell in list_cells(load(path), (), 1):
        assert "root" not in table_cell.raw["data"] and "runtime" not in table_cell.raw
        assert table_cell.raw["checkpoint"]["every"] >= 30 and table_cell.raw["checkpoint"]["keep"] == 1


@pytest.mark.parametrize(
    "name, row, column, figure",
    [
        ("fedfcd/fedfcd_table1.yaml", "FedFCD", "Fashion-MNIST pat", [99.17]),
        ("fedfcd/fedfcd_table1.yaml", "FedFCD", "CIFAR-100 Dir(0.1)", [47.40]),
        ("fedfcd/fedfcd_table1.yaml", "GPFL", "CIFAR-10 pat", [89.24]),
        ("fedfcd/fedfcd_table2.yaml", "FedAMP", "Dir(0.1) m=100", [86.70]),
        ("fedfcd/fedfcd_table3.yaml", "w/o FD", "Dir(0.1)", [90.50]),
        ("fedfcd/fedfcd_figure6.yaml", "eta=0.01", "Dir(0.1)", [91.19]),
        ("fedfcd/fedfcd_figure7.yaml", "lambda=0", "Dir(0.1)", [89.32]),
        ("pfedpm/pfedpm_table1.yaml", "pFedPM", "MNIST n=3", [98.50, 0.42]),
        ("pfedpm/pfedpm_table1.yaml", "pFedPM-mh", "CIFAR-10 n=5", [63.25, 4.18]),
        ("pfedpm/pfedpm_table1.yaml", "L2GD", "FEMNIST n=4", [93.78, 2.46]),
        ("pfedpm/pfedpm_table2.yaml", "R-pFedPM", "CIFAR-10 n=3", [66.31, 3.42]),
        ("pfedpm/pfedpm_table2.yaml", "R-pFedPM-mh", "MNIST n=5", [96.68, 0.46]),
        ("pfedpm/pfedpm_figure3.yaml", "a=0.6", "FEMNIST n=5", [93.35, 2.54]),
        ("pfedpm/pfedpm_table1_parameters.yaml", "FedPer", "MNIST", [106]),
        ("pfedpm/pfedpm_table2_parameters.yaml", "R-pFedPM", "CIFAR-10", [82]),
        ("pfedafe/pfedafe_figure4.yaml", "pfedafe", "CIFAR-100 alpha=0.05", [0.1]),
        ("pfedafe/pfedafe_figure5.yaml", "pfedafe", "Fashion-MNIST alpha=0.05", [94]),
        ("pfedcfr/pfedcfr_table2.yaml", "pFedCFR", "CIFAR-10 (CNN)", [78.09, 0.10]),
        ("pfedcfr/pfedcfr_table2.yaml", "Ditto", "Fashion-MNIST (DNN)", [94.98, 0.82]),
        ("pfedcfr/pfedcfr_table3.yaml", "r=56", "MNIST", [96.14, 0.04]),
        ("pfedcfr/pfedcfr_table3.yaml", "r=50", "Fashion-MNIST", [95.24, 0.23]),
        ("fedgmh/fedgmh_table2.yaml", "FedGMH", "MNIST alpha=0.5", [98.66, 0.15]),
        ("fedgmh/fedgmh_table2.yaml", "FedPer", "CIFAR-100 alpha=5", [61.72, 0.56]),
        ("fedgmh/fedgmh_table3.yaml", "FedCP", "E=10", [94.71, 0.11]),
        ("fedgmh/fedgmh_table4.yaml", "FedGMH", "100 %", [80.71, 0.16]),
        ("fedgmh/fedgmh_table5.yaml", "GMH-oa", "CIFAR-100", [63.34, 1.38]),
        ("fedgmh/fedgmh_table6.yaml", "beta=0.9", "CIFAR-100", [77.62, 0.24]),
        ("fedgmh/fedgmh_table7.yaml", "eta_h=0.01", "CIFAR-100", [76.06, 0.30]),
    ],
)
def test_the_published_figures_are_those_that_are_printed(name, row, column, figure):
    assert published(name)[row][column] == figure


@pytest.mark.parametrize(
    "name, rows, columns",
    [
        ("fedfcd/fedfcd_table1.yaml", 8, 6),
        ("fedfcd/fedfcd_table3.yaml", 4, 2),
        ("pfedpm/pfedpm_table1.yaml", 9, 9),
        ("pfedpm/pfedpm_table2.yaml", 4, 9),
        ("pfedcfr/pfedcfr_table2.yaml", 6, 3),
        ("pfedcfr/pfedcfr_table3.yaml", 6, 3),
        ("fedgmh/fedgmh_table2.yaml", 12, 6),
        ("fedgmh/fedgmh_table3.yaml", 12, 4),
        ("fedgmh/fedgmh_table4.yaml", 12, 4),
        ("fedgmh/fedgmh_table5.yaml", 4, 3),
        ("fedgmh/fedgmh_table6.yaml", 10, 1),
        ("fedgmh/fedgmh_table7.yaml", 5, 1),
    ],
)
def test_whole_tables_are_published(name, rows, columns):
    figures = published(name)
    assert len(figures) == rows and all(len(row) == columns for row in figures.values())


@pytest.mark.parametrize(
    "name, row, column, sections",
    [
        ("fedfcd/fedfcd_table1.yaml", "FedFCD", "Fashion-MNIST pat", {"algorithm": {"align_weight": 1.0}}),
        ("fedfcd/fedfcd_table1.yaml", "FedFCD", "CIFAR-10 pat", {"algorithm": {"align_weight": 5.0}}),
        ("fedfcd/fedfcd_table2.yaml", "FedAvg", "pat m=100", {"training": {"participation": 0.2, "rounds": 500}}),
        ("pfedpm/pfedpm_table1.yaml", "pFedPM", "MNIST n=4", {"algorithm": {"own_weight": 0.4, "prototype_weight": 1}}),
        ("pfedpm/pfedpm_table1.yaml", "pFedPM", "CIFAR-10 n=5", {"algorithm": {"own_weight": 0.6}}),
        ("pfedpm/pfedpm_table1.yaml", "pFedPM", "CIFAR-10 n=5", {"algorithm": {"prototype_weight": 0.1}}),
        ("pfedpm/pfedpm_table1.yaml", "FedProx", "MNIST n=3", {"training": {"rounds": 110, "momentum": 0.5}}),
        ("pfedpm/pfedpm_table1.yaml", "FedProx", "FEMNIST n=3", {"training": {"rounds": 300}}),
        ("pfedpm/pfedpm_table1.yaml", "FedPer", "CIFAR-10 n=3", {"training": {"rounds": 250}}),
        ("pfedpm/pfedpm_table1.yaml", "FedRep", "FEMNIST n=5", {"algorithm": {"personal_layers": 2}}),
        ("pfedafe/pfedafe_figure5.yaml", "FedPer", "CIFAR-100 alpha=1", {"training": {"epochs": 3, "batch_size": 32}}),
        ("pfedafe/pfedafe_figure5.yaml", "FedPer", "CIFAR-100 alpha=1", {"model": {"third_channels": 128}}),
        ("pfedcfr/pfedcfr_table2.yaml", "pFedCFR", "CIFAR-10 (CNN)", {"algorithm": {"num_personal_layers": 2}}),
        ("pfedcfr/pfedcfr_table2.yaml", "pFedMe", "MNIST (DNN)", {"training": {"steps": 10, "lr": 0.005}}),
        ("fedgmh/fedgmh_table2.yaml", "FedGMH", "CIFAR-100 alpha=5", {"training": {"rounds": 300}}),
        ("fedgmh/fedgmh_table3.yaml", "FedGH", "E=8", {"training": {"epochs": 8, "lr_decay": 0.99}}),
    ],
)
def test_the_settings_of_a_cell_are_those_of_the_paper(name, row, column, sections):
    raw = cell(name, row, column).raw
    for section, values in sections.items():
        assert {key: raw[section][key] for key in values} == values


@pytest.mark.parametrize(
    "name, row, section, values",
    [
        ("fedgmh/fedgmh_table2.yaml", "FedProx", "algorithm", {"prox_weight": 0.0}),
        ("fedgmh/fedgmh_table2.yaml", "Ditto", "algorithm", {"prox_weight": 0.0, "personal_epochs": 1}),
        ("fedgmh/fedgmh_table2.yaml", "FedAMP", "algorithm", {"prox_weight": 0.0}),
        ("fedgmh/fedgmh_table2.yaml", "FedCP", "algorithm", {"alignment_weight": 1.0}),
        ("fedgmh/fedgmh_table2.yaml", "FedRep", "algorithm", {"head_epochs": 1}),
        ("fedgmh/fedgmh_table2.yaml", "FedGH", "algorithm", {"global_head_lr": 1.0, "server_batch_size": None}),
        ("fedgmh/fedgmh_table2.yaml", "FedGMH", "algorithm", {"server_batch_size": 1}),
        ("fedgmh/fedgmh_table2.yaml", "FedPer", "training", {"drop_last": True}),
        ("fedgmh/fedgmh_table2.yaml", "FedPer", "partition", {"draw": "pfllib"}),
        ("fedfcd/fedfcd_table1.yaml", "FedAvg", "partition", {"draw": "pfllib"}),
        ("pfedpm/pfedpm_table1.yaml", "Local", "training", {"drop_last": True}),
        ("pfedpm/pfedpm_table1.yaml", "Local", "data", {"test_per_class": 40, "normalize": "standard"}),
        ("pfedcfr/pfedcfr_table2.yaml", "Ditto", "algorithm", {"personal_steps": 1}),
        ("pfedcfr/pfedcfr_table2.yaml", "FedAvg", "data", {"normalize": "pixel"}),
        ("pfedcfr/pfedcfr_table2.yaml", "FedAvg", "partition", {"classes_per_client": 5, "pairing": "cyclic"}),
    ],
)
def test_what_a_paper_leaves_open_is_as_in_the_public_code_that_its_setting_comes_from(name, row, section, values):
    """In the first column; PFLlib, FedGMH's repository, FedProto and Ditto."""
    raw = cell(name, row, next(iter(load(PAPERS / name).columns))).raw
    assert {key: raw[section][key] for key in values} == values


@pytest.mark.parametrize(
    "row, column",
    [("FedPer", "MNIST"), ("FedRep", "MNIST"), ("FedAvg", "MNIST"), ("FeSEM", "MNIST"), ("FedProx", "MNIST"),
     ("FedPer", "FEMNIST"), ("FedRep", "FEMNIST")],
)  # fmt: skip
def test_the_averaged_parts_of_all_clients_are_as_large_as_published(row, column):
    name = "pfedpm/pfedpm_table1_parameters.yaml"
    config = configuration.parse(cell(name, row, column).raw)
    (model,) = config.models
    shape, num_classes, *_ = SIZES[config.data.name]
    task = Task(model.bind(shape, num_classes), config.training, 20, 0, (0.5,), (0.5,))
    sent = sum(
        leaf.numel()
        for kind in config.algorithm.uplink(task).values()
        if isinstance(kind, Sum)
        for _, leaf in tree.leaves(kind.like)
    )
    (figure,) = published(name)[row][column]
    assert 20 * sent / 1000 == pytest.approx(figure, rel=0.045)  # FedRep's 110 for our 105.6, FedAvg's 430 for 436.8


@pytest.mark.parametrize("column", ["MNIST n=3", "FEMNIST n=3", "CIFAR-10 n=3"])
def test_model_heterogeneity_means_several_models_and_the_same_features(column):
    models = cell("pfedpm/pfedpm_table1.yaml", "pFedPM-mh", column).raw["model"]
    assert len({json.dumps(model) for model in models}) == (2 if "CIFAR" in column else 3)  # FedProto has two
    single_model = cell("pfedpm/pfedpm_table1.yaml", "pFedPM", column).raw["model"]
    assert {model["name"] for model in models} == {single_model["name"]}


def test_the_digits_table_has_every_algorithm_and_trains_as_the_quickstart():
    every = list_cells(load(PAPERS / "digits.yaml"), (), 1)
    assert {table_cell.raw["algorithm"]["name"] for table_cell in every} == set(ON_ANY_MODEL)
    quickstart = yaml_file.read(PAPERS.parent / "quickstart.yaml")
    assert cell("digits.yaml", "FedGMH", "digits").raw["training"] == quickstart["training"]
    assert cell("digits.yaml", "FedGMH", "digits").raw["partition"] == quickstart["partition"]
