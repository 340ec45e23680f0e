"""A small table file for the tests of `sweep` and `report`."""

import yaml

TABLE = {
    "title": "A small table",
    "source": "nobody 2024, table 3",
    "seeds": [0, 1],
    "base": {
        "data": {"name": "digits", "limit": 100},
        "partition": {"name": "iid", "clients": 3},
        "model": {"name": "mlp", "hidden": 4},
        "training": {"rounds": 2},
        "runtime": {"device": "cpu"},
    },
    "columns": {"few": {"training": {"lr": 0.1}}, "many (M)": {"partition": {"name": "iid", "clients": 5}}},
    "rows": {"FedAvg": {"algorithm": {"name": "fedavg"}}, "Local": {"algorithm": {"name": "local"}}},
}


def write(folder, **changes):
    """Write the table with keys replaced (None: left out) and return the file."""
    path = folder / "small.yaml"
    content = {key: value for key, value in {**TABLE, **changes}.items() if value is not None}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path
