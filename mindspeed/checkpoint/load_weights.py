"""Weights from files that are no ``torch_dist`` checkpoint: Hugging Face, legacy, safetensors.

They hold a whole model without an optimizer. Each rank reads the rows and columns of its shards.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from mindspeed.adaptor.printing import print_rank_0
from mindspeed.built_model import BuiltModel, TrainedModel
from mindspeed.checkpoint.architecture import check_architecture
from mindspeed.checkpoint.contents import model_at
from mindspeed.checkpoint.weights.convert import open_weights
from mindspeed.errors import CheckpointError
from mindspeed.models.hf_load import folder_of, load_hf, local_shards
from mindspeed.models.shape import shape_of
from mindspeed.models.weight_source import TransformedWeights


def needs_whole_stages(args: argparse.Namespace) -> bool:
    """Whether ``--load`` must be read before FSDP shards the stages: it is no ``torch_dist``."""
    found = model_at(args.load, args.ckpt_step)
    return found.kind == "hf" or found.has_whole_weights


def load_weights(args: argparse.Namespace, model: BuiltModel) -> Path | None:
    """Load the weights of ``--load``. Collective.

    Returns:
        Where they were read; None if ``--load`` is a ``torch_dist`` checkpoint, or nothing.

    Raises:
        CheckpointError: They belong to another model, or a tensor is missing.
    """
    found = model_at(args.load, args.ckpt_step)
    if found.kind == "hf":
        path = _load_hf(args, model)
    elif found.has_whole_weights and found.checkpoint is not None:
        path = _load_whole_weights(args, model, found.checkpoint)
    else:
        return None
    if isinstance(model, TrainedModel):
        model.optimizer.reload_model_params()
    return path


def _load_hf(args: argparse.Namespace, model: BuiltModel) -> Path:
    folder = folder_of(args.load)
    unused = load_hf(args, model.modules, folder)
    note = f"; not used: {', '.join(unused[:5])}" if unused else ""
    print_rank_0(f" loaded {folder} (Hugging Face){note}")
    return Path(folder)


@torch.no_grad()
def _load_whole_weights(args: argparse.Namespace, model: BuiltModel, checkpoint: Path) -> Path:
    """Read one parameter at a time, whatever the parallel sizes of the files."""
    source = open_weights(checkpoint)
    check_architecture(args, source.args, str(checkpoint))
    weights = TransformedWeights(source, padded_vocab=args.padded_vocab_size)
    table = {parameter.name: parameter for parameter in weights.table}
    for part in local_shards(model.modules, source.family, shape_of(args)):
        if part.parameter.name not in table:  # of multi-token prediction
            raise CheckpointError(
                f"{checkpoint} has no {part.parameter.name}; leave out --mtp-num-layers"
            )
        whole = weights.read(table[part.parameter.name])
        bounds = zip(part.start, part.data.shape, strict=True)
        part.data.copy_(whole[tuple(slice(first, first + size) for first, size in bounds)])
    print_rank_0(f" loaded {checkpoint} (weights only)")
    return checkpoint
