"""An environment with an installed pflmpi, made once for all tests that use it."""

from pathlib import Path

import pytest

import outside_world
from installed import OutsideWorld, build_wheel, environment_with, install


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def environment(wheel, tmp_path_factory):
    return environment_with(wheel, tmp_path_factory.mktemp("installed") / "env")


@pytest.fixture(scope="session")
def world(environment, tmp_path_factory):
    """A user's folder with data and configurations of every kind; a package of their own is installed too."""
    folder, package = tmp_path_factory.mktemp("outside"), tmp_path_factory.mktemp("package")
    outside_world.write(folder)
    outside_world.write_package(package)
    install(package, Path(environment["VIRTUAL_ENV"]))
    return OutsideWorld(folder, environment)
