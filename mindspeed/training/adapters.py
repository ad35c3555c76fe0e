"""Adapters in a training run: loading the base model and the adapters, and resuming.

--load BASE                      weights of the frozen model, of any format --load takes
--lora-target-modules ...        new adapters
--lora-load ADAPTER              adapters of a checkpoint (its optimizer and iteration too), or
                                 of a PEFT directory; its targets, rank and alpha as well
--save OUT                       holds the adapters only
"""

from __future__ import annotations

import argparse

from mindspeed.built_model import BuiltModel, TrainedModel
from mindspeed.checkpoint.fsdp_state import is_sharded
from mindspeed.checkpoint.load import Loaded, load
from mindspeed.lora.load import is_peft
from mindspeed.lora.load import load as load_adapter
from mindspeed.storage.directory import root_and_iteration


def load_base(args: argparse.Namespace, model: BuiltModel) -> None:
    """Load the frozen model, and adapters that come without an optimizer. Collective."""
    base = argparse.Namespace(**vars(args))
    base.finetune = base.exit_on_missing_checkpoint = True
    load(base, model)
    if args.lora_load is not None and is_peft(args.lora_load):
        load_adapter(model.chunks, args.lora_load, train=True)


def resume(args: argparse.Namespace, model: TrainedModel) -> Loaded | None:
    """Load the frozen model, then the adapters of ``--lora-load``. Collective.

    Returns:
        Where training continues; None if the adapters are new.
    """
    if not is_sharded(model.chunks[0]):  # there it was loaded while it was whole
        load_base(args, model)
        model.optimizer.reload_model_params()
    if args.lora_load is None or is_peft(args.lora_load):
        return None
    own = argparse.Namespace(**vars(args))
    own.load, own.ckpt_step = root_and_iteration(args.lora_load)
    own.exit_on_missing_checkpoint = True
    return load(own, model, adapter=True)
