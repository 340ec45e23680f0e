"""Pretrained weights from a file: tensors only, nothing is unpickled."""

import pickle
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn

from pflmpi.errors import ConfigError


def read_weights(path: Path, module: nn.Module, head: str, num_classes: int) -> dict[str, Tensor]:
    """Load a state dict into a module; the weights of its head are returned if they are for that many classes.

    Raises:
        ConfigError: the file cannot be read, holds more than tensors, or does not fit.
    """
    state = _read(path)
    heads = {name.rpartition(".")[2]: state.pop(name) for name in list(state) if name.rpartition(".")[0] == head}
    own = {name: value for name, value in module.state_dict().items() if name.rpartition(".")[0] != head}
    unread = {name for name in state if name.endswith("num_batches_tracked") and name not in own}
    state = {name: value for name, value in state.items() if name not in unread}
    for name in sorted(own.keys() | state.keys()):
        sides = [str(list(side[name].shape)) if name in side else "missing" for side in (state, own)]
        if sides[0] != sides[1]:
            raise ConfigError(
                f"model.weights = {str(path)!r} is not of this model: {name} is {sides[0]}, here {sides[1]}"
            )
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(state[name])
    fits = set(heads) == {"weight", "bias"} and len(heads["bias"]) == num_classes
    return {name: value.float() for name, value in heads.items()} if fits else {}


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            state = import_module("safetensors.torch").load_file(path)
        elif path.suffix in (".pt", ".pth"):
            state = torch.load(path, map_location="cpu", weights_only=True)
        else:
            raise ConfigError(f"model.weights = {str(path)!r}: unknown suffix; known: .pt, .pth, .safetensors")
    except ModuleNotFoundError as error:
        raise ConfigError(f"model.weights = {str(path)!r} needs {error.name}: pip install {error.name}") from error
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"model.weights = {str(path)!r} cannot be read: {reason}") from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise ConfigError(f"model.weights = {str(path)!r} cannot be read: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(f"model.weights = {str(path)!r} is no state dict: expected names with tensors, nothing else")
    return state
