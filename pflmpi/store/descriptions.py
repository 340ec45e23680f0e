"""Units and descriptions of the content of a checkpoint, stored as attributes beside it."""

import json
from collections.abc import Mapping

from pflmpi.store.hdf5 import File, Identifier, h5py, write_attribute

GROUPS = {
    "server": "state of the server after the round",
    "clients": "state of each client, [N, ...] in client order",
    "received": "messages that personal models are assembled from; empty if clients keep their last ones",
    "metrics": "figures of the round",
    "bytes": "traffic of the round",
    "diagnostics": "values measured in the round; the attribute `diagnostics` of the file describes them",
    "partition": "number of samples of each client",
    "normalisation": "what models take is (x - mean) / std; x of bytes is divided by 255 before",
    "history": "metrics.csv after the round, bytes of text; the first `bytes_before` bytes are in shards/metrics.csv",
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
    "trained_correct": ("samples", "[P] test samples that each participant classifies correctly after local training"),
    "trained_total": ("samples", "[P] test samples of each participant"),
    "trained_accuracy": ("", "[P] trained_correct / trained_total"),
    "trained_accuracy_mean": ("", "plain mean of trained_accuracy over participants"),
    "trained_accuracy_weighted": ("", "sum of trained_correct / sum of trained_total"),
    "trained_test_loss": ("", "plain mean of trained_client_test_loss over participants"),
    "seconds_round": ("s", "from the end of the previous round to the end of this one"),
    "seconds_compute": ("s", "training and evaluation on the slowest rank"),
    "seconds_exchange": ("s", "messages, including waiting for other ranks, on rank 0"),
    "seconds_waiting": ("s", "the ranks that compute waited for the slowest of them, their mean"),
    "seconds_evaluation": ("s", "evaluation, the mean of the ranks that compute"),
    "seconds_checkpoint": ("s", "training waited for the checkpoint before this round"),
}
BYTES = {
    "up": ("bytes", "[N] from each client, as papers count them"),
    "down": ("bytes", "[N] to each client, as papers count them"),
    "wire_up": ("bytes", "moved between ranks on the way to rank 0"),
    "wire_down": ("bytes", "moved from rank 0 by collective calls"),
}
PARTITION = {
    "train_samples": ("samples", "[N] training samples of each client"),
    "test_samples": ("samples", "[N] test samples of each client"),
    "train_by_class": ("samples", "[N, K] training samples of each client and class"),
    "test_by_class": ("samples", "[N, K] test samples of each client and class"),
}
NORMALISATION = {
    "mean": ("", "[C] of each channel or column, as configured or computed before the first round (data.normalize)"),
    "std": ("", "[C] standard deviation of each channel or column, likewise"),
}
LAYOUT = {
    "file": ("", "[N] index into files: the shard with the newest state of each client; -1 for none"),
    "row": ("", "[N] row of each client in that shard, counted within its cohort; -1 for none"),
    "files": ("", "names of the shards, relative to the folder of the run"),
    "bytes": ("bytes", "length of each shard without its first 512 bytes"),
    "crc32": ("", "CRC-32 of these bytes of each shard"),
}
_FIGURES = {
    "metrics": METRICS,
    "bytes": BYTES,
    "partition": PARTITION,
    "normalisation": NORMALISATION,
    "layout": LAYOUT,
}
_PLACES = ("server", "kept")  # where a diagnostic says that its values are


def describe(file: File, datasets: Mapping[str, Identifier], several_cohorts: bool) -> None:
    """Say of every group of a file with a checkpoint, and of each array in it, what it is.

    Args:
        datasets: the arrays by path; one that has several has one here.
    """
    for name in GROUPS.keys() & set(file):
        write_attribute(h5py.h5o.open(file.id, name.encode()), "description", GROUPS[name])
    received = {}
    for message, group in file["received"].items():
        received[message] = "[N, ...] received by each client" if group.attrs["own"] else "received by all clients"
        write_attribute(group.id, "description", f"the message {message}, {received[message]}")
    diagnostics = json.loads(file.attrs.get("diagnostics", "{}"))
    shown = {place: {each[place]: each for each in diagnostics.values() if each.get(place)} for place in _PLACES}

    def meaning(section: str, path: str) -> tuple[str, str]:
        """Unit and description of an array."""
        first, _, rest = path.partition("/")
        if section in _FIGURES:
            ids = ("", "[m] ascending ids of the clients of a cohort")  # the only arrays in groups of these sections
            return _FIGURES[section].get(path, ids if rest else ("", path))
        if section == "diagnostics":
            return _said(diagnostics.get(path, {}), f"{path} of each participant", "[P, ...]")
        if section == "received":
            return "", f"{rest}, {received[first]}"
        if section == "server":
            return _state(path, shown["server"], "of the server", "")
        if not several_cohorts:
            return _state(path, shown["kept"], "of each client", "[N, ...]")
        if rest == "client":
            return "", "[m] ascending ids of the clients of the cohort"
        return _state(rest, shown["kept"], "of each client", "[m, ...] in the order of `client`:")

    for path, dataset in datasets.items():
        section, _, rest = path.partition("/")
        unit, text = meaning(section, rest) if rest else ("", "")
        write_attribute(dataset, "unit", unit)
        if rest:  # else it is described as a section
            write_attribute(dataset, "description", text)


def _state(path: str, shown: Mapping[str, Mapping[str, str]], whose: str, shape: str) -> tuple[str, str]:
    """Unit and description of an array of the server or the clients; `shown` by the path of what diagnostics show."""
    diagnostic = next((shown[above] for above in _above(path) if above in shown), {})
    return _said(diagnostic, f"{path} {whose}", shape)


def _above(path: str) -> list[str]:
    """A path and all that it lies below, such as head/weight, head."""
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _said(diagnostic: Mapping[str, str], what: str, shape: str) -> tuple[str, str]:
    """Unit and description of an array, with what the algorithm says of it, if anything."""
    text = f"{shape} {what}".strip()
    said = [part for part in (diagnostic.get("title"), diagnostic.get("caption")) if part]
    return diagnostic.get("unit", ""), f"{text}: {'. '.join(said)}" if said else text
