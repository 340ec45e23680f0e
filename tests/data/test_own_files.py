"""Data of one's own: what is understood of .npz, .csv and folders of pictures, what is refused, and runs on them."""

import shutil
import struct
import zlib

import h5py
import numpy as np
import pytest
import yaml

import quick_run
from pflmpi.analysis.run import open_run
from pflmpi.cli import main
from pflmpi.config import load as configuration
from pflmpi.data import load
from pflmpi.data.config import DataConfig
from pflmpi.data.dataset import describe_unscaled
from pflmpi.data.own_files import read_own
from pflmpi.data.task_kinds import TASK_KINDS
from pflmpi.errors import DataError, PflmpiError

RNG = np.random.default_rng(0)


def table(path, rows=200):
    x, client = RNG.normal(size=(rows, 3)), RNG.integers(0, 4, rows)
    kind = np.where(x[:, 0] + x[:, 1] > 0, "good", "bad")
    lines = [f"{a:.5f},{b:.5f},{1000 + 9 * c:.5f},{k},site{s}" for (a, b, c), k, s in zip(x, kind, client, strict=True)]
    path.write_text("\n".join(["a,b,c,kind,client", *lines]) + "\n")
    return path


def test_bytes_are_images_and_other_numbers_keep_their_shape(tmp_path):
    y = np.arange(12) % 3
    for x, shape, dtype in (
        (RNG.integers(0, 256, (12, 6, 5)), (1, 6, 5), np.uint8),
        (RNG.integers(0, 256, (12, 6, 5, 3)), (3, 6, 5), np.uint8),
        (RNG.integers(0, 256, (12, 3, 6, 5)), (3, 6, 5), np.uint8),
        (RNG.normal(size=(12, 7)), (7,), np.float32),
        (RNG.integers(0, 90, (12, 20)).astype(np.int64), (20,), np.float32),
    ):
        np.savez(tmp_path / "my.npz", x=x.astype(np.uint8) if dtype == np.uint8 else x, y=y)
        dataset = read_own(tmp_path / "my.npz")
        assert dataset.images.shape[1:] == shape and dataset.images.dtype == dtype and dataset.num_classes == 3


def test_labels_and_clients_of_any_kind_are_numbered_in_order(tmp_path):
    x, test = RNG.normal(size=(6, 2)), np.array([0, 0, 1, 0, 1, 0], bool)
    np.savez(tmp_path / "my.npz", x=x, y=[10, 9, 10, 30, 9, 9], client=["b", "a", "b", "c", "a", "a"], test=test)
    dataset = read_own(tmp_path / "my.npz")
    assert dataset.labels.tolist() == [1, 0, 1, 2, 0, 0] and dataset.writers is not None
    assert dataset.writers.tolist() == [1, 0, 1, 2, 0, 0] and dataset.official_test.tolist() == test.tolist()


@pytest.mark.parametrize("suffix", ["npz", "h5"])
def test_classes_are_called_as_the_file_says(suffix, tmp_path):
    path, x, names = tmp_path / f"my.{suffix}", RNG.normal(size=(6, 2)), ["cat", "dog", "owl"]

    def written(y, **others):
        if suffix == "npz":
            np.savez(path, x=x, y=np.array(y), **others)
        else:
            with h5py.File(path, "w") as file:
                for name, value in {"x": x, "y": y, **others}.items():
                    file[name] = value
        return read_own(path).class_names

    assert written([0, 1, 2, 0, 1, 2], class_names=names) == ("cat", "dog", "owl")
    assert written([0, 2, 2, 0, 0, 2], class_names=names) == ("cat", "owl"), "no sample is of class 1"
    assert written([5, 7, 9, 5, 7, 9], class_names=names) == ("cat", "dog", "owl"), "in the order of the labels"
    assert written([0, 1, 2, 0, 1, 2]) == () and written(["b", "a", "b", "a", "b", "a"]) == ("a", "b")
    with pytest.raises(DataError, match=r"class_names has the shape \[3\], and y has 4 classes, up to 3; give"):
        written([0, 1, 2, 3, 0, 1], class_names=names)


@pytest.mark.parametrize(
    ("task", "y", "names", "found"),
    [
        ("multilabel", [[0, 1], [1, 1]], ["ill", "old"], ("ill", "old")),
        ("regression", [0.5, 2.0], ["price"], ("price",)),
        ("tokens", [[0, 1], [-100, 1]], ["a", "b", "of no position"], ("a", "b")),
        (
            "multilabel",
            [[0, 1], [1, 1]],
            ["ill", "old", "tall"],
            r"the shape \[3\], and y has 2 outputs; give one name",
        ),
        ("regression", [0.0, 2.0], ["bad", "fair", "good"], ()),
        ("tokens", [[0, 2], [-100, 1]], ["a", "b"], r"the shape \[2\], and y has 3 outputs; give one name"),
        ("multilabel", [[0, 1], [1, 1]], ["ill", "ill"], "classes 0 and 1 have the same name 'ill'"),
    ],
)
def test_outputs_are_called_as_the_file_says(task, y, names, found, tmp_path, caplog):
    np.savez(tmp_path / "my.npz", x=RNG.normal(size=(2, 2)), y=y, class_names=names)
    if isinstance(found, tuple):
        assert read_own(tmp_path / "my.npz", task_kind=TASK_KINDS[task]()).class_names == found
        assert ("not used: class_names of shape [3], which call" in caplog.text) == (not found)
    else:
        with pytest.raises(DataError, match=found):
            read_own(tmp_path / "my.npz", task_kind=TASK_KINDS[task]())


def test_class_names_are_in_the_checkpoint_and_on_the_page(tmp_path):
    y = np.arange(60) % 3
    np.savez(tmp_path / "my.npz", x=RNG.normal(size=(60, 4)), y=y, class_names=["cat", "dog", "<owl>"])
    raw = quick_run.settings(training={"rounds": 1}, model={"name": "mlp", "hidden": 4})
    raw["data"] = {"path": str(tmp_path / "my.npz"), "limit": 50}
    raw["partition"] = {"name": "iid", "clients": 3}
    quick_run.run(raw, tmp_path / "run")
    assert open_run(tmp_path / "run").round().attributes["class_names"] == '["cat", "dog", "<owl>"]'
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "report.html").read_text()
    # Both panels of the partition, and the samples of one client.
    assert page.count("&lt;owl&gt;</text>") == 4 and "\\u003cowl>" in page and "<owl>" not in page
    assert ",dog," in (tmp_path / "report" / "figures" / "partition.csv").read_text()


def test_labels_that_are_numbers_are_the_names_of_their_classes(tmp_path, monkeypatch, caplog, capsys):
    np.savez(tmp_path / "my.npz", x=RNG.normal(size=(60, 4)), y=np.array([3, 5, 8])[np.arange(60) % 3])
    raw = quick_run.settings(training={"rounds": 2}, model={"name": "mlp", "hidden": 4}, algorithm={"name": "fedproto"})
    raw |= {"data": {"path": str(tmp_path / "my.npz")}, "partition": {"name": "iid", "clients": 3}}
    raw["checkpoint"] = {"keep": 0}
    run = tmp_path / "run"
    with monkeypatch.context() as before:
        before.setattr("pflmpi.experiment.stored_config.class_names", lambda experiment: ())
        quick_run.run(quick_run.settings(raw, training={"rounds": 1}), run)
    quick_run.resume(run, ("training.rounds=2",))
    assert "the names of the classes" not in caplog.text, "the run had none"
    assert open_run(run).round().attributes["class_names"] == '["3", "5", "8"]'
    assert main(["evaluate", str(run), "-o", str(tmp_path / "clients.csv")]) == 0
    assert (tmp_path / "clients.csv").read_text().splitlines()[0].endswith("class_3,accuracy_class_5,accuracy_class_8")
    assert main(["report", str(run), "--out", str(tmp_path / "report")]) == 0
    (means,) = (tmp_path / "report" / "figures").rglob("*-pca.csv")
    assert {line.split(",")[1] for line in means.read_text().splitlines()} == {"class", "3", "5", "8"}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(raw))
    capsys.readouterr()
    assert main(["data", str(tmp_path / "my.yaml")]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["client", "train", "test", "cls", "3", "5", "8"]
    assert main(["data", str(tmp_path / "my.npz"), "--picture", str(tmp_path / "my.svg")]) == 0
    picture = (tmp_path / "my.svg").read_text()
    assert all(f">class {label}<" in picture for label in (3, 5, 8)) and ">class 0<" not in picture


def test_a_table_and_its_clients_run_with_the_same_bits(tmp_path, capsys):
    path = table(tmp_path / "my.csv")
    assert main(["data", str(path), "--label", "kind"]) == 0
    shown = capsys.readouterr().out
    assert "samples  200" in shown and "shape    3 (numbers)" in shown and "clients  4" in shown
    (tmp_path / "own.yaml").write_text(
        "data: {path: my.csv, label: kind, normalize: standard}\npartition: {name: writers}\n"
        "model: {name: mlp, hidden: 8}\nalgorithm: {name: fedper}\n"
        "training: {rounds: 6, lr: 0.3}\nruntime: {device: cpu}\n"
    )
    raw = configuration.load(tmp_path / "own.yaml").resolved()
    assert raw["data"]["path"] == str(path)
    alone = quick_run.run(raw, tmp_path / "1")
    assert quick_run.run(raw, tmp_path / "3", 3) == alone
    lines = (tmp_path / "1" / "metrics.csv").read_text().splitlines()
    last = dict(zip(lines[0].split(","), lines[-1].split(","), strict=True))
    assert float(last["accuracy_mean"]) > 0.8


def test_columns_are_called_so_in_any_case_and_the_label_is_named(tmp_path, capsys, caplog):
    path = tmp_path / "my.csv"
    path.write_text(
        "Target,a,Client,rooms,Test\n" + "".join(f"{n % 2},{n},{n % 3},{n % 4},{n % 5 == 0}\n" for n in range(60))
    )
    dataset = read_own(path)
    assert dataset.columns == ("a", "rooms") and dataset.label_columns == ("Target",) and dataset.num_classes == 2
    assert dataset.written_clients == ("0", "1", "2") and dataset.official_test.sum() == 12
    assert read_own(path, "Test").official_test.sum() == 0, "what is the label marks nothing"
    assert main(["data", str(path)]) == 0
    assert "label    Target (--label names another column)" in capsys.readouterr().out
    path.write_text("a,kind,client\n1,x,7\n2,y,8\n")
    assert read_own(path).label_columns == ("kind",), "the last one that is not called otherwise"
    path.write_text("y1,a,rooms\n" + "".join(f"{n % 2},{n},{n % 4}\n" for n in range(60)))
    raw = quick_run.settings(training={"rounds": 1}, data={"name": "my", "path": str(path), "limit": None})
    raw |= {"partition": {"name": "iid", "clients": 3}, "model": {"name": "logistic"}}
    quick_run.run(raw, tmp_path / "run")
    assert "the label is the column 'rooms'; data.label names another" in caplog.text
    caplog.clear()
    raw["data"]["label"] = "y1"
    quick_run.run(raw, tmp_path / "named")
    assert "the label is" not in caplog.text


def test_what_is_assumed_of_data_is_shown_and_said_at_the_start(tmp_path, capfd, caplog):
    rows = [f"{RNG.normal(120, 15):.3f},{n % 7},{'cat' if n % 2 else 'owl'},{n % 4:d}1,{n % 5 == 0}" for n in range(80)]
    (tmp_path / "my.csv").write_text("\n".join(["pressure,days,kind,client,test", *rows, "119,3,emu,21,1"]) + "\n")
    assert main(["data", str(tmp_path / "my.csv"), "--label", "kind"]) == 0
    shown = capfd.readouterr().out
    assert "columns  pressure, days" in shown and "classes  3 (cat, emu, owl), 1 to " in shown
    assert "scale    1 of 2 columns are far from mean 0 and deviation 1, such as pressure (mean 1" in shown
    assert "try data.normalize: standard" in shown and "only in samples marked as test: emu" in shown
    assert "test     17 samples are marked as test, and not trained on (data.split: auto)" in shown
    assert "clients  4, " in shown and "numbered from 0: 01, 11, 21, 31" in shown
    (tmp_path / "own.yaml").write_text(
        "data: {path: my.csv, label: kind}\npartition: {name: writers}\nmodel: {name: logistic}\n"
        "algorithm: {name: fedavg}\ntraining: {rounds: 1}\nruntime: {device: cpu}\n"
    )
    run = ["run", str(tmp_path / "own.yaml"), "--ranks", "1", "--out"]
    assert quick_run.command([*run, str(tmp_path / "auto")]) == 0
    log = caplog.text
    assert log.count("tests on the 17 samples that the data marks as test (data.split: auto)") == 1
    assert log.count("1 of 2 columns are far from mean 0 and deviation 1, such as pressure") == 1
    caplog.clear()
    official = ["-s", "data.split=official", "-s", "data.normalize=standard"]
    assert quick_run.command([*run, str(tmp_path / "official"), *official]) == 0
    assert "marks as test" not in caplog.text and "far from mean" not in caplog.text
    recorded = [
        yaml.safe_load((tmp_path / name / "config.yaml").read_text())["recorded"] for name in ("auto", "official")
    ]
    assert recorded[0]["partition"] == recorded[1]["partition"]


@pytest.mark.parametrize(
    "x, said",
    [
        (RNG.normal(size=(50, 3)), False),
        (RNG.normal(size=(50, 3)) * [1, 1, 1e-6], True),
        (RNG.random((50, 2, 3, 3)) * 255, True),
        (np.eye(50, 3), False),
        (RNG.integers(0, 256, (50, 4, 4)).astype(np.uint8), False),
        (RNG.integers(0, 90, (50, 6)), True),
        (RNG.integers(0, 90, (50, 6)).astype(np.float32), True),
    ],
)
def test_values_of_unlike_scale_are_told_by_mean_and_deviation(x, said, tmp_path):
    np.savez(tmp_path / "my.npz", x=x, y=np.arange(50) % 2)
    description = describe_unscaled(read_own(tmp_path / "my.npz"))
    assert ("data.normalize: standard" in description) == said
    assert description.endswith("unless they are tokens") == (x.dtype == np.int64)


def test_a_folder_of_pictures_has_classes_and_sides(tmp_path):
    from PIL import Image

    for side, count in (("train", 5), ("test", 2)):
        for label in ("cat", "dog"):
            (tmp_path / "pets" / side / label).mkdir(parents=True)
            for number in range(count):
                picture = Image.fromarray(RNG.integers(0, 256, (6, 4, 3)).astype(np.uint8))
                picture.save(tmp_path / "pets" / side / label / f"{number}.png")
    dataset = read_own(tmp_path / "pets")
    assert dataset.images.shape == (14, 3, 6, 4) and dataset.num_classes == 2 and dataset.official_test.sum() == 4
    Image.new("L", (9, 9)).save(tmp_path / "pets" / "train" / "cat" / "odd.png")
    with pytest.raises(DataError, match=r"odd.png is 9x9 .*make all pictures of one size"):
        read_own(tmp_path / "pets")
    Image.fromarray(np.full((6, 4), 40_000, np.uint16)).save(tmp_path / "pets" / "train" / "cat" / "odd.png")
    with pytest.raises(DataError, match=r"odd.png .*more than 8 bits a channel \(mode I;16\)"):
        read_own(tmp_path / "pets")
    shutil.copytree(tmp_path / "pets" / "test", tmp_path / "pets" / "more")
    with pytest.raises(DataError, match=r"pictures in more/ too; move them to train/, val/ or test/"):
        read_own(tmp_path / "pets")
    shutil.rmtree(tmp_path / "pets" / "more")
    (tmp_path / "pets" / "train" / "cat" / "odd.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"odd.png cannot be read as a picture"):
        read_own(tmp_path / "pets")


@pytest.mark.parametrize("others", [("val",), ("valid", "test"), ("validation", "test"), ("val", "test")])
def test_pictures_below_val_are_marked_for_validation(others, tmp_path):
    from PIL import Image

    for side in ("train", *others):
        for label in ("cat", "dog"):
            (tmp_path / side / label).mkdir(parents=True)
            Image.new("L", (3, 3)).save(tmp_path / side / label / "0.png")
    dataset = read_own(tmp_path)
    assert dataset.num_classes == 2 and dataset.labels.tolist() == [0, 1] * (1 + len(others))
    assert dataset.official_validation.tolist() == [False] * 2 + [True] * 2 + [False] * 2 * ("test" in others)
    assert dataset.official_test.tolist() == [False] * 4 + [True] * 2 * ("test" in others)


TABLES = [  # texts of a .csv
    ("", "it is empty"),
    ("\na,label\n1,0\n", "or its first line is; expected a header"),
    ("a;label\n1;0\n", "separate columns by commas"),
    ("a,a,label\n1,2,0\n", "two columns are called 'a'"),
    ("5.1,5.1,y\n4.9,3.0,n\n", "two columns are called '5.1'; rename one, or begin with a header"),
    ("1,2,0\n3,4,1\n", "its first line has '1', as a sample would"),
    ("5.1,3.5,setosa\n4.9,3.0,setosa\n6.2,3.4,virginica\n", "its first line has '5.1', as a sample would"),
    ("5.1,3.5,y\n4.9,3.0,n\n6.2,3.4,y\n", "its first line has '5.1', as a sample would"),
    (",a,label\n0,5,x\n1,6,y\n", r"column 1 has no name, .*to_csv\(..., index=False\)"),
    ("Unnamed: 0,a,label\n0,5,x\n1,6,y\n", "column 1 has no name"),
    ("a,label,\n5,x,1\n6,y,1\n", "column 3 has no name"),
    ("a,label\n1,2\n3\n", "line 3 has 1 values, the header has 2"),
    ("a,label\n" + '"' + "1,0\n" * 40_000, "a quote may not be closed"),
    ("a,label\n1,0\nä,1\n".encode("latin-1"), "line 3 is not UTF-8 .*; save it as UTF-8"),
    *((f"{a},b,{b}\n1,2,0\n3,4,1\n", f"the columns '{a}' and '{b}' may both be the {b.lower()}; rename one")
      for a, b in (("label", "Label"), ("Client", "client"), ("TEST", "test"))),
    ("y,a,label\n0,1,0\n1,2,1\n", r"the columns 'label' and 'y' may all be the label; set data.label \(pflmpi"),
    ("a,b,label\n1,2,0\n,4,1\n", "line 3 has no a; fill it in, or leave the line out"),
    ("a,b,label\n1,2,0\n\n,4,1\n", "line 4 has no a; fill it in, or leave the line out"),
    ('a,b,label\n1,2,"0\n"\n,4,1\n', "line 4 has no a; fill it in, or leave the line out"),
    ("a,label\nred,2\n", "column 'a' has 'red' in line 2, no number"),
    ("a,label\n1,2\n1_000,2\n", "column 'a' has '1_000' in line 3, no number"),
    ("a,label\n\u0661,2\n", "column 'a' has '\u0661' in line 2, no number"),
    ("a,b,label\n1,2,0\nred,4,1\n", "column 'a' has 'red' in line 3, no number; encode it, or leave it out$"),
    ("a,ill,b\n1,yes,0\n3,no,1\n", r"column 'ill' has 'yes' in line 2, no number; encode it, leave it out, or name the "
     r"column of the labels by data.label \(pflmpi data: --label\)"),
    ("a,label\n1e39,0\n", r"line 2 has column 'a' = 1e\+39, too large for float32"),
    ("a,label\n1,0\n1e300,1\n", r"line 3 has column 'a' = 1e\+300, too large for float32; scale it"),
    ("a,label\n1700000000.5,0\n1700000003,1\n", "column 'a' of the samples is from 1700000000.5 to 1700000003.0,"),
    ("a,label\nnan,0\n", "line 2 has column 'a' = nan, not a finite number; fill it in, or leave the line out"),
    ("a,label\n", "it has no samples"),
    ("a,label\n1,0\n2,\n", "line 3 has no label; fill it in"),
    ("a,label\n5,1\n6,nan\n", "line 3 has label = nan; fill it in, or leave the line out"),
    ("a,label\n5,NaN\n6,cat\n", "line 2 has label = NaN; fill it in"),
    ("a,client,label\n1,,0\n", "line 2 has no client"),
    ("a,client,label\n5,3,0\n\n6,nan,1\n", "line 4 has client = nan; fill it in"),
    ("a,test,y\n1,0,x\n2,,y\n", "line 3 has no test; fill it in, or leave the line out"),
    *((f"a,test,y\n1,0,x\n2,{test},y\n", f"column 'test' has '{test}' in line 3; allowed: 0, 1, true, false")
      for test in ("no", "2", "-1", "nan")),
]  # fmt: skip


@pytest.mark.parametrize("text, expected", TABLES, ids=lambda value: repr(value)[:40])
def test_a_table_that_cannot_be_used_is_refused_by_name_and_line(text, expected, tmp_path):
    (tmp_path / "my.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=f"data.path = .*{expected}"):
        read_own(tmp_path / "my.csv")


X = RNG.normal(size=(4, 2))
ARRAYS = [  # of an .npz
    ({"x": X}, "no array 'y'"),
    ({"x": X, "y": [0, 1]}, r"y has the shape \[2\], and x has 4 samples"),
    ({"x": X, "y": [[0, 1]] * 4}, r"y has the shape \[4, 2\], .* \(one-hot\? save y.argmax\(1\); several labels: "),
    ({"x": X, "y": [[1, 1]] * 4}, r"y has the shape \[4, 2\], .* \(several labels: data.task; pflmpi data: --task\)"),
    ({"x_train": X}, "no array 'y_train' in it"),
    ({"x_train": X, "y_train": [0, 1, 0, 1], "y_val": [0]}, "no array 'x_val' in it"),
    ({"x_train": X, "y_train": [0, 1, 0, 1], "x": X}, "it has 'x_train' and 'x'; leave one of them out"),
    ({"x_train": X, "y_train": [0, 1, 0, 1], "train_images": X, "train_labels": [0, 1, 0, 1]},
     "it has 'train_images' and 'x_train'; leave one of them out"),
    ({"x_train": X, "y_train": [0, 1, 0, 1], "test": [0, 1, 0, 1]}, "it has 'x_train' and 'test'; leave one"),
    ({"x_train": X, "y_train": [0, 1, 0, 1], "x_test": X[:, :1], "y_test": [0, 1, 0, 1]},
     r"x_test has samples and labels float64 \[1\] and int64, the first float64 \[2\] and int64"),
    ({"x_train": X.astype(np.uint8), "y_train": [0] * 4, "x_val": X, "y_val": [0] * 4}, "x_val has samples"),
    ({"train_images": X, "train_labels": [0] * 3, "test_images": X[:1], "test_labels": [0] * 2},
     "train_images has 4 samples and 3 labels"),
    ({"x": X, "y": [0.5, 1, 2, 3]}, "expected labels of classes"),
    ({"x": X[:2], "y": np.array([-2.5, 1], np.float32)}, r"2 different values, such as -2.5; expected"),
    ({"x": np.full((4, 2), np.nan), "y": [0, 1, 2, 3]}, "sample 0 has value 0 = nan, not a finite number"),
    ({"x": np.array([[1.0], [1e300]]), "y": [0, 1]}, r"sample 1 has value 0 = 1e\+300, too large for float32; scale"),
    ({"x": 1.7e9 + np.arange(8.0).reshape(4, 2), "y": [0, 1, 2, 3]},
     "value 0 of the samples is from 1700000000.0 to 1700000006.0, which float32 hardly tells apart"),
    ({"x": 2**30 + np.array([[0], [40]]), "y": [0, 1]}, "value 0 of the samples is from 1073741824 to 1073741864"),
    ({"x": np.array([object()] * 4), "y": [0, 1, 2, 3]}, "cannot be used"),
    ({"x": X, "y": np.array(["a", "b", "a", "b"], object)}, r"'y' is pickled, .*; save texts as y.astype\(str\)"),
    ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "no samples"),
    *(({"x": X[:2], "y": y}, rf"sample {row} has no label \(.*\); give each sample one, or leave it out")
      for y, row in (([0.0, np.nan], 1), ([np.inf, 1.0], 0), (["a", "nan"], 1), (["", "b"], 0), (["a", "<NA>"], 1),
                     (np.array(["2000-01-01", "NaT"], "M8[D]"), 1), (np.array([1, "NaT"], "m8[s]"), 1))),
    *(({"x": X, "y": [0, 1, 2, 3], "class_names": ["cat", *names, "owl"]}, expected) for names, expected in (
        (["cat", "dog"], "classes 0 and 1 have the same name 'cat'; give each its own"),
        (["dog", " "], "class 2 has the empty name ' '; give each class a name"),
        (["a\0b", "dog"], r"class 1 has the name 'a\\x00b', with a character that no text can hold; rename it"))),
    ({"x": X, "y": ["cat", "d\0g", "owl", "emu"]}, r"class 1 has the name 'd\\x00g', with a character"),
    ({"x": X[:2], "y": [0, 1], "client": np.array(["NaT", "2000"], "M8[Y]")}, r"sample 0 has no client \(NaT\)"),
    ({"x": X[:2], "y": [0, 1], "client": ["a", " "]}, r"sample 1 has no client \( \)"),
]  # fmt: skip


@pytest.mark.parametrize("arrays, expected", ARRAYS, ids=[expected for _, expected in ARRAYS])
def test_arrays_that_cannot_be_used_are_refused_by_name_and_sample(arrays, expected, tmp_path):
    np.savez(tmp_path / "my.npz", **arrays)
    with pytest.raises(DataError, match=f"data.path = .*{expected}"):
        read_own(tmp_path / "my.npz")


def test_a_constant_but_for_rounding_is_not_refused(tmp_path):
    np.savez(tmp_path / "my.npz", x=np.array([[0.1 + 0.2, 1.7e9], [0.3, 1.7e9]]), y=[0, 1])
    assert np.ptp(read_own(tmp_path / "my.npz").images, axis=0).tolist() == [0, 0]


@pytest.mark.parametrize("name", ["client_0.npz", "site0.csv"])
def test_a_folder_of_arrays_or_tables_is_told_how_clients_are_given(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=rf"files as {name} give one, .* `client`, .* PFLlib does: train/0.npz and"):
        read_own(tmp_path)


def test_what_holds_no_data_is_refused(tmp_path):
    for path, expected in ((tmp_path / "nothing.npz", "does not exist"), (tmp_path, "no pictures")):
        with pytest.raises(DataError, match=f"data.path = .*{expected}"):
            read_own(path)


def stored(path, arrays):
    """The path, with the arrays in a file of the kind that it names."""
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        with h5py.File(path, "w") as file:
            file.update(arrays)
    return path


@pytest.mark.parametrize("suffix", ["npz", "h5"])
def test_arrays_say_who_is_a_client_and_what_is_for_testing(suffix, tmp_path):
    path = tmp_path / f"my.{suffix}"

    def read(**others):
        arrays = {"x": RNG.normal(size=(4, 2)), "y": np.array([0, 1, 0, 1]), **others}
        return read_own(stored(path, arrays))

    with pytest.raises(DataError, match=r"sample 1 has no client \(nan\); give each sample one, or leave it out"):
        read(client=np.array([1, np.nan, 2, np.nan]))
    with pytest.raises(DataError, match="sample 2 has test = 2; allowed: 0, 1, true, false"):
        read(test=np.array([0, 1, 2, 2]))
    with pytest.raises(DataError, match="sample 0 has test = nan; allowed: 0, 1, true, false"):
        read(test=np.array([np.nan, 1, 0, 0]))
    for test in ([0, 1, 0, 1], [0.0, 1.0, 0.0, 1.0], [False, True, False, True]):
        assert read(test=np.array(test)).official_test.tolist() == [False, True, False, True]
    with pytest.raises(DataError, match=rf"data.label = 'z' names a column of a table, and this is my.{suffix};"):
        read_own(path, label="z")
    with pytest.raises(DataError, match=rf"data.client = 'z' names a column of a table, and this is my.{suffix};"):
        read_own(path, client="z")


@pytest.mark.parametrize("suffix", ["npz", "h5"])
def test_arrays_that_are_not_read_are_named(suffix, tmp_path, caplog):
    path, x, y = tmp_path / f"my.{suffix}", RNG.normal(size=(4, 2)), np.arange(4) % 2
    read_own(stored(path, {"x": x, "y": y, "test": y, "client": y}))
    assert not caplog.text
    read_own(stored(path, {"x": x, "y": y, "test_mask": y, "clients": y, "x_test": x}))
    assert "not read: clients, test_mask, x_test (known: x, y, client, test, validation, class_names)" in caplog.text
    caplog.clear()
    read_own(stored(path, {"x_train": x, "y_train": y, "x_test": x, "y_test": y, "x_valid": x, "y": y}))
    assert "not read: x_valid, y (known: x_train, y_train, x_val, y_val, x_test, y_test, client" in caplog.text


def test_a_table_says_what_is_for_testing(tmp_path):
    path = tmp_path / "my.csv"
    for written in ("0 1 0", "False True false", "0.0 1.0 0"):
        rows = zip("abc", written.split(), "xyx", strict=True)
        path.write_text("a,test,y\n" + "".join(f"{n},{test},{y}\n" for n, (_, test, y) in enumerate(rows)))
        assert read_own(path).official_test.tolist() == [False, True, False]


@pytest.mark.parametrize("header", ["400.5,402.5,label", "0,1,y", "2001,2002,kind", "a,b,last", "0,1,2"])
def test_a_header_may_have_numbers_where_a_name_says_what_it_is(header, tmp_path):
    (tmp_path / "my.csv").write_text(f"{header}\n5,6,yes\n7,8,no\n")
    dataset = read_own(tmp_path / "my.csv", "kind" if "kind" in header else None)
    assert dataset.images.tolist() == [[5, 6], [7, 8]] and dataset.columns == tuple(header.split(",")[:2])


@pytest.mark.parametrize("y", [["1_2", "2_1"], ["\u0661", "\u0662"], [b"1_2", b"2_1"]])
def test_labels_that_only_python_reads_as_numbers_are_names(y, tmp_path):
    np.savez(tmp_path / "my.npz", x=X[:2], y=y)
    dataset = read_own(tmp_path / "my.npz")
    assert dataset.class_names == tuple(name if isinstance(name, str) else name.decode() for name in y)
    with pytest.raises(DataError, match="expected numbers"):
        read_own(tmp_path / "my.npz", task_kind=TASK_KINDS["regression"]())


@pytest.mark.parametrize("y", [np.array([7, 2**63 + 5], np.uint64), ["9345678901234567890", "22345678901234567891"]])
def test_labels_of_many_digits_keep_them(y, tmp_path):
    np.savez(tmp_path / "my.npz", x=X[:2], y=y)
    assert read_own(tmp_path / "my.npz").written_labels == tuple(map(str, y))


@pytest.mark.parametrize("suffix", ["csv", "npz"])
def test_labels_and_clients_written_as_texts_are_in_the_order_of_their_numbers(suffix, tmp_path):
    path, y, who = tmp_path / f"my.{suffix}", ["2", "10", "9", "2"], ["10", "2", "33", "10"]
    if suffix == "npz":
        np.savez(path, x=RNG.normal(size=(4, 2)), y=y, client=who)
    else:
        path.write_text(
            "a,y,client\n" + "".join(f"{n},{label},{c}\n" for n, (label, c) in enumerate(zip(y, who, strict=True)))
        )
    dataset = read_own(path)
    assert dataset.labels.tolist() == [0, 2, 1, 0] and dataset.written_labels == ("2", "9", "10")
    assert dataset.writers is not None and dataset.writers.tolist() == [1, 0, 2, 1]
    assert dataset.written_clients == ("2", "10", "33")


def test_clients_whose_names_are_one_number_stay_apart(tmp_path):
    np.savez(tmp_path / "my.npz", x=RNG.normal(size=(3, 2)), y=[0, 1, 0], client=["7", "007", "10"])
    dataset = read_own(tmp_path / "my.npz")
    assert dataset.written_clients == ("007", "10", "7") and dataset.num_classes == 2


@pytest.mark.parametrize(
    "written, names",
    [
        (["10.0", "2.0"], ("2", "10")),
        ([10.0, 2.0], ("2", "10")),
        (["2.5", "1.0"], ("1.0", "2.5")),
        (["007", "008"], ("007", "008")),
        (["7.0", "7"], ("7", "7.0")),
    ],
)
def test_clients_that_are_whole_numbers_are_called_without_a_point(written, names, tmp_path):
    np.savez(tmp_path / "my.npz", x=RNG.normal(size=(2, 2)), y=[0, 1], client=written)
    assert read_own(tmp_path / "my.npz").written_clients == names


@pytest.mark.parametrize("same", [("07", "7"), ("1", "1.0"), ("90071992547409931", "90071992547409932")])
def test_labels_that_are_written_differently_and_are_one_number_are_refused(same, tmp_path):
    (tmp_path / "my.csv").write_text(
        "a,label\n" + "".join(f"{n},{label}\n" for n, label in enumerate((*same, "8", *same)))
    )
    expected = (
        f"y has the labels '{same[0]}' and '{same[1]}', which are one number; write them alike if they are one class"
    )
    with pytest.raises(DataError, match=expected):
        read_own(tmp_path / "my.csv")
    dataset = read_own(tmp_path / "my.csv", task_kind=TASK_KINDS["regression"]())
    assert len(dataset.labels) == 5, "numbers are numbers"


def test_numbers_to_predict_that_float32_hardly_tells_apart_are_refused(tmp_path):
    np.savez(tmp_path / "my.npz", x=X, y=np.stack([np.arange(4.0), 1.7e9 + 50 * np.arange(4)], 1))
    with pytest.raises(DataError, match=r"label 1 of the samples is from 1700000000\.0 to 1700000150\.0, which"):
        read_own(tmp_path / "my.npz", task_kind=TASK_KINDS["regression"]())


FIRST, LAST, UNCLEAR = "nchw", "nhwc", "set data.layout"


@pytest.mark.parametrize(
    "shape, of_bytes, of_floats",
    [
        ((3, 6, 5), FIRST, FIRST),
        ((6, 5, 3), LAST, UNCLEAR),
        ((6, 6, 1), LAST, UNCLEAR),
        ((1, 6, 6), FIRST, FIRST),
        ((1, 4, 4), FIRST, FIRST),
        ((6, 6, 4), UNCLEAR, UNCLEAR),
        ((6, 6, 16), UNCLEAR, UNCLEAR),
        ((16, 3, 3), UNCLEAR, FIRST),
        ((9, 1, 128), FIRST, FIRST),
        ((3, 9, 3), UNCLEAR, UNCLEAR),
        ((5, 5, 5), UNCLEAR, UNCLEAR),
        ((1, 1, 1), FIRST, FIRST),
    ],
)
def test_the_axes_of_images_are_refused_where_they_are_not_clear(shape, of_bytes, of_floats, tmp_path):
    path, x, y = tmp_path / "my.npz", RNG.integers(0, 256, (4, *shape)), np.arange(4) % 2
    last = x.transpose(0, 3, 1, 2)
    for dtype, expected in ((np.uint8, of_bytes), (np.float32, of_floats), (np.int64, of_floats)):
        np.savez(path, x=x.astype(dtype), y=y)
        if expected == UNCLEAR:
            with pytest.raises(
                DataError, match=r"channels first or last; set data.layout \(pflmpi data: --layout\) to"
            ):
                read_own(path)
        else:
            np.testing.assert_array_equal(read_own(path).images, x if expected == FIRST else last)
        np.testing.assert_array_equal(read_own(path, layout=FIRST).images, x)
        np.testing.assert_array_equal(read_own(path, layout=LAST).images, last)


def test_a_layout_where_there_are_no_such_axes_is_refused(tmp_path):
    np.savez(tmp_path / "my.npz", x=np.ones((2, 3)), y=[0, 1])
    with pytest.raises(
        DataError, match=r"data.layout = 'nhwc' is of arrays \[n, ., ., .\], .* x is float64 \[2, 3\]; leave"
    ):
        read_own(tmp_path / "my.npz", layout="nhwc")
    with pytest.raises(DataError, match=r"data.layout = 'nhwc' is of arrays, and my.csv holds none; leave it out"):
        read_own(table(tmp_path / "my.csv"), layout="nhwc")


def test_sequences_are_standardised_by_the_channels_that_the_layout_names(tmp_path, capsys):
    steps = RNG.normal(size=(40, 20, 2)) * [1000, 0.001] + [5000, 0]
    for name, x in {"last": steps, "first": steps.transpose(0, 2, 1)}.items():
        np.savez(tmp_path / f"{name}.npz", x=x.astype(np.float32), y=np.arange(40) % 2)
    config = DataConfig(name="my", path=str(tmp_path / "last.npz"), normalize="standard")
    with pytest.raises(DataError, match=r"last.npz' holds sequences \[40, 20, 2\]: set data.layout to nchw if"):
        load(config, 0)
    last = load(config.model_copy(update={"layout": LAST}), 0)
    first = load(config.model_copy(update={"layout": FIRST, "path": str(tmp_path / "first.npz")}), 0)
    for dataset in (first, last):
        np.testing.assert_array_equal(dataset.images, steps.transpose(0, 2, 1).astype(np.float32))
        np.testing.assert_allclose(dataset.std, steps.std((0, 1)), rtol=1e-5)
    assert load(config.model_copy(update={"normalize": "fixed"}), 0).images.shape == (40, 20, 2), "as they are"
    assert main(["data", str(tmp_path / "last.npz")]) == 0
    assert "standard needs --layout: nchw if channels are before the steps" in capsys.readouterr().out
    assert main(["data", str(tmp_path / "last.npz"), "--layout", LAST]) == 0
    shown = capsys.readouterr().out
    assert "shape    2 x 20 (numbers)" in shown and "standard mean" in shown


def test_pictures_as_narrow_as_their_colours_have_their_channels_last(tmp_path):
    from PIL import Image

    pixels = RNG.integers(0, 256, (3, 5, 3)).astype(np.uint8)  # three rows
    for label in ("cat", "dog"):
        (tmp_path / "pets" / label).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / "pets" / label / "0.png")
    np.testing.assert_array_equal(read_own(tmp_path / "pets").images, [pixels.transpose(2, 0, 1)] * 2)


@pytest.mark.parametrize("sides", [("",), ("train", "test")])
def test_pictures_that_are_not_read_are_counted(sides, tmp_path, caplog):
    from PIL import Image

    places = [tmp_path / "pets" / side / label for side in sides for label in ("cat", "dog")]
    for place in places:
        (place / "deeper").mkdir(parents=True)
        Image.new("L", (3, 3)).save(place / "0.png")
    read_own(tmp_path / "pets")
    assert not caplog.text
    for unread in (*(place / "deeper" / "1.png" for place in places), tmp_path / "pets" / "2.PNG"):
        Image.new("L", (3, 3)).save(unread)
    assert len(read_own(tmp_path / "pets").labels) == len(places)
    assert f"not read: {len(places) + 1} pictures that are hidden, or not directly in the folder of a" in caplog.text


@pytest.mark.parametrize("side", ["", "train"])
def test_hidden_files_and_folders_are_no_pictures_and_no_classes(side, tmp_path, caplog):
    from PIL import Image

    for name in ("cat/0.png", "dog/0.png", ".ipynb_checkpoints/0.png", "@eaDir/0.png", "cat/._0.png"):
        (tmp_path / ".home" / side / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (3, 3)).save(tmp_path / ".home" / side / name)
    shutil.copytree(tmp_path / ".home" / side, tmp_path / ".home" / ".cache")
    (tmp_path / ".home" / side / "cat" / "._0.png").write_bytes(b"attributes of a file on macOS")
    assert read_own(tmp_path / ".home").written_labels == ("cat", "dog")
    assert "not read: 8 pictures that are hidden" in caplog.text


def test_pictures_of_all_usual_suffixes_are_read_and_files_of_others_counted(tmp_path, caplog):
    from PIL import Image

    for name, mode, kind in (("cat/0.png", "RGB", "png"), ("cat/0.pbm", "1", "ppm"), ("fox/0.JFIF", "RGB", "jpeg")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new(mode, (3, 3)).save(tmp_path / name, kind)
    assert read_own(tmp_path).written_labels == ("cat", "fox") and not caplog.text
    for name in ("cat/1.heic", "owl/0.avif", "owl/1.avif"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert len(read_own(tmp_path).labels) == 3
    assert "not read: 3 files in folders of classes, such as cat/1.heic; pictures end in .png, .jpg" in caplog.text


def test_pictures_of_which_a_part_would_be_lost_are_refused(tmp_path):
    from PIL import Image

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    (tmp_path / "cat").mkdir()
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0))  # 16 bits, RGB
    pixels = chunk(b"IDAT", zlib.compress(b"\0" + np.full(3, 4095, ">u2").tobytes()))
    (tmp_path / "cat" / "deep.png").write_bytes(b"\x89PNG\r\n\x1a\n" + head + pixels + chunk(b"IEND", b""))
    with pytest.raises(DataError, match=r"deep.png .*more than 8 bits a channel \(mode RGB;16\); scale it to 8"):
        read_own(tmp_path)
    (tmp_path / "cat" / "deep.png").unlink()
    pages = [Image.new("L", (3, 3), value) for value in range(5)]
    for name in ("pages.tif", "moving.gif"):
        pages[0].save(tmp_path / "cat" / name, save_all=True, append_images=pages[1:])
        with pytest.raises(DataError, match=f"{name} .*it has 5 pages or frames; save each as a picture of its own"):
            read_own(tmp_path)
        damaged = (tmp_path / "cat" / name).read_bytes()[:-7]
        (tmp_path / "cat" / name).write_bytes(damaged)
        with pytest.raises(DataError, match=f"{name} cannot be read as a picture"):
            read_own(tmp_path)
        (tmp_path / "cat" / name).unlink()
    pages[0].save(tmp_path / "cat" / "phone.jpg", "mpo", save_all=True, append_images=pages[1:])  # with its preview
    assert len(read_own(tmp_path).labels) == 1


@pytest.mark.parametrize("side, stray", [("train", "metadata.parquet"), ("", "metadata.parquet"),
                                         ("train", "train/class_indices.json"), ("train", "train/0.npz")])  # fmt: skip
def test_a_stray_file_does_not_take_the_place_of_pictures(side, stray, tmp_path):
    from PIL import Image

    for label in ("cat", "dog"):
        (tmp_path / side / label).mkdir(parents=True)
        Image.new("L", (3, 3)).save(tmp_path / side / label / "0.png")
    assert len(read_own(tmp_path).labels) == 2
    (tmp_path / stray).touch()
    with pytest.raises(DataError, match=rf"folders of classes \(cat, dog\), and files of another .* \({stray}\); move"):
        read_own(tmp_path)
    shutil.rmtree(tmp_path / side / "dog")
    with pytest.raises(DataError, match=rf"{stray}"):  # pictures about the data, such as in a README, do not hinder
        read_own(tmp_path)


def test_blank_lines_of_a_table_are_left_out(tmp_path):
    (tmp_path / "my.csv").write_text("a,label\n1,0\n\n2,1\n  \n\n")
    dataset = read_own(tmp_path / "my.csv")
    assert dataset.images.tolist() == [[1], [2]] and dataset.labels.tolist() == [0, 1]


def test_a_table_whose_columns_are_counted_has_its_label_last(tmp_path):
    (tmp_path / "my.csv").write_text("0,1,2\n5,6,0\n7,8,1\n")
    dataset = read_own(tmp_path / "my.csv")
    assert dataset.images.tolist() == [[5, 6], [7, 8]] and dataset.labels.tolist() == [0, 1]
    assert dataset.columns == ("0", "1")


def test_a_model_for_images_refuses_a_table(tmp_path):
    raw = quick_run.settings(
        data={"name": "t", "path": str(table(tmp_path / "my.csv")), "label": "kind", "limit": None},
        partition={"name": "iid", "clients": 3},
        model={"name": "cnn"},
    )
    with pytest.raises(PflmpiError, match="model cnn takes images, CxHxW; the samples are 3; choose mlp"):
        quick_run.run(raw, tmp_path / "run")


@pytest.mark.parametrize("kind", ["images", "table"])
def test_a_picture_has_samples_of_each_class_and_the_clients(kind, tmp_path, capfd):
    path, drawn = tmp_path / "my.npz", tmp_path / "my.png"
    x = RNG.integers(0, 256, (40, 6, 5)).astype(np.uint8) if kind == "images" else RNG.normal(size=(40, 7))
    np.savez(path, x=x, y=np.arange(40) % 3, **({"client": np.arange(40) % 5} if kind == "images" else {}))
    assert main(["data", str(path), "--picture", str(drawn)]) == 0
    assert f"picture  {drawn}" in capfd.readouterr().out
    assert drawn.read_bytes().startswith(b"\x89PNG") and drawn.stat().st_size > 5000


@pytest.mark.parametrize("suffix", ["npz", "h5", "csv"])
def test_data_says_what_is_for_validation(suffix, tmp_path, capsys):
    path, x, y = tmp_path / f"my.{suffix}", RNG.normal(size=(40, 2)), np.arange(40) % 2
    sides = {"test": np.arange(40) >= 30, "validation": np.arange(40) % 10 == 0}
    sides["validation"][30:] = False

    def write():
        if suffix == "npz":
            np.savez(path, x=x, y=y, **sides)
        elif suffix == "h5":
            with h5py.File(path, "w") as file:
                for name, value in {"x": x, "y": y, **sides}.items():
                    file[name] = value
        else:
            rows = np.column_stack([x, y, sides["test"], sides["validation"]])
            path.write_text("\n".join(["a,b,label,test,validation", *(",".join(map(str, row)) for row in rows)]))

    write()
    assert np.array_equal(read_own(path).official_validation, sides["validation"])
    assert main(["data", str(path)]) == 0
    assert "3 are marked as validation, and not trained on" in capsys.readouterr().out
    sides["validation"][35] = True
    write()
    with pytest.raises(DataError, match="sample 35 is marked as test and as validation; choose one"):
        read_own(path)
    sides["validation"][:] = False
    write()
    assert read_own(path).official_validation is None


def test_a_run_on_marked_data_validates_on_the_marked_samples(tmp_path, caplog):
    x, y = RNG.normal(size=(200, 3)).astype(np.float32), np.arange(200) % 2
    sides = {"test": np.arange(200) >= 150, "validation": np.arange(200) < 40}
    np.savez(tmp_path / "my.npz", x=x, y=y, **sides)
    raw = quick_run.settings(
        data={"name": "mine", "path": str(tmp_path / "my.npz"), "limit": None},
        partition={"name": "iid", "clients": 4},
        training={"rounds": 1},
    )
    quick_run.run(raw, tmp_path / "run")
    assert open_run(tmp_path / "run").round(1).metrics["validation_total"].sum() == 40
    assert "validates on the 40 samples that the data marks so" in caplog.text


@pytest.mark.parametrize("suffix", ["npz", "h5"])
@pytest.mark.parametrize("x, y", [("{}_images", "{}_labels"), ("x_{}", "y_{}")])
def test_arrays_of_each_side_are_marked_as_such(x, y, suffix, tmp_path, capsys):
    """As MedMNIST and Keras write them."""
    path, arrays, sizes = tmp_path / f"my.{suffix}", {}, {"train": 4, "val": 2, "test": 3}
    for number, (side, size) in enumerate(sizes.items()):
        arrays[x.format(side)] = np.full((size, 5, 5), number, np.uint8)
        arrays[y.format(side)] = np.arange(size, dtype=np.uint8)[:, None] % 2

    def written():
        return read_own(stored(path, arrays))

    dataset = written()
    assert dataset.images[:, 0, 0, 0].tolist() == [0] * 4 + [1] * 2 + [2] * 3
    assert dataset.labels.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert dataset.official_validation.tolist() == [False] * 4 + [True] * 2 + [False] * 3
    assert dataset.official_test.tolist() == [False] * 6 + [True] * 3
    assert main(["data", str(path)]) == 0
    assert "test     3 samples are marked as test" in capsys.readouterr().out
    for name in (x.format("val"), y.format("val"), x.format("test"), y.format("test")):
        del arrays[name]
    assert not written().official_test.any() and written().official_validation is None
    assert main(["data", str(path)]) == 0
    assert "test     no samples are marked as test; a run splits those of each client" in capsys.readouterr().out


def test_medmnist_with_several_labels_is_multilabel(tmp_path):
    y = np.arange(8, dtype=np.uint8).reshape(4, 2) % 2
    arrays = {"train_images": np.zeros((4, 3, 3), np.uint8), "train_labels": y}
    np.savez(tmp_path / "chest.npz", **arrays, test_images=np.zeros((4, 3, 3), np.uint8), test_labels=1 - y)
    dataset = read_own(tmp_path / "chest.npz", task_kind=TASK_KINDS["multilabel"]())
    assert dataset.labels.tolist() == [*y.tolist(), *(1 - y).tolist()] and dataset.num_classes == 2
