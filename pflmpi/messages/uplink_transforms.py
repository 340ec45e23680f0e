"""Transforms of a client's messages before they leave it: clipping, Gaussian noise, top-k, quantisation.

A mean of models is transformed as the difference to what the client received: the server sees received + T(sent -
received), of a mean of changes (`Mean.is_change`) T(sent). T clips the difference of all messages together to an L2
norm (DP-FedAvg: McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018), adds noise,
sends its largest values and what earlier rounds left out (error feedback: Stich et al., Sparsified SGD with Memory,
NeurIPS 2018), and rounds each parameter without bias (QSGD: Alistarh et al., NeurIPS 2017; error feedback then has the
rounding too, as in Qsparse-local-SGD: Basu et al., NeurIPS 2019). Class means are no difference: each is rounded as it
is, and its label and count stay.

Ranks send each other float32: the logical bytes are those of the transformed message. Clients are computed one by one,
so that no bit depends on which others are computed with them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from pflmpi import tree
from pflmpi.messages.groups import ClientGroup
from pflmpi.messages.kinds import ClassMeans, Mean, Messages, Uplink
from pflmpi.rng import stream
from pflmpi.tree import Tree

TRANSFORMS = ("clip", "noise", "top_k", "quantise")  # in the order in which they are applied
ALLOWED: dict[type, tuple[str, ...]] = {Mean: TRANSFORMS, ClassMeans: ("quantise",)}  # by kind of message
RESIDUAL = "residual"  # where error feedback is kept, beside the algorithm's state of a client: [n], flat
_WORD = 4  # bytes of a float32, of an index, of a scale


class UplinkConfig(BaseModel):
    """Transforms that clients apply, in this order, to what they send; null: none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    clip: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="largest L2 norm of the change that a client sends in a round"
    )
    noise: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="standard deviation of Gaussian noise on each value, over clip"
    )
    top_k: float | None = Field(
        None, gt=0, lt=1, description="share of the values that are sent, the largest; the others wait with the client"
    )
    quantise: Literal[4, 8, 16] | None = Field(None, description="bits of a value, rounded at random without bias")
    delta: float | None = Field(
        None, gt=0, lt=1, description="of the differential privacy that noise gives; null: 1 / clients"
    )

    @property
    def chosen(self) -> dict[str, float]:
        """The transforms that are set, in order."""
        return {name: value for name in TRANSFORMS if (value := getattr(self, name)) is not None}


def sent_bytes(config: UplinkConfig, up: Mapping[str, Uplink], classes_held: int) -> int:
    """Returns the logical bytes of one client's messages: of n values in M tensors, k = top_k n or all are sent.

    A value takes 4 bytes, or with `quantise` that many bits, and 4 M bytes for scales; `top_k` adds 4 k for indices.
    """
    if config.quantise is None and config.top_k is None:
        return sum(kind.client_bytes(classes_held) for kind in up.values())
    bits, scale = (config.quantise, _WORD) if config.quantise else (8 * _WORD, 0)
    total, values, tensors = 0, 0, 0
    for kind in up.values():
        if isinstance(kind, Mean):
            sizes = [leaf.numel() for _, leaf in tree.leaves(kind.like)]
            values, tensors = values + sum(sizes), tensors + len(sizes)
        else:
            total += kind.client_bytes(classes_held)
        if isinstance(kind, ClassMeans):  # of each class d values and a scale
            total += classes_held * (scale - (-kind.num_features * bits // 8) - _WORD * kind.num_features)
    sent, index = (values, 0) if config.top_k is None else (count_sent(config.top_k, values), _WORD)
    return total + sent * index - (-sent * bits // 8) + scale * tensors


def count_sent(share: float, values: int) -> int:
    """Returns k, the number of values that `top_k` sends: at least one."""
    return max(1, int(share * values + 0.5)) if values else 0


def residual_like(config: UplinkConfig, up: Mapping[str, Uplink]) -> Tree:
    """Returns the template of what a client keeps for error feedback; {} without `top_k`."""
    values = sum(leaf.numel() for kind in up.values() if isinstance(kind, Mean) for _, leaf in tree.leaves(kind.like))
    return {RESIDUAL: torch.empty(values, device="meta")} if config.top_k is not None else {}


def transform(
    config: UplinkConfig,
    up: Mapping[str, Uplink],
    seed: int,
    round: int,
    clients: ClientGroup,
    messages: Messages,
    received: Messages,
    residual: Tensor | None,
) -> tuple[Messages, Tensor | None]:
    """Transforms the messages of some clients; returns them [m, ...] on their devices, and the new residual [m, n].

    Args:
        up: what was declared.
        seed: of the run.
        messages: [m, ...] as the algorithm returned them; they are not changed.
        received: messages [m, ...] with the names of all means that are no changes.
        residual: [m, n] of the rounds before; None without `top_k`. The new one is on the host.
    """
    sent = {name: tree.clone(messages[name]) for name in messages}
    means = {name: kind for name, kind in sorted(up.items()) if isinstance(kind, Mean)}
    out = [leaf for name in means for _, leaf in tree.leaves(sent[name])]
    starts = [
        tree.map(torch.zeros_like, sent[name]) if kind.is_change else received[name] for name, kind in means.items()
    ]
    old = [leaf for start in starts for _, leaf in tree.leaves(start)]
    class_means = [tree.leaf(sent[name], "means") for name, kind in sorted(up.items()) if isinstance(kind, ClassMeans)]
    new_residual = None if residual is None else torch.empty_like(residual)
    for row, client in enumerate(clients.tolist()):
        draws = partial(stream, seed, round, client)
        if out:
            before = [leaf[row].to(out[0].device) for leaf in old]
            change = [new[row] - leaf for new, leaf in zip(out, before, strict=True)]
            waiting = None if residual is None else residual[row].to(out[0].device)
            change, rest = _transform_change(config, change, waiting, draws)
            for new, leaf, part in zip(out, before, change, strict=True):
                new[row] = leaf + part
            if new_residual is not None:
                new_residual[row] = rest.cpu()
        if config.quantise is not None:
            rounding = draws("uplink/quantise classes")
            for rows in class_means:
                rows[row] = _round_randomly(rows[row], config.quantise, rounding)
    return sent, new_residual


def _transform_change(
    config: UplinkConfig, change: list[Tensor], waiting: Tensor | None, draws: Callable[[str], np.random.Generator]
) -> tuple[list[Tensor], Tensor]:
    """Transforms one client's change; returns its tensors as they are sent, and the rest [n] that is not sent.

    Args:
        waiting: [n] the rest of earlier rounds.
        draws: returns the generator for a purpose.
    """
    whole = torch.cat([part.flatten() for part in change])
    if config.clip is not None:
        whole = _clip(whole, config.clip)
        if config.noise is not None:
            noise = draws("uplink/noise").standard_normal(len(whole), np.float32)
            whole = whole + torch.from_numpy(noise).to(whole.device) * (config.noise * config.clip)
    if waiting is not None:
        whole = whole + waiting
    sizes = [part.numel() for part in change]
    flat = whole if config.top_k is None else _keep_largest(whole, count_sent(config.top_k, len(whole)))
    if config.quantise is not None:
        rounding = draws("uplink/quantise")
        parts = torch.split(flat, sizes)
        flat = torch.cat([_round_randomly(part.unsqueeze(0), config.quantise, rounding)[0] for part in parts])
    sent = torch.split(flat, sizes)
    return [part.view_as(like) for part, like in zip(sent, change, strict=True)], whole - flat


def _clip(values: Tensor, max_norm: float) -> Tensor:
    """Scales values [n] down to an L2 norm of at most `max_norm`."""
    norm = values.double().square().sum().sqrt()
    return values * (max_norm / norm).clamp(max=1).to(values.dtype)  # for a norm of 0 the quotient is infinite


def _keep_largest(values: Tensor, count: int) -> Tensor:
    """Sets all but the `count` largest magnitudes of values [n] to zero; of equal ones the first are kept."""
    size = values.abs()
    least = size.topk(count).values[-1]
    above, equal = size > least, size == least
    return values * (above | (equal & (equal.cumsum(0) <= count - above.sum())))


def _round_randomly(rows: Tensor, bits: int, rng: np.random.Generator) -> Tensor:
    """Rounds rows [r, n] up or down at random, without bias, to 2^bits - 1 levels.

    The levels of a row are evenly spaced between plus and minus its largest magnitude, the scale that is sent too.
    """
    levels = 2 ** (bits - 1) - 1
    scale = rows.double().abs().amax(1, keepdim=True)
    exact = rows.double() / scale.where(scale > 0, 1.0) * levels
    low, draws = exact.floor(), torch.from_numpy(rng.random(rows.shape, np.float32)).to(rows.device)
    rounded: Tensor = (low + (draws < exact - low)) / levels * scale
    return rounded.to(rows.dtype)
