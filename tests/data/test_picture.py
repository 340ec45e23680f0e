"""The drawing of who holds what."""

import io

import numpy as np
import pytest
from rich.console import Console

from pflmpi.data.dataset import assemble
from pflmpi.data.federation import Federation
from pflmpi.data.picture import draw_partition


def drawn(federation, width=80):
    """Return the lines of the picture on a terminal without colours."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(draw_partition(federation, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def federation_of(counts):
    """Return a federation in which client i has counts[i, j] training samples of class j, and no test samples."""
    labels = np.concatenate([np.repeat(np.arange(counts.shape[1]), row) for row in counts])
    images = np.zeros((len(labels), 1, 1, 1), dtype=np.uint8)
    data = assemble("toy", images, labels, np.zeros(len(labels), dtype=bool), counts.shape[1])
    parts = tuple(np.split(np.arange(len(labels)), np.cumsum(counts.sum(axis=1))[:-1]))
    return Federation(data, parts, tuple(part[:0] for part in parts), "f" * 64, counts)


def test_the_picture_shows_counts_with_shades():
    lines = drawn(federation_of(np.array([[40, 0, 10], [11, 30, 31]])))
    assert lines[0].split() == ["client", "train", "test", "cls", "0", "1", "2"]
    assert lines[1].split() == ["0", "50", "0", "2", "█40", "░10"]
    assert lines[2].split() == ["1", "72", "0", "3", "▒11", "▓30", "█31"]
    assert lines[0].index("2", 25) == lines[1].index("10") == lines[2].index("31", 25), (
        "numbers stand below their class"
    )
    assert "samples per client: min 50, median 61, max 72" in lines
    assert "classes per client: min 2, median 2.5, max 3 of 3" in lines
    assert lines[-1] == "hash " + "f" * 64


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize(
    ("clients", "classes", "largest"), [(3, 10, 9), (100, 10, 99999), (20, 62, 400), (7, 100, 600)]
)
def test_the_picture_never_overflows(clients, classes, largest, width):
    counts = np.random.default_rng(0).integers(1, 5, (clients, classes))
    counts[0, -1] = largest
    lines = drawn(federation_of(counts), width)
    shown = min(clients, 20)
    rows = lines[1 : 1 + shown]
    assert [int(row.split()[0]) for row in rows] == list(range(shown))
    assert all(len(line) <= width for line in lines[: 2 + shown])
    assert "█" in rows[0] and not any("█" in row for row in rows[1:]), "one cell is far larger than all others"
    assert (f"... and {clients - shown} more" in lines) == (clients > shown)
    if width >= 80:
        assert all(len(line) <= width for line in lines)


def test_the_picture_of_many_classes_says_that_cells_are_merged():
    counts = np.zeros((2, 100), dtype=np.int64)
    counts[0, [0, 1]] = 5, 7
    counts[1, 99] = 12
    lines = drawn(federation_of(counts))
    assert any("2 classes to a cell" in line and "all of 12" in line for line in lines)
    assert lines[1].rstrip()[-1] == lines[2].rstrip()[-1] == "█", "5 and 7 in one cell are as much as 12"
    assert len(lines[2].rstrip()) - len(lines[1].rstrip()) == 49
