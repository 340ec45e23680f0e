"""pflmpi as a user has it: from a wheel, in a virtual environment, in a folder outside the repository."""

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import processes
from pflmpi.config import yaml_file
from project import ROOT

_PIP = [sys.executable, "-W", "ignore", "-m", "pip", "--quiet", "--disable-pip-version-check"]
_CLEAN = {key: value for key, value in processes.ENVIRONMENT.items() if not key.startswith("PYTHON")}
_SOURCE = (
    "pflmpi",
    "configs",
    "examples",
    "launch",
    "slurm",
    "docs",
    "setup.cfg",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
_TRACKERS = ("wandb", "mlflow")


@dataclass(frozen=True)
class OutsideWorld:
    """A folder outside the repository, in which a user works with an installed pflmpi.

    Attributes:
        folder: with data and configurations; runs are below runs/.
        environment: variables of its processes.
    """

    folder: Path
    environment: dict[str, str]

    def call(self, words: list[str], code: int = 0) -> str:
        """What a command prints; it must end with that exit code."""
        done = processes.call(words, env=self.environment, cwd=self.folder)
        assert done.returncode == code, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def alone(self, name: str) -> Path:
        """The whole run of a configuration on one process, made once."""
        run = self.folder / "runs" / name
        if not run.exists():
            self.call(["pflmpi", "run", f"{name}.yaml", "--out", f"runs/{name}", "--ranks", "1", "--quiet"])
        return run

    def resumed(self, name: str) -> Path:
        """The whole run again, begun under mpirun on three ranks and resumed on two, made once; trackers are those that
        are installed.
        """
        run = self.folder / "runs" / f"{name}-mpi"
        if not run.exists():
            trackers = ["tensorboard", *filter(find_spec, _TRACKERS)]
            short = ["training.rounds=1", f"output.trackers=[{', '.join(trackers)}]"]
            start = ["mpirun", "-n", "3", "pflmpi", "run", f"{name}.yaml", "--out", str(run), "--quiet"]
            self.call([*start, *(word for setting in short for word in ("-s", setting))])
            rounds = yaml_file.read(self.folder / f"{name}.yaml")["training"]["rounds"]
            more = ["--ranks", "2", "-s", f"training.rounds={rounds}", "--quiet"]
            self.call(["pflmpi", "resume", str(run), *more])
        return run


def build_wheel(folder):
    """A wheel that is built in a folder from a copy of the checkout, without a network."""
    for name in _SOURCE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / "source" / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, folder / "source" / name)
    return wheel_of(folder / "source", folder)


def sdist_of(source, folder):
    """The source distribution of a checkout, built in a folder."""
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    built = processes.call([sys.executable, "-c", build, str(folder)], env=_CLEAN, cwd=source)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.tar.gz")
    return path


def wheel_of(source, folder):
    """The wheel of a checkout or a source distribution, built in a folder."""
    words = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    built = processes.call([*_PIP, *words, str(source)], env=_CLEAN, cwd=folder)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


def environment_with(package, folder):
    """An active virtual environment with a wheel. What pflmpi depends on, torch above all, is taken from the one in
    which the tests run: its folder comes last in `sys.path`, where the links of editable packages have no effect.
    """
    made = processes.call([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    assert made.returncode == 0, made.stderr
    install(package, folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    paths = [str(folder / "bin"), str(processes.BIN), _CLEAN["PATH"]]
    libraries = {"MPI4PY_LIBMPI": f"{sys.prefix}/lib"} if list(Path(sys.prefix).glob("lib/libmpi.so*")) else {}
    return {**_CLEAN, **libraries, "PATH": os.pathsep.join(paths), "VIRTUAL_ENV": str(folder)}


def install(package, environment, *options):
    """Install a wheel or the source of a package into a virtual environment, without a network."""
    words = ["--python", str(environment / "bin" / "python"), "install", "--no-deps", "--no-index"]
    done = processes.call([*_PIP, *words, "--no-build-isolation", *options, str(package)], env=_CLEAN)
    assert done.returncode == 0, done.stderr
