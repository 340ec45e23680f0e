"""Units, axes and descriptions of the content of a checkpoint, which its file says of it."""

from collections.abc import Mapping

from pflmpi.store.checked_hdf5 import Described

# Of arrays; single numbers, such as accuracy_mean, are said in `about` under their names alone.
METRICS = {
    "participants": ("", ("participant",), "ascending ids of the clients that trained"),
    "skipped": ("", (), "ascending ids of the clients that failed in the round and count as absent"),
    "correct": ("samples", ("client",), "test samples that the personal model of each client classifies correctly"),
    "total": ("samples", ("client",), "test samples of each client"),
    "accuracy": ("", ("client",), "correct / total"),
    "client_test_loss": ("", ("client",), "cross-entropy per test sample, scores taken as logits"),
    "client_train_loss": ("", ("participant",), "mean loss of the local steps of each participant, as it is minimised"),
    "client_f1": ("", ("client",), "plain mean of F1 over the classes that a client has or predicts"),
    "class_accuracy": ("", ("class",), "correct share of the test samples of each class, over all clients"),
    "hits": ("samples", ("client", "class"), "test samples of each class that are classified correctly"),
    "predicted": ("samples", ("client", "class"), "test samples classified as each class"),
}
BYTES = {
    "up": ("bytes", ("client",), "from each client, as papers count them"),
    "down": ("bytes", ("client",), "to each client, as papers count them"),
}
PARTITION = {
    "train_samples": ("samples", ("client",), "training samples of each client"),
    "test_samples": ("samples", ("client",), "test samples of each client"),
    "validation_samples": ("samples", ("client",), "validation samples of each client"),
    "validation_by_class": ("samples", ("client", "class"), "validation samples of each client and class"),
    "train_by_class": ("samples", ("client", "class"), "training samples of each client and class"),
    "test_by_class": ("samples", ("client", "class"), "test samples of each client and class"),
}
LAYOUT = {
    "file": (
        "",
        ("client",),
        "index into `shards` of `about`: the shard with the newest state of each client; -1: none",
    ),
    "row": ("", ("client",), "row of each client in that shard, counted within its cohort; -1 for none"),
    "cohort": ("", ("client",), "index into `cohorts` of `about`: clients that keep the same arrays"),
}
_FIGURES: Mapping[str, Mapping[str, Described]] = {
    "metrics": METRICS,
    "bytes": BYTES,
    "partition": PARTITION,
    "layout": LAYOUT,
}
_CLIENTS_OF = {"unseen_": "unseen", "trained_": "participant", "validation_": "client"}  # axis by prefix of a name
_PARTS = ("body", "head", "stats")  # of a model
_PLACES = ("server", "kept")  # where a diagnostic says that its values are
_CLASS_VECTORS = ("class", "feature")
_OF_CLIENTS = {"PerClient": ("client",), "Category": ("client",), "ClientWeights": ("client", "client")}  # by kind


class Descriptions:
    """What is said of the arrays of a checkpoint: unit, names of the first axes, description.

    Args:
        diagnostics: by name, what the algorithm shows; see `learning.diagnostics`.
        outside: whether the models are modules from outside, whose arrays have axes that nobody knows.
    """

    def __init__(self, diagnostics: Mapping[str, Mapping[str, str]], outside: bool = False) -> None:
        self._diagnostics, self._outside = diagnostics, outside
        self._shown = {
            place: {shown[place]: shown for shown in diagnostics.values() if shown.get(place)} for place in _PLACES
        }

    def figure(self, section: str, name: str) -> Described:
        """Of an array in `metrics`, `bytes`, `partition` or `layout`."""
        if section != "metrics" or name in METRICS:
            return _FIGURES[section].get(name, ("", (), name))
        of = next((prefix for prefix in _CLIENTS_OF if name.startswith(prefix)), "")
        base = "client_test_loss" if name == "validation_client_loss" else name.removeprefix(of)
        clients = _CLIENTS_OF.get(of, "client")
        if base in METRICS:
            unit, axes, text = METRICS[base]
            text = text.replace("test sample", "validation sample") if of == "validation_" else text
            what = "on validation samples" if of == "validation_" else f"of {of[:-1]} ones"
            return unit, tuple(clients if axis == "client" else axis for axis in axes), f"{text}; {what}"
        if base.startswith("client_"):
            samples = "validation" if of == "validation_" else "test"
            return "", (clients,), f"{base.removeprefix('client_')} of the {samples} samples of each client"
        return "", (), name

    def diagnostic(self, name: str) -> Described:
        """Of what was measured in the round."""
        diagnostic = self._diagnostics.get(name, {})
        axes = ("participant",) * (2 if diagnostic.get("kind") == "ClientWeights" else 1)
        return _described(diagnostic, f"{name} of each participant", axes)

    def server(self, path: str) -> Described:
        """Of the state of the server."""
        diagnostic = self._of_state(path, "server")
        axes = _OF_CLIENTS.get(diagnostic.get("kind", "")) or self._axes(path, diagnostic)
        return _described(diagnostic, f"{path} of the server", axes)

    def client(self, path: str, clients: str) -> Described:
        """Of the state of the clients, whose axis has the name `clients`."""
        diagnostic = self._of_state(path, "kept")
        return _described(diagnostic, f"{path} of each client", (clients, *self._axes(path, diagnostic)))

    def received(self, message: str, path: str, own: bool) -> Described:
        """Of an array in a message that personal models are put together from."""
        axes = (*(("client",) if own else ()), *self._axes(f"{message}/{path}", {}))
        return ("", axes, f"{path}, received by {'each client' if own else 'all clients'}")

    def _of_state(self, path: str, place: str) -> Mapping[str, str]:
        """What diagnostics show of an array of the server or the clients, or of all that it lies below."""
        shown = self._shown[place]
        return next((shown[above] for above in _above(path) if above in shown), {})

    def _axes(self, path: str, diagnostic: Mapping[str, str]) -> tuple[str, ...]:
        """Names of the first axes of an array, without that of the clients, as far as they are known."""
        if diagnostic.get("kind") == "ClassVectors":
            return _CLASS_VECTORS
        *above, name = path.split("/")
        if above[-1:] == ["head"] and name in {"weight", "bias"}:
            return _CLASS_VECTORS
        start = max((above.index(part) for part in _PARTS if part in above), default=len(above)) + 1
        layer = ".".join(above[start:])
        return () if self._outside or not layer else (f"{layer}_out", f"{layer}_in", "height", "width")


def _above(path: str) -> list[str]:
    """A path and all that it lies below, such as head/weight, head."""
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _described(diagnostic: Mapping[str, str], text: str, axes: tuple[str, ...]) -> Described:
    """Unit, axes and description, with title and caption of a diagnostic of the algorithm, if any."""
    texts = [part for part in (diagnostic.get("title"), diagnostic.get("caption")) if part]
    return (diagnostic.get("unit", ""), axes, f"{text}: {'. '.join(texts)}" if texts else text)
