"""What a run would be asked for: the configuration that is given, or that of the run, or what holds without one."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pflmpi.data.config import DataConfig, PartitionConfig
from pflmpi.doctor.facts import Asked
from pflmpi.errors import PflmpiError
from pflmpi.learning.training import TrainingConfig
from pflmpi.runtime.config import RuntimeConfig


@dataclass(frozen=True)
class Wanted:
    """The sections that matter here; `asked` has what the checks need of them."""

    asked: Asked
    runtime: RuntimeConfig
    training: TrainingConfig
    data: DataConfig | None = None
    partition: PartitionConfig | None = None


def wanted(config: Path | None, run: Path | None) -> Wanted:
    """Return what is wanted; a configuration that cannot be used becomes an error in `asked`."""
    stored = run / "config.yaml" if run is not None else None
    if config is None and not (stored and stored.is_file()):
        return _of(RuntimeConfig(), TrainingConfig())
    try:
        from pflmpi.config import load as configuration
        from pflmpi.config.yaml_file import dump, read

        if config is not None:
            found = configuration.load(config)
        else:
            assert stored is not None
            found = configuration.parse({key: value for key, value in read(stored).items() if key != "recorded"})
    except PflmpiError as error:
        return _of(RuntimeConfig(), TrainingConfig(), error=str(error))
    except (ImportError, OSError):  # it needs torch; that this is broken is found elsewhere
        return _of(RuntimeConfig(), TrainingConfig())
    digest = hashlib.sha256(dump(found.resolved()).encode()).hexdigest()
    return _of(found.runtime, found.training, found.data, found.partition, digest=digest)


def _of(
    runtime: RuntimeConfig,
    training: TrainingConfig,
    data: DataConfig | None = None,
    partition: PartitionConfig | None = None,
    *,
    error: str = "",
    digest: str = "",
) -> Wanted:
    asked = Asked(
        error=error,
        digest=digest,
        transport=runtime.transport,
        device=runtime.device,
        threads=runtime.threads,
        faults=runtime.faults,
    )
    return Wanted(asked, runtime, training, data, partition)
