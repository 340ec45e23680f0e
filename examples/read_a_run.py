"""Reading a run in a notebook or a script: no torch, no MPI, nothing but the run's folder.

    python examples/read_a_run.py runs/alone

The cells are marked as editors and Jupytext know them. The run may be going on, or copied from another machine.
"""

# %% Open it: nothing is read yet but its configuration.
import sys

import numpy as np

import pflmpi

run = pflmpi.open_run(sys.argv[1])
print(run)
print("algorithm:", run.config["algorithm"])
print("made with:", run.config["recorded"]["versions"])

# %% Metrics, a line per round, as a NumPy record array; `run.frame()` is a pandas.DataFrame.
metrics = run.metrics
print(metrics[["round", "accuracy_mean", "seconds"]][-3:])

# %% The best round; rounds without an evaluation have NaN. `columns` are the same values as plain arrays.
columns = run.columns
best = int(np.nanargmax(columns["accuracy_mean"]))
sent = columns["up_bytes"][: best + 1].sum() + columns["down_bytes"][: best + 1].sum()
print(
    f"best round: {columns['round'][best]}, mean accuracy {columns['accuracy_mean'][best]:.4f}, {sent} bytes until then"
)

# %% A checkpoint: the newest, or `run.round(12)`. What the clients keep are lazy arrays [N, ...] in client order.
newest = run.round()
print(f"round {newest.number} of the checkpoints {run.rounds}")
print(newest.clients)

# %% One client: the row is read now, and no other.
heads = [path for path in newest.clients if path.endswith("head/weight")]
if not heads:
    sys.exit("the clients of this run keep no heads; what the server keeps is in `newest.server`")
rows = newest.clients[heads[0]]
print(f"{heads[0]} of client {rows.clients[0]}: {rows[0].shape}, norm {np.linalg.norm(rows[0]):.4f}")

# %% How far the clients' heads are from each other: ||W_i - W_j||. `np.asarray` reads all rows.
flat = np.asarray(rows).reshape(len(rows), -1)
distances = np.linalg.norm(flat[:, None] - flat[None], axis=-1)
np.fill_diagonal(distances, np.inf)
nearest = distances.argmin(1)
for client, other in zip(rows.clients[:5], nearest, strict=False):
    print(
        f"client {client}: nearest is client {rows.clients[other]}, {distances[client == rows.clients].min():.4f} away"
    )

# %% Who does worse than the mean in this round.
if "accuracy" in newest.metrics:
    accuracy = newest.metrics["accuracy"]
    print("below the mean:", np.flatnonzero(accuracy < np.nanmean(accuracy)).tolist())
