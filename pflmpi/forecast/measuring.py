"""What this machine was found to be: measured once, stored, and found again."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pflmpi import machine
from pflmpi.forecast import stored
from pflmpi.forecast.calibration import Calibration, calibrate
from pflmpi.forecast.communication import Link
from pflmpi.forecast.links import Measured, measure_link
from pflmpi.forecast.memory import data_bytes
from pflmpi.forecast.sizes import StateSizes
from pflmpi.learning.task import HOST
from pflmpi.run.build import Experiment
from pflmpi.runtime.schedule import RoundSchedule
from pflmpi.runtime.setup import Setup

_MACHINE = ("cpu", "device", "torch")  # facts that say where something was measured
_FREE = {"rounds", "participation", "lr", "lr_decay"}  # of `training`: no call takes longer for them


@dataclass(frozen=True)
class Found:
    """What is known of the machine.

    Attributes:
        calibrations: by cohort; None where they could not be measured.
        device: what they were measured on.
        link: between two ranks of a node; None where it was not asked for, or could not be measured.
        base: bytes of a rank that has done nothing, and what of it ranks share; None as for the link.
        remarks: what the user should know of all this.
    """

    calibrations: Mapping[int, Calibration] | None
    device: str
    link: Link | None = None
    base: tuple[float, float] | None = None
    remarks: tuple[str, ...] = ()


def calls_found(
    experiment: Experiment,
    ready: Setup,
    ahead: Sequence[RoundSchedule],
    sizes: StateSizes,
    on_gpu: bool,
    folder: Path,
    anew: bool,
    before: float,
) -> Found:
    """Return the calibrations of all cohorts, measured on the device of the experiment if they are not stored.

    Args:
        on_gpu: whether ranks compute on GPUs; if there is none here, one measured elsewhere will do.
        folder: of the stored measurements.
        anew: whether to measure again.
        before: bytes of this process without the data.
    """
    device = experiment.tasks[0].device
    missing = on_gpu and device.type != "cuda"
    calibrations, places, remarks = {}, set(), []
    for cohort in range(len(experiment.tasks)):
        groups = _units(ready, ahead, cohort)
        facts = _facts(experiment, ready, cohort, groups, device)
        elsewhere = (
            stored.find(folder, {**facts}, _MACHINE, lambda found: found["device"] != "cpu") if missing else None
        )
        known = None if anew else elsewhere or stored.find(folder, facts)
        calibration = _read(known)
        if calibration is None:
            needed = 2 * sizes.server_bytes + 4 * len(groups[-1]) * int(sizes.client.max())
            if needed > machine.memory().free / 2:
                remark = (
                    "seconds and activations are not predicted: measuring them needs more memory than there is here"
                )
                return Found(None, "", remarks=(remark,))
            calibration, known = calibrate(ready, ahead[0], groups, before + data_bytes(experiment)[0]), None
            if problem := stored.keep(folder, facts, calibration.plain()):
                remarks.append(f"the measurements are not stored ({problem})")
        calibrations[cohort] = calibration
        places.add(str((known or (facts, {}))[0]["device"]))
    name = " and ".join(sorted(places)).replace("cpu", facts["cpu"])
    if missing and "cpu" in places:
        remarks.append(
            "there is no GPU here: seconds and memory of calls are those of this machine's CPU; run this once where a "
            "GPU is (srun --gpus=1 pflmpi plan ...), it is stored and found again"
        )
    return Found(calibrations, name, remarks=tuple(dict.fromkeys(remarks)))


def link_found(found: Found, worker: str, folder: Path, anew: bool) -> Found:
    """Return what is known, with the link between two ranks of this node and what a rank is without work."""
    facts = {"link": "torch", **machine.description(HOST)}
    known = None if anew else stored.find(folder, facts)
    if known is not None:
        try:
            numbers = {name: float(value) for name, value in known[1].items()}
            return replace(
                found, link=Link(numbers["delay"], numbers["rate"]), base=(numbers["base"], numbers["shared"])
            )
        except (KeyError, TypeError, ValueError):
            pass  # damaged: measured again
    measured = measure_link(worker)
    if measured is None:
        remark = "communication is not predicted: two ranks could not talk on this machine"
        return replace(found, remarks=(*found.remarks, remark))
    problem = stored.keep(folder, facts, _numbers(measured))
    remarks = [*found.remarks, *([f"the measurements are not stored ({problem})"] if problem else [])]
    return replace(
        found,
        link=measured.link,
        base=(float(measured.base), float(measured.shared)),
        remarks=tuple(dict.fromkeys(remarks)),
    )


def _numbers(measured: Measured) -> dict[str, Any]:
    return {**asdict(measured.link), "base": measured.base, "shared": measured.shared}


def _read(known: tuple[stored.Facts, stored.Facts] | None) -> Calibration | None:
    if known is None:
        return None
    try:
        return Calibration.read(dict(known[1]))
    except (KeyError, TypeError, ValueError):
        return None  # damaged: measured again


def _units(ready: Setup, ahead: Sequence[RoundSchedule], cohort: int) -> list[np.ndarray]:
    """Return clients of a cohort as they are computed in one call: those of the smallest call, and of the largest."""
    calls = [group for one in ahead for groups in (*one.training, *one.testing) for group in groups]
    calls = [group for group in (calls or ready.placement.groups) if ready.executor.cohort[group[0]] == cohort]
    calls = calls or [group for group in ready.placement.groups if ready.executor.cohort[group[0]] == cohort]
    least, most = min(calls, key=len), max(calls, key=len)
    return [least, most] if len(least) < len(most) else [most]


def _facts(
    experiment: Experiment, ready: Setup, cohort: int, groups: Sequence[np.ndarray], device: torch.device
) -> dict[str, Any]:
    """Return what the calibration of a cohort depends on."""
    config = experiment.config
    members = experiment.cohort == cohort
    return {
        **machine.description(device),
        "architecture": str(experiment.architectures[cohort]),
        "algorithm": str(config.algorithm),
        "training": config.training.model_dump(exclude=_FREE),
        "evaluation": config.evaluation.model_dump(exclude={"every"}),
        "executor": config.runtime.executor,
        "threads": config.runtime.threads,
        "lanes": [len(group) for group in groups],
        "clients": experiment.federation.num_clients,
        "participants": len(ready.task.training.participants(config.seed, 1, experiment.federation.num_clients)),
        "samples": int(ready.executor.federation.num_train[members].max()),
        "tests": int(ready.num_test[members].max()),
    }
