"""Adapters from files: a checkpoint of ours, or a directory of the ``peft`` package."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed.built_model import unwrap
from mindspeed.errors import CheckpointError
from mindspeed.lora import peft
from mindspeed.lora.attach import adapted, attach
from mindspeed.lora.config import DESCRIPTION, LoraConfig, in_whole_model, is_end, is_expert
from mindspeed.lora.hf_names import shape_of_model
from mindspeed.lora.initial import take_out
from mindspeed.lora.state import base_of, check_base, sharded_state
from mindspeed.models.naming import plain_name
from mindspeed.models.shape import Shape
from mindspeed.storage import directory
from mindspeed.storage.global_tensors import GlobalTensors
from mindspeed.storage.safe_metadata import read_index

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def is_adapter(path: str | Path) -> bool:
    """Whether a directory holds an adapter: checkpoints of ours, or PEFT files."""
    return is_peft(path) or adapter_checkpoint(path) is not None


def is_peft(path: str | Path) -> bool:
    """Whether a directory holds PEFT files."""
    return (Path(path) / peft.CONFIG).is_file()


def config_of(path: str | Path) -> LoraConfig:
    """Options of the adapter in a directory.

    Args:
        path: As for :func:`load`.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    if is_peft(path):
        return peft.read(path).config
    return LoraConfig.from_json(iteration_of(path) / DESCRIPTION)


def config_of_peft(files: peft.PeftFiles, modules: list[Any]) -> LoraConfig:
    """Options of an adapter that these stages can have."""
    tied = any(module.share_embeddings_and_output_weights for module in modules)
    files.check_attached(tied_model=tied)
    return peft.attached_config(files, shape_of_model(modules[0]))


def load(chunks: Iterable[Any], path: str | Path) -> LoraConfig:
    """Load an adapter into a model; attach it first if the model has none. Collective.

    Args:
        chunks: This rank's pipeline stages, wrapped or not; the base model's weights are in them.
        path: ``--save`` of a LoRA training, one iteration of it, or a PEFT directory.

    Returns:
        Its options.

    Raises:
        CheckpointError: There is no adapter, or it belongs to another model; names the tensor. Or
            it can only be merged.
    """
    modules = unwrap(chunks)
    files = peft.read(path) if is_peft(path) else None
    config = config_of(path) if files is None else config_of_peft(files, modules)
    present = adapted(modules)
    if present is None:
        attach(modules, config)
    elif (present.r, present.scale, present.modules) != (config.r, config.scale, config.modules):
        raise CheckpointError(
            f"{path}: the adapter has rank {config.r} and scale {config.scale:g}, the flags ask "
            f"for {present.r} and {present.scale:g}; leave out --lora-r and --lora-alpha"
        )
    if files is not None:
        _load_peft(modules, files)
    else:
        _load_checkpoint(modules, iteration_of(path))
        for module in modules:
            take_out(module)
    return config


def whole_adapter(path: str | Path, shape: Shape) -> dict[str, torch.Tensor]:
    """A plain adapter's whole tensors by the names of our checkpoints; no model, no process group.

    Args:
        path: As for :func:`load`.
        shape: Sizes of the base model.

    Returns:
        A ``[r, in]`` and B ``[rows of the part, r]`` of each part, of :attr:`LoraConfig.plain`, its
        magnitudes and the trained base tensors, in the dtypes of the files.

    Raises:
        CheckpointError: There is no adapter, or it belongs to another model.
    """
    if is_peft(path):
        return peft.whole_tensors(peft.read(path), shape)
    stored = GlobalTensors(iteration_of(path))
    tensors = {key: stored.read(key, ()) for key in stored if is_weight(key)}
    for key in [key for key in tensors if ".lora_initial_" in key]:
        first = tensors.pop(key)
        own, down = key.replace(".lora_initial_", ".lora_"), ".lora_initial_A." in key
        tensors[own] = torch.cat((tensors[own], first if down else -first), 0 if down else 1)
    return tensors


def samples_of(path: str | Path) -> dict[str, list[float]]:
    """The numbers of its base model that an adapter remembers; PEFT's remember none."""
    return {} if is_peft(path) else base_of(iteration_of(path) / DESCRIPTION)


def adapter_checkpoint(path: str | Path) -> Path | None:
    """Directory of the latest iteration below ``path`` that holds an adapter."""
    path = Path(path)
    if (path / DESCRIPTION).is_file():
        return path
    found = (c for c in directory.candidates(path) if directory.problem_with(c) is None)
    latest = next(found, None)
    return latest if latest is not None and (latest / DESCRIPTION).is_file() else None


def check_adapter(modules: Iterable[Any], path: Path, tensors: Iterable[Any] | None = None) -> None:
    """See that an adapter checkpoint belongs to a model with adapters.

    Args:
        modules: This rank's pipeline stages, without wrappers.
        path: Directory of one iteration.
        tensors: Names and shapes of the adapters where the stages do not have them whole.

    Raises:
        CheckpointError: It was trained on another base or with other targets; names the tensor.
    """
    check_base(modules, path / DESCRIPTION)
    there = read_index(path).state_dict_metadata
    if tensors is None:
        tensors = [t for module in modules for t in sharded_state(module).values()]
    for tensor in tensors:
        if ".lora_" in tensor.key:
            _check_tensor(tensor.key, tuple(tensor.global_shape), there, path)
    for module in modules:
        for key in there:
            found = _LAYER.match(key)
            if found and ".lora_" in key and int(found[1]) >= module.config.num_layers:
                raise CheckpointError(
                    f"{path} is an adapter of another model: it has {key}, the model has "
                    f"{module.config.num_layers} layers"
                )


def _check_tensor(key: str, shape: tuple[int, ...], there: Mapping[str, Any], path: Path) -> None:
    found = tuple(there[key].size) if key in there else None
    if is_end(key) and found is not None and found[1:] == shape[1:]:
        return  # the vocabulary is padded otherwise
    if found != shape:
        what = "does not have it" if found is None else f"has it with shape {list(found)}"
        raise CheckpointError(
            f"{path} is an adapter of another model or with other targets: the model needs "
            f"{key} {list(shape)}, the adapter {what}"
        )


def iteration_of(path: str | Path) -> Path:
    """Directory of the latest iteration of an adapter of ours.

    Raises:
        CheckpointError: There is none.
    """
    found = adapter_checkpoint(path)
    if found is None:
        raise CheckpointError(
            f"{path} holds no adapter: neither {peft.CONFIG} (PEFT) nor a checkpoint with "
            f"{DESCRIPTION}"
        )
    return found


def is_weight(key: str) -> bool:
    """Whether a tensor of an adapter checkpoint is one of the model, not of the optimizer."""
    return key.startswith(("decoder.", "embedding.", "output_layer.", "score.", "mtp."))


@torch.no_grad()
def _load_peft(modules: list[Any], files: peft.PeftFiles) -> None:
    from megatron.core import parallel_state

    for module in modules:
        tensors = peft.whole_tensors(files, shape_of_model(module), own_scales=True)
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            key = plain_name(in_whole_model(module, name))
            if key not in tensors:
                raise CheckpointError(f"{files.folder}: there is nothing for {key}")
            if is_expert(key):
                rank = parallel_state.get_expert_tensor_parallel_rank()
            else:
                rank = parallel_state.get_tensor_model_parallel_rank()
            # Padding of the vocabulary has no length there.
            _copy_slice(parameter, tensors[key].nan_to_num(0), rank)


def _copy_slice(parameter: Any, whole: torch.Tensor, rank: int) -> None:
    """Copy a tensor-parallel rank's slice; padding rows that ``whole`` lacks stay."""
    if not getattr(parameter, "tensor_model_parallel", False):
        parameter.copy_(whole)
        return
    dim, size = parameter.partition_dim, parameter.shape[parameter.partition_dim]
    first = rank * size
    mine = whole.narrow(dim, first, max(0, min(size, whole.shape[dim] - first)))
    parameter.narrow(dim, 0, mine.shape[dim]).copy_(mine)


@torch.no_grad()
def _load_checkpoint(modules: list[Any], path: Path) -> None:
    from mindspeed.storage.sharded_load import read_sharded  # loads megatron.core

    check_adapter(modules, path)
    states = {str(index): sharded_state(module) for index, module in enumerate(modules)}
    loaded = read_sharded(states, path)
    for index, module in enumerate(modules):
        module.load_state_dict(loaded.get(str(index), {}), strict=False)
