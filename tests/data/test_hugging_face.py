"""Datasets of Hugging Face on this machine: what is understood of their columns and splits, and what is refused."""

import json
from io import BytesIO

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from PIL import Image

from pflmpi.cli import main
from pflmpi.data.own_files import read_own
from pflmpi.data.task_kinds import TASK_KINDS
from pflmpi.errors import DataError


def png(value, size=4, mode="L"):
    with BytesIO() as file:
        Image.new(mode, (size, size), value).save(file, "png")
        return {"bytes": file.getvalue(), "path": "a.png"}


def table(names=None, **columns):
    features = {"label": {"names": names, "_type": "ClassLabel"}} if names else {}
    about = json.dumps({"info": {"features": features}})
    return pyarrow.table(columns).replace_schema_metadata({"huggingface": about})


def saved(folder, splits):
    """Write splits as `DatasetDict.save_to_disk` does, in two files each."""
    for split, content in splits.items():
        (folder / split).mkdir(parents=True)
        names = [f"data-{number:05d}-of-00002.arrow" for number in (0, 1)]
        for name, part in zip(names, (content.slice(0, 1), content.slice(1)), strict=True):
            path = str(folder / split / name)
            with pyarrow.OSFile(path, "wb") as sink, pyarrow.ipc.new_stream(sink, content.schema) as writer:
                writer.write_table(part)
        (folder / split / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [*splits]}))
    return folder


def on_the_hub(folder, splits):
    (folder / "data").mkdir(parents=True)
    for split, content in splits.items():
        pyarrow.parquet.write_table(content, folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("write", [saved, on_the_hub])
def test_pictures_have_classes_clients_and_splits(write, tmp_path, capsys, caplog):
    def part(first, count):
        pictures = [png(first + number) for number in range(count)]
        writers = [f"w{number % 2}" for number in range(count)]
        labels = [number % 3 for number in range(count)]
        return table(["cat", "dog", "owl", "ant"], image=pictures, label=labels, writer=writers, hsf=[7] * count)

    folder = write(tmp_path / "hub", {"test": part(9, 2), "train": part(0, 4), "validation": part(6, 3)})
    (folder / "train").mkdir(exist_ok=True)
    (folder / "train" / "cache-123.arrow").write_bytes(b"of `datasets`, and no data")
    data = read_own(folder, client="writer")
    assert data.images[:, 0, 0, 0].tolist() == [9, 10, 0, 1, 2, 3, 6, 7, 8] and data.images.dtype == np.uint8
    assert data.labels.tolist() == [0, 1, 0, 1, 2, 0, 0, 1, 2] and data.class_names == ("cat", "dog", "owl", "ant")
    assert data.official_test.tolist() == [True] * 2 + [False] * 7
    assert data.official_validation.tolist() == [False] * 6 + [True] * 3
    assert data.written_clients == ("w0", "w1") and data.writers.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert "a sample is its 'image'; not used: hsf" in caplog.text
    assert main(["data", str(folder), "--client", "writer"]) == 0
    assert "3 (cat, dog, owl), 2 to 4 samples each" in capsys.readouterr().out


def test_colours_are_channels_and_the_one_column_with_classes_is_the_label(tmp_path):
    content = table(["no", "yes"], img=[png((1, 2, 3), mode="RGB")] * 2, label=[0, 1]).rename_columns(["img", "kind"])
    about = json.dumps({"info": {"features": {"kind": {"names": ["no", "yes"]}}}})
    dataset = read_own(on_the_hub(tmp_path / "a", {"train": content.replace_schema_metadata({"huggingface": about})}))
    assert dataset.images[0, :, 0, 0].tolist() == [1, 2, 3] and dataset.class_names == ("no", "yes")
    assert not dataset.official_test.any()


@pytest.mark.parametrize("kind", [pyarrow.list_(pyarrow.int64()), pyarrow.list_(pyarrow.int64(), 3)])
def test_lists_of_numbers_and_of_labels_are_axes(kind, tmp_path):
    x, y = pyarrow.array([[1, 2, 3], [4, 5, 6]], kind), [[[0, 1]], [[1, 1]]]
    pyarrow.parquet.write_table(table(tokens=x, label=[row[0] for row in y]), tmp_path / "my.parquet")
    dataset = read_own(tmp_path / "my.parquet", task_kind=TASK_KINDS["multilabel"]())
    assert dataset.images.tolist() == [[1, 2, 3], [4, 5, 6]] and dataset.labels.tolist() == [[0, 1], [1, 1]]
    assert dataset.columns == ()
    pyarrow.parquet.write_table(table(x=[[[1.0], [2.0]], [[3.0], [4.0]]], y=["b", "a"]), tmp_path / "my.parquet")
    dataset = read_own(tmp_path / "my.parquet")
    assert dataset.images.tolist() == [[[1], [2]], [[3], [4]]] and dataset.class_names == ("a", "b")


def test_a_table_in_a_file_is_as_one_in_a_csv(tmp_path):
    columns = {"a": [1, 2], "b": [0.5, 0.25], "kind": ["x", "y"], "client": [10, 9], "test": [False, True]}
    columns["__index_level_0__"] = [7, 8]  # row numbers of pandas
    pyarrow.parquet.write_table(table(**columns), tmp_path / "my.parquet")
    dataset = read_own(tmp_path / "my.parquet", "kind")
    assert dataset.images.tolist() == [[1, 0.5], [2, 0.25]] and dataset.columns == ("a", "b")
    assert dataset.official_test.tolist() == [False, True] and dataset.written_clients == ("9", "10")


BAD = [
    ({"text": ["a", "b"], "label": [0, 1]}, "column 'text' is string, no numbers; encode it"),
    ({"x": [1, None], "label": [0, 1]}, "sample 1 has no x; fill it in"),
    ({"x": [1, 2], "label": [0, None]}, "sample 1 has no label; fill it in"),
    ({"x": [[1], [1, 2]], "label": [0, 1]}, "column 'x' has lists of unlike length; pad or cut them"),
    ({"x": [], "label": []}, "it has no samples"),
    ({"x": [[1], [None]], "label": [0, 1]}, "sample 1 has value 0 = nan, not a finite number"),
    ({"x": [1, 2], "label": ["a", None]}, "sample 1 has no label; fill it in"),
    ({"x": [[1], [2]], "z": [[1], [2]], "label": [0, 1]}, r"it has several columns of samples: x, z; leave some out"),
    ({"x": [1, 2], "z": [0, 1]}, "set data.label .*, the column of the labels; known: x, z"),
    ({"label": [0, 1]}, "it has no column of samples; do not leave some out"),
    ({"x": [png(0), png(0, size=5)], "label": [0, 1]}, "the picture of sample 1 is 5x5 and the picture of sample 0"),
    ({"x": [png(0), {"bytes": b"?", "path": ""}], "label": [0, 1]}, "the picture of sample 1 cannot be read"),
    ({"x": [{"bytes": None, "path": "a"}, png(0)], "label": [0, 1]}, "sample 0 has no bytes in 'x'; embed"),
    ({"names": ["a", "b"], "x": [1, 2], "label": [0, -1]}, r"labels -1\.\.0, allowed are 0\.\.1"),
]  # fmt: skip


@pytest.mark.parametrize("columns, expected", BAD, ids=[expected for _, expected in BAD])
def test_columns_that_cannot_be_used_are_refused_by_name_and_sample(columns, expected, tmp_path):
    pyarrow.parquet.write_table(table(**columns), tmp_path / "my.parquet")
    with pytest.raises(DataError, match=expected):
        read_own(tmp_path / "my.parquet")


def test_a_column_that_is_there_twice_is_named(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table([[1, 2], [3, 4], [0, 1]], names=["x", "x", "y"]), tmp_path / "my.parquet")
    with pytest.raises(DataError, match="it has several columns 'x'; give each a name of its own"):
        read_own(tmp_path / "my.parquet")


def test_files_that_cannot_be_used_are_named(tmp_path):
    content = table(x=[1, 2], label=[0, 1])
    folder = on_the_hub(tmp_path / "a", {"train": content, "unsupervised": content})
    with pytest.raises(DataError, match=r"data/unsupervised-00000-of-00001.parquet is of no split that is known"):
        read_own(folder)
    (folder / "data" / "unsupervised-00000-of-00001.parquet").unlink()
    with pytest.raises(DataError, match=r"there is no column data\.label = 'z'; known: x, label"):
        read_own(folder, "z")
    file = folder / "data" / "train-00000-of-00001.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match=f"{file}: "):
        read_own(folder)
    file = saved(tmp_path / "b", {"train": content}) / "train" / "data-00000-of-00002.arrow"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match=f"{file}: "):
        read_own(tmp_path / "b")
    file.unlink()
    with pytest.raises(DataError, match=f"{file}: .*No such file"):
        read_own(tmp_path / "b")
    (tmp_path / "b" / "train" / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"train/state.json names no files of data \('_data_files'\)"):
        read_own(tmp_path / "b")


def test_splits_with_other_columns_are_refused(tmp_path):
    on_the_hub(tmp_path, {"train": table(x=[1, 2], label=[0, 1]), "test": table(x=[1.5])})
    expected = r"data/train-.*parquet has columns x: int64, label: int64, and .*data/test-.*parquet has x: double"
    with pytest.raises(DataError, match=expected):
        read_own(tmp_path)


@pytest.mark.parametrize("write", [saved, on_the_hub])
def test_splits_with_other_class_names_are_refused(write, tmp_path):
    train, test = table(["cat", "fox"], x=[1, 2], label=[0, 1]), table(["cat", "dog", "fox"], x=[3], label=[2])
    expected = "'label' has the classes cat, fox in .*train.*, and cat, dog, fox in .*test.*; give all files the same"
    with pytest.raises(DataError, match=expected):
        read_own(write(tmp_path / "unlike", {"train": train, "test": test}))


@pytest.mark.parametrize("ending", ["", "-0a1b2c3d4e5f6071"])  # of files that older versions wrote
def test_a_missing_file_of_several_is_refused_by_name(ending, tmp_path):
    folder = on_the_hub(tmp_path, {"test": table(x=[5], label=[0])})
    parts = [folder / "data" / f"train-{number:05d}-of-00003{ending}.parquet" for number in range(3)]
    for part in parts:
        pyarrow.parquet.write_table(table(x=[1, 2], label=[0, 1]), part)
    assert len(read_own(folder).labels) == 7
    parts[1].unlink()
    with pytest.raises(DataError, match=r"there are 2 of 3 files .*data/train-\*, and not 00001-of-00003; copy those"):
        read_own(folder)
    assert len(read_own(parts[2]).labels) == 2


@pytest.mark.parametrize("other", ["train-00000-of-00001", "train-00000-of-00002-0a1b2c3d4e5f6071"])
def test_files_of_two_downloads_are_refused(other, tmp_path):
    folder = on_the_hub(tmp_path, {"test": table(x=[5], label=[0])})
    for name in ("train-00000-of-00002", "train-00001-of-00002", other):
        pyarrow.parquet.write_table(table(x=[1, 2], label=[0, 1]), folder / "data" / f"{name}.parquet")
    with pytest.raises(DataError, match=rf"has two files with the number 0, .*{other}\.parquet.*; move those of"):
        read_own(folder)


def test_where_files_are_splits_a_column_called_test_is_one_of_values(tmp_path):
    part = table(test=[1.0, 0.0], age=[3.0, 4.0], label=[0, 1])
    assert read_own(on_the_hub(tmp_path / "hub", {"train": part, "test": part})).columns == ("test", "age")


def test_without_pyarrow_it_is_said_what_to_install(tmp_path, monkeypatch):
    pyarrow.parquet.write_table(table(x=[1], label=[0]), tmp_path / "my.parquet")

    def without(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("pflmpi.data.hugging_face.import_module", without)
    with pytest.raises(DataError, match=r"No module named 'pyarrow'.*`pip install 'pflmpi\[analysis\]'` brings it"):
        read_own(tmp_path / "my.parquet")


def test_a_split_may_be_empty_and_lists_are_of_one_length_in_all_splits(tmp_path):
    train = table(x=[[1.0, 2.0], [3.0, 4.0]], label=[0, 1])
    dataset = read_own(on_the_hub(tmp_path / "empty", {"train": train, "test": train.slice(0, 0)}))
    assert dataset.images.tolist() == [[1, 2], [3, 4]] and not dataset.official_test.any()
    folder = on_the_hub(tmp_path / "unlike", {"train": train, "test": table(x=[[1.0]], label=[0])})
    with pytest.raises(DataError, match="column 'x' has lists of unlike length; pad or cut them"):
        read_own(folder)
