"""The sections `evaluation`, `checkpoint`, `output` and `runtime` of a configuration."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class EvaluationConfig(BaseModel):
    """When and how the personal models are tested."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: Annotated[int, Field(ge=1, description="rounds from one evaluation to the next; the last is always one")] = 1
    absent: Annotated[
        Literal["latest", "last_received"],
        Field(description="what a client that did not train is tested with: the newest reply, or the last it received"),
    ] = "latest"
    when: Annotated[
        Literal["before", "both"],
        Field(description="clients are tested with the message of the round, before they train; both: after it, too"),
    ] = "before"
    batch_size: Annotated[int, Field(ge=1, description="samples per forward pass outside training")] = 256
    unseen: Annotated[
        float, Field(ge=0, lt=1, description="share of the clients kept out of training, to be tested as newcomers")
    ] = 0.0
    unseen_updates: Annotated[
        int, Field(ge=1, le=10_000, description="local updates of an unseen client before it is tested, if it trains")
    ] = 1
    measures: Annotated[
        list[str] | None,
        Field(
            description="what is measured besides, such as auroc, balanced_accuracy, calibration_error, or "
            "./my_file.py:function; each has columns NAME_mean, NAME_weighted and NAME_bottom; null: as data.task says"
        ),
    ] = None


class CheckpointConfig(BaseModel):
    """When the state is written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: Annotated[int, Field(ge=1, description="rounds from one checkpoint to the next; the last is always one")] = 1
    keep: Annotated[int, Field(ge=0, description="how many of the newest checkpoints stay on disk; 0 for all")] = 3


def _as_dicts(trackers: list[Any]) -> list[dict[str, Any]]:
    """Trackers as {name: ..., options}; a bare name has no options."""
    return [tracker if isinstance(tracker, dict) else {"name": tracker} for tracker in trackers]


class OutputConfig(BaseModel):
    """Output beside the checkpoints and metrics.csv."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trackers: Annotated[
        list[Any],
        Field(description="who gets the metrics too: tensorboard, wandb, mlflow, file.py:Class, {name: ..., options}"),
    ] = []
    events: Annotated[
        bool, Field(description="a line for each round, checkpoint, warning, start and end in RUN/events.jsonl")
    ] = False

    @field_validator("trackers")
    @classmethod
    def _have_names(cls, trackers: list[Any]) -> list[Any]:
        for tracker in trackers:
            if not isinstance(tracker.get("name") if isinstance(tracker, dict) else tracker, str):
                raise ValueError(f"{tracker} has no name; give a name, or {{name: mlflow, store: mlruns}}")
        normalised = _as_dicts(trackers)
        if duplicate := next((tracker for tracker in normalised if normalised.count(tracker) > 1), None):
            raise ValueError(f"{duplicate['name']} is there twice; leave one out")
        return trackers

    def named_trackers(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and options of each tracker."""
        return [
            (tracker["name"], {key: tracker[key] for key in tracker if key != "name"})
            for tracker in _as_dicts(self.trackers)
        ]


class RuntimeConfig(BaseModel):
    """Devices, executor and limits; the results do not depend on ranks, transport, server or time limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    transport: Annotated[
        Literal["auto", "inprocess", "mpi", "torch"], Field(description="auto: found from how the run was started")
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="auto: cuda where there is one")] = "auto"
    gpus: Annotated[int | None, Field(ge=1, description="GPUs to use on each node; null for all")] = None
    gpu_memory: Annotated[
        float, Field(gt=0, le=1, description="share of each GPU's memory for this run, where several runs share GPUs")
    ] = 1.0
    between_gpus: Annotated[
        Literal["auto", "host"],
        Field(description="large messages: by NCCL or MPI from GPU to GPU where all ranks can; host: through the host"),
    ] = "auto"
    mixed_gpus: Annotated[
        Literal["refuse", "allow"],
        Field(description="GPUs of several models, or of another one than a run began on; allow gives up equal bits"),
    ] = "refuse"
    executor: Annotated[
        Literal["auto", "loop", "lanes"],
        Field(description="client by client, or many clients in one call; auto chooses by device and model"),
    ] = "auto"
    lanes: Annotated[
        int | None,
        Field(ge=1, description="clients of which those that take part share a call; null chooses by participants"),
    ] = None
    state: Annotated[
        Literal["memory", "disk"],
        Field(description="where the state of clients lives that have trained; disk: in a mapped file, not in memory"),
    ] = "memory"
    cache: Annotated[
        str | None,
        Field(description="folder for what ranks of a node share of a dataset; null: pflmpi-UID below TMPDIR"),
    ] = None
    scratch: Annotated[
        str | None, Field(description="folder of that file, such as $TMPDIR on a node's own disk; null: the run's")
    ] = None
    threads: Annotated[int, Field(ge=1, le=1024, description="CPU threads of each rank")] = 1
    timeout: Annotated[
        float | None,
        Field(
            gt=0,
            le=2_000_000,  # 23 days; poll() counts milliseconds in 31 bits
            description="seconds a rank waits for the others; null: 3600 in the first round of each start, then 20 of "
            "the longest rounds, at least 600",
        ),
    ] = None
    spare: Annotated[
        float,
        Field(ge=0, le=2_000_000, description="seconds left for the last checkpoint before a batch job's time limit"),
    ] = 30.0
    server: Annotated[
        Literal["auto", "shared", "dedicated"],
        Field(description="whether rank 0 computes clients too; auto: dedicated with one client per rank"),
    ] = "auto"
    client_errors: Annotated[
        Literal["stop", "skip"],
        Field(description="a client's update raises or is not finite; skip counts the client as absent in that round"),
    ] = "stop"


LEAST_TIMEOUT = 600.0  # seconds, of `timeout: null`

DATA_PATHS = ("data.path", "partition.path")  # files may move: the content is checked by its hash

# A resumed run may change these; the other keys affect results.
FREE_ON_RESUME = {
    *("runtime.transport", "runtime.device", "runtime.gpus", "runtime.gpu_memory", "runtime.mixed_gpus"),
    "runtime.between_gpus",
    *("runtime.timeout", "runtime.spare", "runtime.server", "runtime.state", "runtime.scratch", "runtime.cache"),
    "runtime.client_errors",  # decides whether a run goes on; completed rounds are the same with both values
    *DATA_PATHS,
    "data.resident",
    "data.root",  # the content is checked by its hash
    "model.check",  # decides whether a run starts
    "training.rounds",
    "training.stop",
    "checkpoint.every",
    "checkpoint.keep",
    "output.trackers",
    "output.events",
}


def list_free_keys(schedule: str, decay_rounds: int | None) -> set[str]:
    """Returns the keys that a resumed run with this schedule of learning rates may change."""
    decays_over_all = schedule == "cosine" and decay_rounds is None
    return FREE_ON_RESUME - {"training.rounds"} if decays_over_all else FREE_ON_RESUME
