"""An adapter checkpoint as files of the ``peft`` package; no model and no process group."""

from __future__ import annotations

from pathlib import Path

from mindspeed.lora import peft_write
from mindspeed.lora.config import DESCRIPTION, LoraConfig
from mindspeed.lora.load import whole_adapter
from mindspeed.models.families import family_of_args
from mindspeed.models.shape import shape_of
from mindspeed.storage.common_state import common_state


def export_peft(checkpoint: Path, folder: str | Path) -> None:
    """Write the adapter of one iteration as a PEFT directory.

    Args:
        checkpoint: Directory of the iteration.
        folder: Directory to write; an adapter not called ``default`` gets a folder in it, as PEFT
            does.

    Raises:
        ConfigError: The model has no counterpart in Hugging Face.
    """
    args = common_state(checkpoint)["args"]
    config = LoraConfig.from_json(checkpoint / DESCRIPTION)
    shape = shape_of(args)
    if config.adapter_name != "default":
        folder = Path(folder) / config.adapter_name
    base = getattr(args, "model", None) or (args.load or "").removeprefix("hf:")
    tensors = whole_adapter(checkpoint, shape)
    peft_write.write(folder, config, tensors, family_of_args(args), shape, base)
