"""The sections `evaluation`, `checkpoint`, `output` and `runtime` of a configuration."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class EvaluationConfig(BaseModel):
    """When and how the personal models are tested."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(1, ge=1, description="rounds from one evaluation to the next; the last is always one")
    absent: Literal["latest", "last_received"] = Field(
        "latest",
        description="what a client that did not train is tested with: the newest reply, or the last it received",
    )
    when: Literal["before", "both"] = Field(
        "before", description="clients are tested with the message of the round, before they train; both: after it, too"
    )
    batch_size: int = Field(256, ge=1, description="samples per forward pass outside training")
    unseen: float = Field(
        0.0, ge=0, lt=1, description="share of the clients kept out of training, to be tested as newcomers"
    )
    unseen_updates: int = Field(
        1, ge=1, le=10_000, description="local updates of an unseen client before it is tested, if it trains"
    )
    measures: list[str] | None = Field(
        None,
        description="what is measured besides, such as auroc, balanced_accuracy, calibration_error, or "
        "./my_file.py:function; each has columns NAME_mean, NAME_weighted and NAME_bottom; null: as data.task says",
    )


class CheckpointConfig(BaseModel):
    """When the state is written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(1, ge=1, description="rounds from one checkpoint to the next; the last is always one")
    keep: int = Field(3, ge=0, description="how many of the newest checkpoints stay on disk; 0 for all")


def _as_dicts(trackers: list[Any]) -> list[dict[str, Any]]:
    """Trackers as {name: ..., options}; a bare name has no options."""
    return [tracker if isinstance(tracker, dict) else {"name": tracker} for tracker in trackers]


class OutputConfig(BaseModel):
    """Output beside the checkpoints and metrics.csv."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trackers: list[Any] = Field(
        [], description="who gets the metrics too: tensorboard, wandb, mlflow, file.py:Class, {name: ..., options}"
    )
    events: bool = Field(
        False, description="a line for each round, checkpoint, warning, start and end in RUN/events.jsonl"
    )

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
        return [
            (tracker["name"], {key: tracker[key] for key in tracker if key != "name"})
            for tracker in _as_dicts(self.trackers)
        ]


class RuntimeConfig(BaseModel):
    """Devices, executor and limits; the results do not depend on ranks, transport, server or time limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    transport: Literal["auto", "inprocess", "mpi", "torch"] = Field(
        "auto", description="auto: found from how the run was started"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    gpus: int | None = Field(None, ge=1, description="GPUs to use on each node; null for all")
    gpu_memory: float = Field(
        1.0, gt=0, le=1, description="share of each GPU's memory for this run, where several runs share GPUs"
    )
    between_gpus: Literal["auto", "host"] = Field(
        "auto", description="large messages: by NCCL or MPI from GPU to GPU where all ranks can; host: through the host"
    )
    mixed_gpus: Literal["refuse", "allow"] = Field(
        "refuse", description="GPUs of several models, or of another one than a run began on; allow gives up equal bits"
    )
    executor: Literal["auto", "loop", "lanes"] = Field(
        "auto", description="client by client, or many clients in one call; auto chooses by device and model"
    )
    lanes: int | None = Field(
        None, ge=1, description="clients of which those that take part share a call; null chooses by participants"
    )
    state: Literal["memory", "disk"] = Field(
        "memory",
        description="where the state of clients lives that have trained; disk: in a mapped file, not in memory",
    )
    cache: str | None = Field(
        None, description="folder for what ranks of a node share of a dataset; null: pflmpi-UID below TMPDIR"
    )
    scratch: str | None = Field(
        None, description="folder of that file, such as $TMPDIR on a node's own disk; null: the run's"
    )
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of each rank")
    timeout: float | None = Field(
        None,
        gt=0,
        le=2_000_000,
        description="seconds a rank waits for the others; null: 3600 in the first round of each start, then 20 of "
        "the longest rounds, at least 600",
    )
    spare: float = Field(
        30.0, ge=0, le=2_000_000, description="seconds left for the last checkpoint before a batch job's time limit"
    )
    server: Literal["auto", "shared", "dedicated"] = Field(
        "auto", description="whether rank 0 computes clients too; auto: dedicated with one client per rank"
    )
    client_errors: Literal["stop", "skip"] = Field(
        "stop", description="a client's update raises or is not finite; skip counts the client as absent in that round"
    )


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
