"""Adapters from files: a checkpoint of ours, or a directory of the ``peft`` package."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from mindspeed.checkpoint import directory
from mindspeed.checkpoint.untrusted import read_index
from mindspeed.errors import CheckpointError
from mindspeed.lora import peft
from mindspeed.lora.attach import adapted, attach, bare
from mindspeed.lora.config import DESCRIPTION, LoraConfig
from mindspeed.lora.state import check_base, sharded_state


def is_adapter(path: str | Path) -> bool:
    """Whether a directory holds an adapter: checkpoints of ours, or PEFT files."""
    return is_peft(path) or adapter_checkpoint(path) is not None


def is_peft(path: str | Path) -> bool:
    """Whether a directory holds PEFT files."""
    return (Path(path) / peft.CONFIG).is_file()


def config_of(path: str | Path) -> LoraConfig:
    """Options of the adapter in a directory.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    if is_peft(path):
        return peft.read(path).config
    return LoraConfig.from_json(_checkpoint(path) / DESCRIPTION)


def load(chunks: Iterable[Any], path: str | Path) -> LoraConfig:
    """Load an adapter into a model; attach it first if the model has none. Collective.

    Args:
        chunks: This rank's pipeline stages, wrapped or not; the base model's weights are in them.
        path: ``--save`` of a LoRA training, one iteration of it, or a PEFT directory.

    Returns:
        Its options.

    Raises:
        CheckpointError: There is no adapter, or it belongs to another model; names the tensor.
    """
    modules = bare(chunks)
    config = config_of(path)
    present = adapted(modules)
    if present is None:
        attach(modules, config)
    elif (present.r, present.scale) != (config.r, config.scale):
        raise CheckpointError(
            f"{path}: the adapter has rank {config.r} and scale {config.scale:g}, the flags ask "
            f"for {present.r} and {present.scale:g}; leave out --lora-r and --lora-alpha"
        )
    if is_peft(path):
        peft.fill(modules, peft.read(path))
    else:
        _load_checkpoint(modules, _checkpoint(path))
    return config


def adapter_checkpoint(path: str | Path) -> Path | None:
    """Directory of the latest iteration below ``path`` that holds an adapter."""
    path = Path(path)
    if (path / DESCRIPTION).is_file():
        return path
    found = (c for c in directory.candidates(path) if directory.problem_with(c) is None)
    latest = next(found, None)
    return latest if latest is not None and (latest / DESCRIPTION).is_file() else None


def check_tensors(state: dict[str, Any], path: Path) -> None:
    """Compare what a model wants with what an adapter checkpoint has.

    Raises:
        CheckpointError: A tensor is missing, too many or of another shape.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    wanted = {t.key: t.global_shape for t in state.values() if isinstance(t, ShardedTensor)}
    there = read_index(path).state_dict_metadata
    for key, shape in wanted.items():
        if ".lora_" not in key:
            continue
        found = tuple(there[key].size) if key in there else None
        if found != tuple(shape):
            what = "does not have it" if found is None else f"has it with shape {list(found)}"
            raise CheckpointError(
                f"{path} is an adapter of another model or with other targets: the model needs "
                f"{key} {list(shape)}, the adapter {what}"
            )


def _checkpoint(path: str | Path) -> Path:
    found = adapter_checkpoint(path)
    if found is None:
        raise CheckpointError(
            f"{path} holds no adapter: neither {peft.CONFIG} (PEFT) nor a checkpoint with "
            f"{DESCRIPTION}"
        )
    return found


@torch.no_grad()
def _load_checkpoint(modules: list[Any], path: Path) -> None:
    from megatron.core import dist_checkpointing

    check_base(modules, path / DESCRIPTION)
    states = {str(index): sharded_state(module) for index, module in enumerate(modules)}
    for state in states.values():
        check_tensors(state, path)
    loaded = dist_checkpointing.load(states, str(path))
    for index, module in enumerate(modules):
        module.load_state_dict(loaded.get(str(index), {}), strict=False)
