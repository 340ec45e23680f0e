"""Addresses and network interfaces that the environment names, checked before a library fails on them."""

import os
import socket

from pflmpi.errors import ConfigError


def checked_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; raises `ConfigError` for an impossible port."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(
            f"MASTER_PORT = {port!r} (the ranks meet at {host}); expected a port from 1 to 65535, the same on all ranks"
        )
    return host, int(port)


def refused_address(host: str, port: int, error: OSError) -> ConfigError:
    """The error for an address at which rank 0 cannot listen, or that stands for no machine."""
    if isinstance(error, socket.gaierror):
        reason = f"MASTER_ADDR = {host!r} stands for no machine ({error.strerror}); name the node of rank 0"
    else:
        reason = f"rank 0 cannot listen at {host}:{port} ({error.strerror}); choose another MASTER_PORT"
    return ConfigError(f"{reason}, the same on all ranks")


def check_interfaces(variable: str) -> None:
    """Raise `ConfigError` if a variable such as GLOO_SOCKET_IFNAME names only interfaces that this machine lacks.

    NCCL takes beginnings of names, exact ones after "=", and after "^" those to leave out.
    """
    value, present = os.environ.get(variable, ""), [name for _, name in socket.if_nameindex()]
    names = [name for name in value.removeprefix("=").split(",") if name]
    begins = variable.startswith("NCCL") and not value.startswith("=")
    fit = any(here.startswith(name) if begins else here == name for name in names for here in present)
    if not names or fit or value.startswith("^"):
        return
    raise ConfigError(
        f"{variable} = {value!r}, which {socket.gethostname()} does not have; it has {', '.join(present)}; name one of "
        "these, or unset the variable"
    )
