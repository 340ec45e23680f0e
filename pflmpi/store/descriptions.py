"""Units, axes and descriptions of the arrays in a checkpoint, as stored in its file."""

from collections.abc import Mapping

from pflmpi.store.checked_hdf5 import Description

# Arrays alone; single numbers, such as accuracy_mean, have only their names in `about`.
METRICS = {
    "participants": Description("", ("participant",), "ascending ids of the clients that trained"),
    "skipped": Description("", (), "ascending ids of the clients that failed in the round and count as absent"),
    "correct": Description(
        "samples", ("client",), "test samples that the personal model of each client classifies correctly"
    ),
    "total": Description("samples", ("client",), "test samples of each client"),
    "accuracy": Description("", ("client",), "correct / total"),
    "client_test_loss": Description("", ("client",), "cross-entropy per test sample, scores taken as logits"),
    "client_train_loss": Description(
        "", ("participant",), "mean loss of the local steps of each participant, as it is minimised"
    ),
    "client_f1": Description("", ("client",), "plain mean of F1 over the classes that a client has or predicts"),
    "class_accuracy": Description("", ("class",), "correct share of the test samples of each class, over all clients"),
    "hits": Description("samples", ("client", "class"), "test samples of each class that are classified correctly"),
    "predicted": Description("samples", ("client", "class"), "test samples classified as each class"),
}
BYTES = {
    "up": Description("bytes", ("client",), "from each client, as papers count them"),
    "down": Description("bytes", ("client",), "to each client, as papers count them"),
}
PARTITION = {
    "train_samples": Description("samples", ("client",), "training samples of each client"),
    "test_samples": Description("samples", ("client",), "test samples of each client"),
    "validation_samples": Description("samples", ("client",), "validation samples of each client"),
    "validation_by_class": Description("samples", ("client", "class"), "validation samples of each client and class"),
    "train_by_class": Description("samples", ("client", "class"), "training samples of each client and class"),
    "test_by_class": Description("samples", ("client", "class"), "test samples of each client and class"),
}
LAYOUT = {
    "file": Description(
        "",
        ("client",),
        "index into `shards` of `about`: the shard with the newest state of each client; -1: none",
    ),
    "row": Description("", ("client",), "row of each client in that shard, counted within its cohort; -1 for none"),
    "cohort": Description("", ("client",), "index into `cohorts` of `about`: clients that keep the same arrays"),
}
_SECTIONS = {"metrics": METRICS, "bytes": BYTES, "partition": PARTITION, "layout": LAYOUT}
_CLIENT_AXIS = {"unseen_": "unseen", "trained_": "participant", "validation_": "client"}  # by prefix of a metric
_MODEL_PARTS = ("body", "head", "stats")
_PLACES = ("server", "kept")  # keys of a diagnostic that name the array with its values
_CLASS_VECTOR_AXES = ("class", "feature")
_SERVER_AXES = {"PerClient": ("client",), "Category": ("client",), "ClientWeights": ("client", "client")}  # by kind


class Descriptions:
    """Describes the arrays of a checkpoint.

    Args:
        diagnostics: those of the algorithm, by name; see `learning.diagnostics`.
        outside: whether the models are modules from outside, whose axes have no known meaning.
    """

    def __init__(self, diagnostics: Mapping[str, Mapping[str, str]], outside: bool = False) -> None:
        self._diagnostics, self._outside = diagnostics, outside
        self._of_path = {
            place: {diagnostic[place]: diagnostic for diagnostic in diagnostics.values() if diagnostic.get(place)}
            for place in _PLACES
        }

    def figure(self, section: str, name: str) -> Description:
        """Describes an array in `metrics`, `bytes`, `partition` or `layout`."""
        if section == "metrics" and name not in METRICS:
            return _describe_metric(name)
        return _SECTIONS[section].get(name, Description("", (), name))

    def diagnostic(self, name: str) -> Description:
        """Describes what was measured in the round."""
        diagnostic = self._diagnostics.get(name, {})
        axes = ("participant",) * (2 if diagnostic.get("kind") == "ClientWeights" else 1)
        return _describe(diagnostic, f"{name} of each participant", axes)

    def server(self, path: str) -> Description:
        """Describes an array of the server's state."""
        diagnostic = self._find_diagnostic(path, "server")
        axes = _SERVER_AXES.get(diagnostic.get("kind", "")) or self._name_axes(path, diagnostic)
        return _describe(diagnostic, f"{path} of the server", axes)

    def client(self, path: str, client_axis: str) -> Description:
        """Describes an array of the clients' state; `client_axis` is the name of its first axis."""
        diagnostic = self._find_diagnostic(path, "kept")
        return _describe(diagnostic, f"{path} of each client", (client_axis, *self._name_axes(path, diagnostic)))

    def received(self, message: str, path: str, own: bool) -> Description:
        """Describes an array in a message from which personal models are assembled."""
        axes = (*(("client",) if own else ()), *self._name_axes(f"{message}/{path}", {}))
        return Description("", axes, f"{path}, received by {'each client' if own else 'all clients'}")

    def _find_diagnostic(self, path: str, place: str) -> Mapping[str, str]:
        """Returns the diagnostic that shows an array, or the subtree that it is in; {} for none."""
        of_path, parts = self._of_path[place], path.split("/")
        prefixes = ("/".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((of_path[prefix] for prefix in prefixes if prefix in of_path), {})

    def _name_axes(self, path: str, diagnostic: Mapping[str, str]) -> tuple[str, ...]:
        """Returns the names of the first axes of an array, as far as they are known, without the client axis."""
        if diagnostic.get("kind") == "ClassVectors":
            return _CLASS_VECTOR_AXES
        *modules, name = path.split("/")
        if modules[-1:] == ["head"] and name in {"weight", "bias"}:
            return _CLASS_VECTOR_AXES
        start = max((modules.index(part) for part in _MODEL_PARTS if part in modules), default=len(modules)) + 1
        layer = ".".join(modules[start:])
        return () if self._outside or not layer else (f"{layer}_out", f"{layer}_in", "height", "width")


def _describe_metric(name: str) -> Description:
    """Describes a metric of unseen clients, after training, of validation samples, or of a user's measure.

    >>> _describe_metric("unseen_correct").axes, _describe_metric("client_auroc").text
    (('unseen',), 'auroc of the test samples of each client')
    """
    prefix = next((prefix for prefix in _CLIENT_AXIS if name.startswith(prefix)), "")
    base = "client_test_loss" if name == "validation_client_loss" else name.removeprefix(prefix)
    client_axis = _CLIENT_AXIS.get(prefix, "client")
    on_validation = prefix == "validation_"
    if base in METRICS:
        unit, axes, text = METRICS[base]
        axes = tuple(client_axis if axis == "client" else axis for axis in axes or ())
        if on_validation:
            return Description(unit, axes, f"{text.replace('test sample', 'validation sample')}; on validation samples")
        return Description(unit, axes, f"{text}; of {prefix[:-1]} ones")
    if base.startswith("client_"):
        samples = "validation" if on_validation else "test"
        text = f"{base.removeprefix('client_')} of the {samples} samples of each client"
        return Description("", (client_axis,), text)
    return Description("", (), name)


def _describe(diagnostic: Mapping[str, str], text: str, axes: tuple[str, ...]) -> Description:
    """Adds the unit, title and caption of a diagnostic of the algorithm, if there is one."""
    texts = [part for part in (diagnostic.get("title"), diagnostic.get("caption")) if part]
    return Description(diagnostic.get("unit", ""), axes, f"{text}: {'. '.join(texts)}" if texts else text)
