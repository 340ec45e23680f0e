"""PFLlib's FedAvg and FedGH, from a checkout of its repository; one process that computes on all cores."""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import work

OPTIONS = {
    "device": "cpu",
    "local_learning_rate": work.LR,
    "random_join_ratio": False,
    "few_shot": 0,
    "algorithm": "",
    "server_learning_rate": 0.01,
    "time_select": False,
    "goal": "time",
    "time_threthold": 10**9,
    "save_folder_name": "items",
    "top_cnt": 100,
    "auto_break": False,
    "eval_gap": 10**9,
    "client_drop_rate": 0.0,
    "train_slow_rate": 0.0,
    "send_slow_rate": 0.0,
    "dlg_eval": False,
    "dlg_gap": 100,
    "batch_num_per_client": 2,
    "num_new_clients": 0,
    "fine_tuning_epoch_new": 0,
    "learning_rate_decay": False,
    "learning_rate_decay_gamma": 0.99,
}


def main() -> None:
    """Train, and say when each round ended."""
    of, data, checkout = work.WORKS[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3]).resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(data, folder / "dataset" / "work")
        (folder / "system").mkdir()
        os.chdir(folder / "system")  # it looks for ../dataset
        sys.path.insert(0, str(checkout / "system"))
        from flcore.servers.serveravg import FedAvg
        from flcore.servers.servergh import FedGH
        from flcore.trainmodel.models import BaseHeadSplit

        model = work.network(of)
        if of.algorithm == "fedgh":
            model = BaseHeadSplit(model[:-1], model[-1])
        options = argparse.Namespace(
            **OPTIONS,
            dataset="work",
            num_classes=work.CLASSES,
            global_rounds=of.rounds - 1,  # it makes one more
            batch_size=of.batch,
            local_epochs=of.epochs,
            model=model,
            num_clients=of.clients,
            join_ratio=of.cohort / of.clients,
        )
        kind, last = (FedGH, "train_head") if of.algorithm == "fedgh" else (FedAvg, "aggregate_parameters")
        server, ends = kind(options, 0), []
        server.evaluate = lambda *_: server.rs_test_acc.append(0.0)
        finish = getattr(server, last)

        def finish_and_note() -> None:
            finish()
            ends.append(time.time())

        setattr(server, last, finish_and_note)
        server.save_results = server.save_global_model = lambda: None
        sys.stdout = sys.stderr
        server.train()
        print(json.dumps({"ends": ends}), file=sys.__stdout__, flush=True)


def write(data: Path, folder: Path) -> None:
    """The samples as PFLlib keeps them: a file for each client."""
    images, labels = work.read(data)
    for part, count in (("train", len(labels[0])), ("test", work.TESTS)):
        (folder / part).mkdir(parents=True)
        for client, (x, y) in enumerate(zip(images, labels, strict=True)):
            content = {"x": x[:count].numpy(), "y": y[:count].numpy()}
            np.savez(folder / part / f"{client}.npz", data=np.array(content, dtype=object))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
