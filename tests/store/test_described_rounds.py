"""A round file says what is in it: what clients received, measured values, units."""

import json
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray

import quick_run
from described import about, has_values
from pflmpi.cli import main
from pflmpi.errors import CheckpointError
from pflmpi.store import checked_hdf5, run_folder
from pflmpi.store.layout import Layout
from pflmpi.store.names import round_path
from pflmpi.store.round_file import ReceivedMessage, RoundContent, write_round

N = 4


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A round of four clients that keep nothing."""
    shared = np.arange(6.0).reshape(2, 3)
    own = np.arange(N * 2.0).reshape(N, 2)
    made = RoundContent(
        3,
        server={"model/weight": shared, "square/weight": np.eye(2)},
        metrics={"correct": np.arange(N), "seconds_round": np.array(0.5)},
        bytes={"up": np.arange(N)},
        received={
            "model": ReceivedMessage({"head/weight": shared, "head/scale": np.array(2.0)}, own=False),
            "centre": ReceivedMessage({"weight": own}, own=True),
        },
        diagnostics={"weights": np.eye(2)},
    )
    write_round(tmp_path, made, Layout.unwritten(np.zeros(N, np.int64)), {"cohort0": {}}, {"config": "seed: 0"})
    return tmp_path


def test_each_client_reads_what_it_received(run):
    messages = run_folder.read_received(run, 3, np.array([2, 0]))
    assert sorted(messages) == ["centre/weight", "model/head/scale", "model/head/weight"]
    assert messages["centre/weight"].tolist() == [[4, 5], [0, 1]]
    assert messages["model/head/weight"].tolist() == [[[0, 1, 2], [3, 4, 5]]] * 2
    assert messages["model/head/scale"].tolist() == [2, 2]


def test_what_the_server_keeps_is_stored_once(run):
    with h5py.File(round_path(run, 3)) as file:
        link = file.get("received/model/head/weight", getlink=True)
        assert isinstance(link, h5py.SoftLink) and link.path == "/server/model/weight"
        assert not isinstance(file.get("received/centre/weight", getlink=True), h5py.SoftLink)


def test_measured_values_and_units_are_there(run):
    assert run_folder.read_section(run, 3, "diagnostics")["weights"].tolist() == [[1, 0], [0, 1]]
    with h5py.File(round_path(run, 3)) as file:
        content = about(file)
        assert content["metrics"] == {"seconds_round": 0.5} and content["arrays"]["bytes/up"]["unit"] == "bytes"


def test_axes_have_names_also_for_xarray(run):
    with h5py.File(round_path(run, 3)) as file:
        assert file["layout/row"].dims[0][0] == file["client"]
        assert [axis[0].name for axis in file["received/centre/weight"].dims] == ["/client", "/size_2"]
    with xarray.open_dataset(round_path(run, 3), group="bytes", engine="h5netcdf") as dataset:
        assert dataset["up"].dims == ("client",) and dataset["up"].to_numpy().tolist() == [0, 1, 2, 3]


def test_axes_of_one_extent_in_one_array_have_different_names(run):
    with h5py.File(round_path(run, 3)) as file:
        assert [axis[0].name for axis in file["diagnostics/weights"].dims] == ["/participant", "/size_2"]
    with xarray.open_dataset(round_path(run, 3), group="server/square", engine="h5netcdf") as dataset:
        assert dataset["weight"].dims == ("size_2", "size_2.2") and dataset["weight"].T.dims == ("size_2.2", "size_2")


CNN = {"name": "cnn", "hidden": 12, "kernel": 3, "padding": 1}


@pytest.fixture(scope="module")
def several_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of clients with two different models, and its last checkpoint in one file."""
    run = tmp_path_factory.mktemp("axes") / "run"
    models = [CNN, {"name": "mlp", "hidden": 12}]
    quick_run.run(quick_run.settings(algorithm={"name": "fedproto"}, model=models, training={"rounds": 1}), run)
    assert main(["export", str(run), "--all", "-o", str(run / "one.h5")]) == 0
    return run


@pytest.mark.parametrize("engine", ["h5netcdf", "netcdf4"])
@pytest.mark.parametrize("name", ["round_00001.h5", "one.h5"])
def test_xarray_shows_every_axis_by_name_with_ids_of_clients_and_names_of_classes(several_models, name, engine):
    with xarray.open_datatree(several_models / name, engine=engine) as tree:  # a phony name is a warning, an error here
        arrays = [array for node in tree.subtree for array in node.dataset.data_vars.values()]
        assert len(arrays) >= 30 and not [array for array in arrays if any("phony" in str(dim) for dim in array.dims)]
        convolution = tree["clients/cohort0/model/body/conv1/weight"]
        assert convolution.dims == ("cohort0_client", "conv1_out", "conv1_in", "height", "width")
        assert convolution["cohort0_client"].to_numpy().tolist() == [0, 2, 4, 6]
        head = tree["clients/cohort1/model/head/weight"]
        assert head.dims == ("cohort1_client", "class", "feature")
        assert head.sel({"cohort1_client": 3, "class": "7"}).shape == (12,)
        assert tree["clients/cohort1/model/body/fc1/weight"].dims[2] == "fc1_in_64"  # 256 of the other model
        assert tree["server/means"].dims == ("class", "feature")
        assert tree["metrics/hits"].sel({"client": 5, "class": "0"}).shape == ()
        assert tree["round"].to_numpy().tolist() == [1]


def test_a_file_of_another_format_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(checked_hdf5, "FORMAT_VERSION", 5)
    checked_hdf5.write(round_path(tmp_path, 3), lambda writer: None)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"round_00003.h5 was written by a pflmpi before .* version is 5, .* 6"):
        run_folder.read_server(tmp_path, 3)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[h5py.File]:
    run = tmp_path_factory.mktemp("described") / "run"
    quick_run.run(quick_run.settings(training={"rounds": 2}), run, ranks=2)
    with h5py.File(run / "round_00002.h5") as opened:
        yield opened


def paths(file: h5py.File) -> list[str]:
    names: list[str] = []
    file.visititems(lambda path, item: names.append(path) if isinstance(item, h5py.Dataset) else None)
    return [path for path in names if has_values(file[path])]


def test_every_array_has_a_description(file):
    arrays = about(file)["arrays"]
    assert [path for path in paths(file) if not arrays[path].get("description")] == []
    assert arrays["clients/model/head/weight"]["description"] == "model/head/weight of each client"
    assert arrays["server/heads/bias"]["description"] == "heads/bias of the server"


def test_what_an_algorithm_says_of_its_values_stands_beside_them(file):
    diagnostics = json.loads(about(file)["run"]["diagnostics"])
    diagnostic = next(item for item in diagnostics.values() if item["kept"] == "critical")
    described = about(file)["arrays"]["clients/critical/weight"]["description"]
    assert diagnostic["title"] in described and diagnostic["caption"] in described


def test_the_file_names_its_algorithm_and_its_classes(file):
    attributes = about(file)["run"]
    assert attributes["algorithm"] == "fedgmh" and attributes["algorithm_class"].endswith(":FedGMH")
    assert json.loads(attributes["class_names"]) == [str(digit) for digit in range(10)]


def test_few_objects_make_a_round_file(file):
    """Each dataset and attribute of HDF5 costs some tens of microseconds in every round."""
    figures = [path for path in paths(file) if not path.startswith(("clients/", "server/", "diagnostics/"))]
    assert len(figures) <= 23 and set(file.attrs) == {"format_version", "about"}
