"""Trains with optimizer states stored elsewhere or otherwise: functions for the ranks of a pool."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.trainer_job import command, digest


def train_and_count(flags: Sequence[str]) -> dict[str, Any]:
    """Train on this rank.

    Returns:
        ``digest`` of the parameters, ``numel`` of this rank's shards, bytes of states on the
        ``device`` and on the ``host``, ``rows`` of the shards' parameters, ``ema``: whether each
        average differs from its weight; ``copied`` and ``peak`` of the swap space.
    """
    from mindspeed import session
    from mindspeed.cli.pretrain import _prepare
    from mindspeed.errors import MindSpeedError
    from mindspeed.optimizer.cadam import rows_of
    from mindspeed.training.model import gpt_model
    from mindspeed.training.pretrain import pretrain

    modules: list[Any] = []
    optimizers: list[Any] = []

    def provider(*given: Any) -> Any:
        modules.append(gpt_model(*given))
        return modules[-1]

    def seen(optimizer: Any) -> Any:
        optimizers.append(optimizer)
        return optimizer

    try:
        settings = _prepare(command(flags), int(os.environ["WORLD_SIZE"]))
        session.install().seams.optimizer.add(seen, owner="test")
        pretrain(settings, provider)
    except MindSpeedError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    (chain,) = optimizers
    (inner,) = [part.optimizer for part in getattr(chain, "chained_optimizers", [chain])]
    params = [p for group in inner.param_groups for p in group["params"]]
    host = [
        tensor.nbytes
        for p in params
        for name, tensor in inner.state[p].items()
        if inner._placements[name] is not None
    ]
    space = inner._swap
    return {
        "error": None,
        "digest": digest(modules),
        "numel": sum(p.numel() for p in params),
        "rows": sum(rows_of(p).count(p.numel()) for p in params),
        "host": sum(host),
        "device": inner.state_bytes() - sum(host),
        "copied": space and (space.figures.to_device, space.figures.to_host),
        "peak": space and space.figures.peak,
    }


def stored_averages(folder: str) -> dict[str, Any]:
    """The averages in a checkpoint by the names of their parameters, fp32."""
    from megatron.core import dist_checkpointing

    prefix = "optimizer.state.ema_params."
    state = dist_checkpointing.load_plain_tensors(str(Path(folder)))
    return {
        name.removeprefix(prefix): tensor.numpy()
        for name, tensor in state.items()
        if name.startswith(prefix)
    }
