"""Units and descriptions of the content of a round file, stored as attributes beside it."""

from pflmpi.store.hdf5 import File, write_attribute

GROUPS = {
    "server": "state of the server after the round",
    "clients": "state of each client, [N, ...] in client order, joined from the files in shards/",
    "received": "messages that personal models are assembled from; empty if clients keep their last ones",
    "metrics": "figures of the round",
    "bytes": "traffic of the round",
    "diagnostics": "values measured in the round; the attribute `diagnostics` of the file describes them",
    "partition": "number of samples of each client",
    "history": "metrics.csv as it was after the round, bytes of text",
    "layout": "file and row with the newest state of each client",
}
METRICS = {
    "participants": ("", "[P] ascending ids of the clients that trained"),
    "skipped": ("", "ascending ids of the clients that failed in the round and count as absent"),
    "correct": ("samples", "[N] test samples that the personal model of each client classifies correctly"),
    "total": ("samples", "[N] test samples of each client"),
    "accuracy": ("", "[N] correct / total"),
    "accuracy_mean": ("", "plain mean of accuracy over clients"),
    "accuracy_weighted": ("", "sum of correct / sum of total"),
    "accuracy_std": ("", "standard deviation of accuracy over clients"),
    "accuracy_bottom": ("", "mean accuracy of the lowest tenth of the clients"),
    "f1_macro": ("", "plain mean of client_f1 over clients"),
    "test_loss": ("", "plain mean of client_test_loss over clients"),
    "client_test_loss": ("", "[N] cross-entropy per test sample, scores taken as logits"),
    "client_train_loss": ("", "[P] mean loss of the local steps of each participant, as it is minimised"),
    "client_f1": ("", "[N] plain mean of F1 over the classes that a client has or predicts"),
    "class_accuracy": ("", "[K] correct share of the test samples of each class, over all clients"),
    "hits": ("samples", "[N, K] test samples of each class that are classified correctly"),
    "predicted": ("samples", "[N, K] test samples classified as each class"),
    "unseen_correct": ("samples", "[U] test samples that each client kept out of training classifies correctly"),
    "unseen_total": ("samples", "[U] test samples of each client kept out of training"),
    "unseen_accuracy": ("", "[U] unseen_correct / unseen_total"),
    "unseen_accuracy_mean": ("", "plain mean of unseen_accuracy over clients"),
    "unseen_accuracy_weighted": ("", "sum of unseen_correct / sum of unseen_total"),
    "seconds_round": ("s", "from the end of the previous round to the end of this one"),
    "seconds_compute": ("s", "training and evaluation on the slowest rank"),
    "seconds_exchange": ("s", "messages, including waiting for other ranks, on rank 0"),
    "seconds_evaluation": ("s", "evaluation on rank 0"),
    "seconds_checkpoint": ("s", "training waited for the checkpoint before this round"),
}
BYTES = {
    "up": ("bytes", "[N] from each client, as papers count them"),
    "down": ("bytes", "[N] to each client, as papers count them"),
    "wire_up": ("bytes", "moved to rank 0 by collective calls"),
    "wire_down": ("bytes", "moved from rank 0 by collective calls"),
}
PARTITION = {
    "train_samples": ("samples", "[N] training samples of each client"),
    "test_samples": ("samples", "[N] test samples of each client"),
}


def describe(file: File) -> None:
    """Add the descriptions to a round file."""
    for name, text in GROUPS.items():
        write_attribute(file[name].id, "description", text)
    for section, described in (("metrics", METRICS), ("bytes", BYTES), ("partition", PARTITION)):
        group = file[section]
        for name in described.keys() & set(group):
            dataset, (unit, text) = group[name].id, described[name]
            write_attribute(dataset, "unit", unit)
            write_attribute(dataset, "description", text)
