"""What a directory holds: one answer for every command that takes one.

    DIR/config.json and weights                              a Hugging Face model
    DIR/iter_0000100, DIR/release, or such a directory       a checkpoint: torch_dist,
                                                             legacy (DeepSpeed's, too), safetensors
    DIR/adapter_config.json, or a checkpoint with adapter.json   a LoRA adapter

A directory that a command cannot use is refused with what to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed.checkpoint.weights.rank_files import is_legacy
from mindspeed.checkpoint.weights.safetensors_files import ARGS
from mindspeed.errors import CheckpointError
from mindspeed.lora import peft
from mindspeed.lora.config import DESCRIPTION
from mindspeed.models.hf_files import CONFIG
from mindspeed.models.hf_load import folder_of, is_hf
from mindspeed.storage import directory
from mindspeed.unpickle import check_relative

Kind = Literal["hf", "torch_dist", "legacy", "safetensors", "adapter", "peft", "nothing"]
WHOLE_WEIGHTS: tuple[Kind, ...] = ("legacy", "safetensors")
NAMES: Mapping[Kind, str] = {
    "hf": "a Hugging Face model",
    "torch_dist": "torch_dist checkpoints",
    "legacy": "legacy checkpoints",
    "safetensors": "safetensors checkpoints",
    "adapter": "a LoRA adapter",
    "peft": "a LoRA adapter of PEFT",
    "nothing": "no model",
}
DEEPSPEED_TRACKER = "latest"


@dataclass(frozen=True)
class Contents:
    """What a directory holds.

    Attributes:
        folder: The directory.
        kind: What is in it.
        checkpoint: Directory of the iteration that is meant; the directory itself where it has
            none, None where it holds nothing.
    """

    folder: Path
    kind: Kind
    checkpoint: Path | None

    @property
    def has_whole_weights(self) -> bool:
        """Whether it has weights that Megatron's ``torch_dist`` code cannot read."""
        return self.kind in WHOLE_WEIGHTS


def contents_of(folder: str | Path, step: int | None = None) -> Contents:
    """Recognise a directory by its files; reads none of them but trackers.

    Args:
        folder: The directory, without ``hf:``.
        step: Iteration; None for the latest.
    """
    folder = Path(folder)
    model, adapter = (folder / CONFIG).is_file(), (folder / peft.CONFIG).is_file()
    if adapter and not (model and _has_weights(folder)):
        return Contents(folder, "peft", folder)
    if model:
        return Contents(folder, "hf", folder)
    checkpoint = _checkpoint(folder, step)
    if checkpoint is None:
        return Contents(folder, "nothing", None)
    if (checkpoint / DESCRIPTION).is_file():
        kind: Kind = "adapter"
    elif is_legacy(checkpoint):
        kind = "legacy"
    else:
        kind = "safetensors" if (checkpoint / ARGS).is_file() else "torch_dist"
    return Contents(folder, kind, checkpoint)


def model_at(load: str, step: int | None = None) -> Contents:
    """What ``--load`` names; a model, or nothing.

    Args:
        load: A directory of checkpoints, or ``hf:DIR``.
        step: Iteration; None for the latest.

    Raises:
        CheckpointError: It is something else than it is called; says what to write.
    """
    found = contents_of(folder_of(load), step)
    if is_hf(load):
        if found.kind == "hf":
            return found
        if found.kind not in ("adapter", "peft", "nothing"):
            raise CheckpointError(
                f"--load {load}: {found.folder} holds {NAMES[found.kind]}, no Hugging Face model; "
                f"write --load {found.folder}"
            )
        if found.kind == "nothing":
            raise CheckpointError(
                f"--load {load}: {found.folder} is no Hugging Face model: it has no {CONFIG}"
            )
    elif found.kind == "hf":
        raise CheckpointError(f"--load {load} is a Hugging Face model; write --load hf:{load}")
    refuse_adapter(found, "--load")
    return found


def refuse_adapter(found: Contents, flag: str) -> None:
    """Raise if a directory that should hold a model holds an adapter.

    Args:
        found: The directory.
        flag: What it was given to.

    Raises:
        CheckpointError: Names the command that merges it.
    """
    if found.kind in ("adapter", "peft"):
        raise CheckpointError(
            f"{flag} {found.folder} holds {NAMES[found.kind]}: give its base model to --load and "
            "this directory to --lora-load, or merge them: "
            f"mindspeed merge-lora --load BASE --lora-load {found.folder} --save MERGED"
        )


def _checkpoint(folder: Path, step: int | None) -> Path | None:
    """The checkpoint that a path names: itself, or the latest one in it; None if there is none."""
    if is_legacy(folder) or any((folder / name).is_file() for name in (ARGS, ".metadata")):
        return folder
    for candidate in directory.candidates(folder, step):
        if candidate.is_dir():
            return candidate
    tracker = folder / DEEPSPEED_TRACKER
    if tracker.is_file():
        name = tracker.read_text("utf-8", errors="replace").strip()
        named = folder / check_relative(name, str(tracker))
        if name and named.is_dir():
            return named
    return None


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
