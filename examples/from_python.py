"""Running from a notebook or a script: configurations, runs, one table of them, one client's model.

    python examples/from_python.py runs/python

The cells are marked as editors and Jupytext know them. The ranks are processes of this machine. The same file runs
under a launcher (`launch/mpirun -n 3 python examples/from_python.py runs/python`): then each rank calls `pflmpi.run`.
"""

# %% A configuration: a keyword for each section, as in YAML. What is wrong is refused here, with what is allowed.
import sys
from pathlib import Path

import torch

import pflmpi

folder = Path(sys.argv[1])
base = pflmpi.Config(
    data={"name": "digits", "limit": 600},
    partition={"name": "exdir", "clients": 6, "classes_per_client": 3, "alpha": 0.7},
    model={"name": "mlp", "hidden": 24},
    algorithm="fedavg",
    training={"rounds": 4, "lr": 0.1, "batch_size": 20},
)

# %% Two runs. `on_round` gets the line of metrics.csv of each round; an interrupt stops after the round.
accuracies = []
for name in ("fedavg", "fedgmh"):
    config = base.replace(algorithm={"name": name})
    pflmpi.run(
        config, out=folder / name, on_round=lambda row: accuracies.append(row["accuracy_mean"]), resume=True, quiet=True
    )

# %% All runs as one table, a line for each run and round; the columns after `run` are what the runs differ in.
runs = pflmpi.open_runs(f"{folder}/*")
for run in runs:
    best = float(run.columns["accuracy_mean"].max())
    print(f"{run.name}: {len(run.columns['round'])} rounds, best accuracy {best:.4f}")
try:
    print(runs.frame().groupby("algorithm.name")["accuracy_mean"].max())
except pflmpi.errors.UserError as error:
    print(error)  # without pandas

# %% What a client predicts with, on its own test samples: as often right as in the run.
run = runs[0]
x, y = run.samples(2).test
with torch.no_grad():
    scores = run.model(2)(torch.from_numpy(x))
right = int((scores.argmax(1) == torch.from_numpy(y)).sum())
print(f"client 2 of {run.name}: {right} of {len(y)} right, in the run {run.round().metrics['correct'][2]}")
