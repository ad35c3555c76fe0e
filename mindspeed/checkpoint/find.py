"""The checkpoint that ``--load`` names, and the values of the run that wrote it."""

from __future__ import annotations

import argparse
from pathlib import Path

from mindspeed.checkpoint.contents import model_at
from mindspeed.checkpoint.weights.convert import open_weights
from mindspeed.checkpoint.weights.hugging_face import model_config
from mindspeed.errors import CheckpointError
from mindspeed.storage import directory
from mindspeed.storage.safe_metadata import common_state


def latest(root: str, step: int | None = None) -> Path:
    """Directory of the latest good checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    tried = {}
    for path in directory.candidates(root, step):
        reason = directory.problem_with(path)
        if reason is None:
            return path
        tried[path] = reason
    directory.require_some(root, tried)
    raise CheckpointError(f"--load {root}: there is no checkpoint")


def model_path(load: str, step: int | None = None) -> Path:
    """Directory with the files of the model that ``--load`` names, in any format.

    Raises:
        CheckpointError: There is none.
    """
    found = model_at(load, step)
    if found.checkpoint is None or found.kind == "torch_dist":
        return latest(load, step)
    return found.checkpoint


def saved_args(load: str, step: int | None = None) -> argparse.Namespace:
    """The values of the run that wrote the latest good checkpoint. Reads one file, on any rank.

    Of a Hugging Face directory, values that describe the model there.

    Raises:
        CheckpointError: there is none.
    """
    found = model_at(load, step)
    if found.kind == "hf":
        return model_config(str(found.folder)).namespace()
    if found.has_whole_weights and found.checkpoint is not None:
        return open_weights(found.checkpoint).args
    return common_state(latest(load, step))["args"]
