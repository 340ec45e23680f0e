"""A virtual environment for each simulator, with the PyTorch of this one and a named version of its own."""

import importlib.metadata
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Peer:
    """A simulator.

    Attributes:
        package: what pip installs; "" runs in this environment.
        processes: by which torchrun starts it, one for each core; else it makes its own.
        threads: of a process; None: as many as cores.
        algorithms: that are compared.
    """

    name: str
    package: str = ""
    torchrun: bool = False
    threads: int | None = 1
    algorithms: tuple[str, ...] = ("fedavg",)


PEERS = (
    Peer("bare", torchrun=True),
    Peer("pflmpi", algorithms=("fedavg", "fedgh")),
    Peer("pfl", "pfl==0.6.0", torchrun=True),
    Peer("flower", "flwr[simulation]==1.41.0"),
    Peer("fluke", "fluke-fl==0.8.1", threads=None),
    Peer("pfllib", threads=None, algorithms=("fedavg", "fedgh")),
)


def python(peer: Peer, folder: Path) -> str:
    """The interpreter of a peer's environment, which is made when it is not there."""
    if not peer.package:
        return sys.executable
    place = folder / peer.name
    found = place / "bin" / "python"
    if not (place / "made").exists():
        print(f"making an environment with {peer.package}", file=sys.stderr)
        call([sys.executable, "-m", "venv", "--clear", str(place)])
        packages = place / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        (packages / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        pins = place / "pins.txt"
        pins.write_text("".join(f"{name}=={importlib.metadata.version(name)}\n" for name in ("torch", "torchvision")))
        call([str(found), "-m", "pip", "install", "--quiet", "--constraint", str(pins), peer.package])
        (place / "made").touch()
    return str(found)


def call(words: list[str]) -> None:
    """Run a command that has to succeed."""
    subprocess.run(words, check=True, stdout=sys.stderr)
