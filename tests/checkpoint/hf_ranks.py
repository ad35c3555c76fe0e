"""Weights of a model in any layout, as parts of the whole, loaded from what ``--load`` names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from models import model_ranks


def weights(folder: str, load: str, flags: Sequence[str] = ()) -> list[tuple[Any, ...]]:
    """(name, offset, tensor) of each local tensor after loading ``load``."""
    import torch.distributed as dist

    from mindspeed.checkpoint.load import load as load_checkpoint
    from mindspeed.models.families import family_of_args
    from mindspeed.models.hf_load import parts
    from mindspeed.models.shape import shape_of
    from mindspeed.training import setup
    from mindspeed.training.model import build

    words = (*flags, f"--load={load}", "--exit-on-missing-checkpoint")
    args = model_ranks.resolved(folder, words, dist.get_world_size())
    setup.initialize(args)
    model = build(args)
    loaded = load_checkpoint(args, model)
    assert loaded is not None and loaded.iteration == 0
    table = parts(model.modules, family_of_args(args), shape_of(args))
    return [(part.parameter.name, part.start, part.data.clone()) for part in table]


def save_trained(folder: str, output: str, flags: Sequence[str] = ()) -> None:
    """Load a directory, change every weight, save as a run does."""
    import torch.distributed as dist

    from mindspeed.checkpoint.load import load as load_checkpoint
    from mindspeed.checkpoint.save import Saver
    from mindspeed.training import setup
    from mindspeed.training.model import build

    words = (*flags, f"--load=hf:{folder}", f"--save={output}", "--finetune")
    args = model_ranks.resolved(folder, words, dist.get_world_size())
    setup.initialize(args)
    model = build(args)
    load_checkpoint(args, model)
    with torch.no_grad():
        for module in model.modules:
            for parameter in module.parameters():
                parameter.mul_(1.5)
    Saver(args, model, "", 1.0).save(3, last=True)
