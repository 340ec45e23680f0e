"""A table file: which cells it has, their configurations, and what is refused."""

import pytest

import table_file
from pflmpi.config.load import parse
from pflmpi.config.sections import merge
from pflmpi.errors import ConfigError
from pflmpi.sweep import table as tables
from pflmpi.sweep.table import Cell, list_cells, select_cells


def cell(all_cells, name):
    (raw,) = [listed.raw for listed in all_cells if listed.name == name]
    return raw


def load(folder, **changes):
    return tables.load(table_file.write(folder, **changes))


def test_the_cells_are_rows_by_columns_by_seeds_in_the_order_of_the_file(tmp_path):
    names = [listed.name for listed in list_cells(load(tmp_path, rows={"B": {}, "A": {}}), [], None)]
    assert names == [f"{row}/{column}/seed{seed}" for row in "BA" for column in ("few", "many (M)") for seed in (0, 1)]
    assert [listed.seed for listed in list_cells(load(tmp_path, seeds=[7, 3, 5]), [], 2)][:2] == [7, 3]


def test_base_column_row_and_exceptions_are_merged_in_this_order(tmp_path):
    table = load(
        tmp_path,
        base={
            "training": {"rounds": 1, "lr": 0.1, "momentum": 0.1, "epochs": 1},
            "model": {"name": "cnn", "hidden": 9},
        },
        columns={"C": {"training": {"lr": 0.2, "momentum": 0.2, "epochs": 2}, "model": {"name": "mlp"}}, "D": {}},
        rows={
            "R1": {"training": {"momentum": 0.3, "epochs": 3}, "algorithm": {"name": "fedprox", "prox_weight": 1.0}},
            "R2": {},
        },
        exceptions=[
            {"row": "R*", "set": {"training": {"epochs": 4}}},
            {"row": "R1", "column": "C", "set": {"training": {"epochs": 5}, "algorithm": {"prox_weight": 2.0}}},
            {"column": "D", "set": {"training": {"epochs": 6}}},
        ],
    )
    cells = list_cells(table, ["training.batch_size=8"], 1)
    assert cell(cells, "R1/C/seed0") == {
        "seed": 0,
        "training": {"rounds": 1, "lr": 0.2, "momentum": 0.3, "epochs": 5, "batch_size": 8},
        "model": {"name": "mlp"},
        "algorithm": {"name": "fedprox", "prox_weight": 2.0},
    }
    assert cell(cells, "R2/C/seed0")["training"] == {
        "rounds": 1, "lr": 0.2, "momentum": 0.2, "epochs": 4, "batch_size": 8,
    }  # fmt: skip
    assert cell(cells, "R2/D/seed0")["training"]["epochs"] == 6


@pytest.mark.parametrize(
    "before, over, expected",
    [
        ({"name": "cnn", "hidden": 9}, {"name": "mlp"}, {"name": "mlp"}),
        ({"name": "cnn"}, {"hidden": 5}, {"name": "cnn", "hidden": 5}),
        ({"name": "cnn"}, [{"name": "mlp"}, {"name": "cnn"}], [{"name": "mlp"}, {"name": "cnn"}]),
        ([{"name": "mlp"}], {"name": "cnn"}, {"name": "cnn"}),
    ],
)
def test_a_section_with_a_name_and_a_list_replace_and_others_are_merged(before, over, expected):
    raw = {"model": before}
    assert merge(raw, {"model": over}) == {"model": expected}
    assert raw == {"model": before}


def test_an_empty_section_of_a_row_in_place_of_keys_of_base_is_refused(tmp_path):
    table = load(tmp_path, base={"training": {"rounds": 2}}, columns={"C": {}}, rows={"R": {"training": None}})
    with pytest.raises(ConfigError, match="R/C: training is null, in place of rounds; give the keys"):
        list_cells(table, [], 1)


def test_keys_cannot_be_merged_into_a_list(tmp_path):
    table = load(tmp_path, base={"model": [{"name": "mlp"}]}, columns={"C": {"model": {"hidden": 3}}})
    with pytest.raises(ConfigError, match=r"FedAvg/C: model = .*give the whole section"):
        list_cells(table, [], None)


def test_every_cell_of_the_small_table_is_a_valid_configuration(tmp_path):
    for listed in list_cells(load(tmp_path), [], None):
        assert parse(listed.raw).seed == listed.seed


def test_numbers_can_be_names_and_1e_3_is_a_number(tmp_path):
    path = tmp_path / "numbers.yaml"
    path.write_text(
        "{title: t, source: s, seeds: [0], rows: {0.5: {training: {lr: 1e-3}}}, columns: {10: {}},\n"
        "exceptions: [{column: 10, set: {}}], published: {0.5: {10: 80}}}\n"
    )
    table = tables.load(path)
    assert table.published == {"0.5": {"10": [80]}}
    assert cell(list_cells(table, [], None), "0.5/10/seed0")["training"] == {"lr": 0.001}


def test_folders_of_cells_have_safe_names_below_the_folder_of_the_sweep(tmp_path):
    odd_cell = Cell("../a b", "K=10, β", 3, {})
    assert odd_cell.run(tmp_path) == tmp_path / "a_b" / "K=10_β" / "seed3"
    assert odd_cell.config(tmp_path).name == "seed3.yaml" and odd_cell.log(tmp_path).name == "seed3.log"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"title": None}, ["table.title", "is missing"]),
        ({"source": None}, ["table.source", "is missing"]),
        ({"rows": None}, ["table.rows", "is missing"]),
        ({"columns": {}}, ["table.columns", "at least 1"]),
        ({"seeds": []}, ["table.seeds", "at least 1"]),
        ({"seeds": [0, 1, 0]}, ["table.seeds", "give each seed once"]),
        ({"seeds": [-1]}, ["table.seeds.0 = -1"]),
        ({"metric": "accuracy"}, ["table.metric = 'accuracy'", "weighted"]),
        ({"figure": "first"}, ["table.figure = 'first'", "'last10'"]),
        ({"colums": {}}, ["unknown key", "'colums'", "did you mean 'columns'"]),
        ({"base": {"modle": {}}}, ["base", "'modle'", "did you mean 'model'"]),
        ({"base": {"seed": 3}}, ["base.seed", "`seeds`"]),
        ({"rows": {"A": {"algorithms": {}}}}, ["rows.A", "did you mean 'algorithm'"]),
        ({"exceptions": [{"row": "FedAvgg", "set": {}}]}, ["exceptions.0.row", "'FedAvgg'", "Local"]),
        ({"exceptions": [{"column": "x*", "set": {}}]}, ["exceptions.0.column", "'x*'", "few"]),
        ({"exceptions": [{"set": {"modle": {}}}]}, ["exceptions.0.set", "'modle'"]),
        ({"exceptions": [{"line": "A", "set": {}}]}, ["exceptions.0.line", "not permitted"]),
        ({"published": {"FedAv": {"few": 1}}}, ["published", "did you mean 'FedAvg'"]),
        ({"published": {"FedAvg": {"fw": 1}}}, ["published.FedAvg", "did you mean 'few'"]),
        ({"published": {"FedAvg": {"few": "80 %"}}}, ["published.FedAvg.few", "'80 %'"]),
        ({"published": {"FedAvg": {"few": [1, 2, 3]}}}, ["published.FedAvg.few", "at most 2"]),
        ({"rows": {"a b": {}, "A_B": {}}}, ["rows", "'a b'", "'A_B'", "same folder"]),
        ({"columns": {"..": {}}}, ["columns", "'..'"]),
    ],
)
def test_a_wrong_table_is_refused_with_a_clear_text(changes, words, tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, **changes)
    text = str(caught.value)
    assert all(word in text for word in ["small.yaml", *words]) and "\n" not in text, text


def test_a_folder_is_refused_as_a_table_file(tmp_path):
    with pytest.raises(ConfigError, match="is a folder; give a table file"):
        tables.load(tmp_path)


def test_patterns_select_cells_ignoring_case(tmp_path):
    everything = list_cells(load(tmp_path), [], 1)
    for patterns, names in (
        ([], ["FedAvg/few", "FedAvg/many (M)", "Local/few", "Local/many (M)"]),
        (["fedAVG/*"], ["FedAvg/few", "FedAvg/many (M)"]),
        (["*/few", "local/*"], ["FedAvg/few", "Local/few", "Local/many (M)"]),
    ):
        assert [f"{selected.row}/{selected.column}" for selected in select_cells(everything, patterns)] == names
    cells = r"ROW/COLUMN; rows: FedAvg, Local; columns: few, many \(M\)$"
    with pytest.raises(ConfigError, match=f"'few' matches none of the cells {cells}"):
        select_cells(everything, ["*/few", "few"])


@pytest.mark.parametrize("num_seeds", [0, 3])
def test_more_seeds_than_the_table_has_are_refused(num_seeds, tmp_path):
    with pytest.raises(ConfigError, match=f"--seeds {num_seeds}: the table has 2"):
        list_cells(load(tmp_path), [], num_seeds)


def test_the_seed_cannot_be_overridden(tmp_path):
    with pytest.raises(ConfigError, match="seed cannot be overridden"):
        list_cells(load(tmp_path), ["seed=4"], None)
