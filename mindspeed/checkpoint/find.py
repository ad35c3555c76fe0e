"""Which checkpoint ``--load`` names, and the values of the run that wrote it."""

from __future__ import annotations

import argparse
from pathlib import Path

from mindspeed.checkpoint.load_weights import in_another_format
from mindspeed.checkpoint.weights.convert import open_weights
from mindspeed.checkpoint.weights.hugging_face import model_config
from mindspeed.errors import CheckpointError
from mindspeed.models.hf_load import folder_of, is_hf
from mindspeed.storage import directory
from mindspeed.storage.common_state import common_state


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


def saved_args(root: str, step: int | None = None) -> argparse.Namespace:
    """The values of the run that wrote the latest good checkpoint. Reads one file, on any rank.

    Of ``hf:DIR``, values that describe the model there.

    Raises:
        CheckpointError: there is none.
    """
    if is_hf(root):
        return model_config(folder_of(root)).namespace()
    if (other := in_another_format(root, step)) is not None:
        return open_weights(other).args
    return common_state(latest(root, step))["args"]
