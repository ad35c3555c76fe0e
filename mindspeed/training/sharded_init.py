"""Models that no rank ever holds whole: parameters are sharded as soon as they are initialised.

Megatron initialises all parameters of a stage, then Megatron-FSDP shards them (ZeRO 2 and 3). With
many ranks the whole stage is larger than everything a rank keeps for training. Here each module is
initialised whole, one after the other, and leaves on every rank one n-th of its parameters:

    constructor of a module  ->  this rank's flat shard, and parameters on the meta device
    Megatron-FSDP            ->  asks module by module for the parameters: an all-gather of shards

Weights are those of the usual construction, bit for bit: every rank initialises every parameter, in
the same order. The price is one all-gather of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook

GroupOf = Callable[[torch.Tensor], dist.ProcessGroup]


@dataclass(frozen=True)
class MetaShard:
    """What a rank keeps of a parameter that is on the meta device.

    Attributes:
        parameter: it, with its attributes.
        flat: this rank's elements ``[ceil(numel / ranks)]``, padded with zeros.
        group: the ranks that share it.
    """

    parameter: torch.nn.Parameter
    flat: torch.Tensor
    group: dist.ProcessGroup


@contextmanager
def construction(group_of: GroupOf) -> Iterator[None]:
    """Shard the parameters of every module that becomes a part of another one in this context.

    Args:
        group_of: the ranks that have the same values of a parameter, and share it.
    """

    def shard(parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        for module in child.modules() if child is not None else ():
            _shard_module(module, group_of)

    handle = register_module_module_registration_hook(shard)
    try:
        yield
    finally:
        handle.remove()


def shard_rest(module: torch.nn.Module, group_of: GroupOf) -> None:
    """Shard what is left: parameters that ``module`` or others got after their constructor."""
    for each in module.modules():
        _shard_module(each, group_of)


def move(module: torch.nn.Module, place: torch.device) -> None:
    """Move parameters and buffers to ``place``, except those on the meta device."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(place))


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether parameters of ``module`` wait on the meta device."""
    return any(parameter.is_meta for parameter in module.parameters())


def _shard_module(module: torch.nn.Module, group_of: GroupOf) -> None:
    whole = {n: p for n, p in module.named_parameters(recurse=False) if not p.is_meta}
    if not whole:
        return
    shards = dict(getattr(module, "_shards", {}))
    for name, parameter in whole.items():
        meta = torch.nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        _describe(meta, parameter)
        group = group_of(parameter)
        shards[name] = MetaShard(meta, _own_part(parameter.detach().reshape(-1), group), group)
        module._parameters[name] = meta
    object.__setattr__(module, "_shards", shards)
    object.__setattr__(module, "reset_parameters", partial(_gather_module, module))


def _describe(parameter: torch.Tensor, like: torch.Tensor) -> None:
    """Give a parameter the attributes of another one, except those that its class has set."""
    parameter.__dict__.update({**like.__dict__, **parameter.__dict__})


def _own_part(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    length = -(-flat.numel() // group.size())
    part = flat.new_zeros(length)
    own = flat[group.rank() * length : (group.rank() + 1) * length]
    part[: own.numel()].copy_(own)
    return part


@torch.no_grad()
def _gather_module(module: Any) -> None:
    """Fill the empty parameters that Megatron-FSDP has put in the place of those on meta."""
    for name, shard in module._shards.items():
        parameter = module._parameters[name]
        _describe(parameter, shard.parameter)
        own = shard.flat.to(parameter.device)  # the group's backend may know no other device
        flat = own.new_empty(own.numel() * shard.group.size())
        dist.all_gather_into_tensor(flat, own, group=shard.group)
        parameter.copy_(flat[: parameter.numel()].view(parameter.shape))
    module._buffers.update(module._kept_buffers)
    for name in ("_shards", "_kept_buffers", "reset_parameters"):
        del module.__dict__[name]


def keep_buffers(module: torch.nn.Module) -> None:
    """Remember the buffers of modules with sharded parameters: FSDP empties them, too."""
    for each in module.modules():
        if hasattr(each, "_shards"):
            object.__setattr__(each, "_kept_buffers", dict(each._buffers))
