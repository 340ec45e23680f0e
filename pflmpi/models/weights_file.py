"""Pretrained weights from a file: tensors only, nothing is unpickled."""

import pickle
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn

from pflmpi.errors import ConfigError
from pflmpi.text import first_line

_SAVE = "write it by torch.save(module.state_dict(), FILE), with the weights in it"


def read_weights(path: Path, module: nn.Module, head: str, num_classes: int) -> dict[str, Tensor]:
    """Load a state dict into a module; the weights of its head are returned if they are for that many classes.

    Raises:
        ConfigError: the file cannot be read, holds anything but finite tensors, or does not fit.
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
    buffers = dict(module.named_buffers())
    for name, value in {
        **state,
        **{f"{head}.{key}": value for key, value in heads.items()},
    }.items():  # a buffer may be a mask of -inf
        if (value.isnan() if name in buffers else ~value.float().isfinite()).any():
            raise ConfigError(f"model.weights = {str(path)!r}: {name} has a value that is not a finite number")
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
    except ConfigError:
        raise
    except Exception as error:  # torch and safetensors raise a dozen kinds for damaged bytes
        problem = f"cannot be read: {first_line(error)};"
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
            problem = "holds more than plain tensors, and nothing else is read:"
        raise ConfigError(f"model.weights = {str(path)!r} {problem} {_SAVE}") from error
    if not isinstance(state, dict):
        raise ConfigError(f"model.weights = {str(path)!r} holds a {type(state).__name__}, no state dict; {_SAVE}")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            found = f"{name!r} with a {type(value).__name__}"
            raise ConfigError(f"model.weights = {str(path)!r} is no state dict, it has {found}; {_SAVE}")
        if value.is_meta or value.is_quantized or value.layout != torch.strided or value.is_complex():
            found = "meta" if value.is_meta else f"{value.dtype}, {value.layout}"
            raise ConfigError(f"model.weights = {str(path)!r}: {name} has no plain numbers ({found}); {_SAVE}")
    return state
