"""A round file says of every array what it is, so that the file alone is enough to read it."""

import json
from collections.abc import Iterator

import h5py
import pytest

import quick_run
from described import about


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[h5py.File]:
    run = tmp_path_factory.mktemp("described") / "run"
    quick_run.run(quick_run.settings(training={"rounds": 2}), run, ranks=2)
    with h5py.File(run / "round_00002.h5") as opened:
        yield opened


def paths(file: h5py.File) -> list[str]:
    found: list[str] = []
    file.visititems(lambda path, item: found.append(path) if isinstance(item, h5py.Dataset) else None)
    return [path for path in found if not path.startswith("size_")]


def test_every_array_has_a_description(file: h5py.File) -> None:
    said = about(file)["arrays"]
    assert [path for path in paths(file) if not said[path].get("description")] == []
    assert said["clients/model/head/weight"]["description"] == "model/head/weight of each client"
    assert said["server/heads/bias"]["description"] == "heads/bias of the server"


def test_what_an_algorithm_says_of_its_values_stands_beside_them(file: h5py.File) -> None:
    said = json.loads(about(file)["run"]["diagnostics"])
    shown = next(each for each in said.values() if each["kept"] == "critical")
    described = about(file)["arrays"]["clients/critical/weight"]["description"]
    assert shown["title"] in described and shown["caption"] in described


def test_the_file_names_its_algorithm_and_its_classes(file: h5py.File) -> None:
    said = about(file)["run"]
    assert said["algorithm"] == "fedgmh" and said["algorithm_class"].endswith(":FedGMH")
    assert json.loads(said["class_names"]) == [str(digit) for digit in range(10)]


def test_few_objects_make_a_round_file(file: h5py.File) -> None:
    """Each dataset and attribute of HDF5 costs some tens of microseconds in every round."""
    figures = [path for path in paths(file) if not path.startswith(("clients/", "server/", "diagnostics/"))]
    assert len(figures) <= 22 and set(file.attrs) == {"format_version", "about"}
