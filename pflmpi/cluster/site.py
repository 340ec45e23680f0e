"""Site profiles: defaults for options of `pflmpi submit`; see docs/clusters.md."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from pflmpi.config import yaml_file
from pflmpi.config.sections import section
from pflmpi.errors import ConfigError
from pflmpi.machine import expand_path
from pflmpi.registry import format_unknown_name


class Container(BaseModel):
    """The container that ranks run in."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    apptainer: str  # an image for `apptainer exec`; a relative path is relative to the file of the profile
    options: str = ""  # options of `apptainer exec`


class Site(BaseModel):
    """A profile: options of `pflmpi submit`, the name that GPUs have in `--gres`, and a container."""

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
    return expand_path(environ.get("PFLMPI_SITE") or "~/.config/pflmpi/site.yaml")


def load(name: str, environ: Mapping[str, str]) -> Site:
    """Read a profile; its paths become absolute.

    Raises:
        ConfigError: there is no such profile, or a key or value of it is wrong.
    """
    path = profiles_file(environ)
    profiles = yaml_file.read(path)
    if name not in profiles:
        raise ConfigError(f"{path}: {format_unknown_name('site', name, list(profiles))}")
    try:
        site = section(name, Site, profiles[name])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    container, folder = site.container, path.absolute().parent
    if container and "://" not in container.apptainer:
        container = container.model_copy(update={"apptainer": str(expand_path(container.apptainer, folder))})
    setup = site.setup and str(expand_path(site.setup, folder))
    return site.model_copy(update={"setup": setup, "container": container})
