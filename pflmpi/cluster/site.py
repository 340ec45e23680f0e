"""Profiles of a site: what `pflmpi submit` takes where its command line does not say it; see docs/clusters.md."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from pflmpi.config import yaml_file
from pflmpi.config.sections import section
from pflmpi.errors import ConfigError
from pflmpi.machine import expanded
from pflmpi.registry import unknown


class Container(BaseModel):
    """What each rank is started in.

    Attributes:
        apptainer: an image, as `apptainer exec` takes it; a file beside that of the profile.
        options: of `apptainer exec`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    apptainer: str
    options: str = ""


class Site(BaseModel):
    """A profile; the first keys are options of `pflmpi submit`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    mpi: Literal["none", "pmix", "pmi2"] | None = None
    setup: str | None = None
    srun: str | None = None
    gres: str | None = None
    container: Container | None = None


def profiles_file(environ: Mapping[str, str]) -> Path:
    return expanded(environ.get("PFLMPI_SITE") or "~/.config/pflmpi/site.yaml")


def load(name: str, environ: Mapping[str, str]) -> Site:
    """The profile of a name, whose files are absolute.

    Raises:
        ConfigError: there is none, or a key or a value of it is wrong.
    """
    path = profiles_file(environ)
    profiles = yaml_file.read(path)
    if name not in profiles:
        raise ConfigError(f"{path}: {unknown('site', name, list(profiles))}")
    try:
        site = section(name, Site, profiles[name])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    container, folder = site.container, path.absolute().parent
    if container and "://" not in container.apptainer:
        container = container.model_copy(update={"apptainer": _beside(folder, container.apptainer)})
    setup = site.setup and _beside(folder, site.setup)
    return site.model_copy(update={"setup": setup, "container": container})


def _beside(folder: Path, name: str) -> str:
    return str(expanded(name, folder))
