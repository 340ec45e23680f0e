"""An environment with an installed pflmpi, made once for all tests that use it."""

from pathlib import Path

import pytest

import outside_world
from installed import OutsideWorld, build_wheel, environment_with, install


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment_with(wheel, tmp_path_factory.mktemp("installed") / "env")


@pytest.fixture(scope="session")
def world(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> OutsideWorld:
    """A user's folder with data and configurations of every kind; a package of their own is installed too."""
    folder, package = tmp_path_factory.mktemp("outside"), tmp_path_factory.mktemp("package")
    outside_world.write(folder)
    outside_world.write_package(package)
    install(package, Path(environment["VIRTUAL_ENV"]))
    return OutsideWorld(folder, environment)
