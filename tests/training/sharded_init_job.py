"""Builds a model with ZeRO 2 or 3 and counts bytes: functions for the ranks of a pool."""

from __future__ import annotations

import os
from typing import Any

from tests.support.trainer_job import command


def build(flags: str, whole: bool) -> dict[str, Any]:
    """Build model and optimizer on this rank, and take one step.

    Args:
        flags: added to the tiny model's.
        whole: as if something needed the stage before it is sharded.

    Returns:
        ``weights`` in bytes, those of the ``largest`` module, and those ``kept`` of them if ranks
        share what they have in common; live bytes:
        ``modules``: most while modules were built; ``build``: most until the optimizer was there;
        ``training``: after a step. ``shards``: this rank's weights.
    """
    import torch

    from mindspeed import session
    from mindspeed.checkpoint import fsdp_state
    from mindspeed.cli.pretrain import _prepare
    from mindspeed.device import track_memory
    from mindspeed.training import model as builder
    from mindspeed.training import setup

    args = _prepare(command(flags.split()), int(os.environ["WORLD_SIZE"])).args
    session.install().configure(args)
    setup.initialize(args)
    if whole:
        builder._never_whole = lambda args: False
    sizes: dict[str, int] = {}
    plain = builder.build_modules

    def build_modules(*given: Any, **named: Any) -> Any:
        modules = plain(*given, **named)
        own = [sum(p.nbytes for p in m.parameters(recurse=False)) for m in modules[0].modules()]
        kept = sum(p.nbytes / builder._replicas(p).size() for p in modules[0].parameters())
        sizes.update(weights=sum(own), largest=max(own), kept=int(kept), modules=memory.peak)
        return modules

    builder.build_modules = build_modules
    with track_memory() as memory:
        model = builder.build(args)
        sizes["build"] = memory.peak
        groups = model.chunks[0].param_and_grad_buffer.parameter_groups
        held = fsdp_state._fsdp_shards(model.chunks[0])  # not the buffers: they have padding
        shards = [held[name].weights.float().flatten() for name in sorted(held)]
        for group in groups:
            group.main_grad_buffer.data.fill_(1e-3)
        model.chunks[0].module.param_and_grad_buffer.update_main_grads()
        model.optimizer.step()
        sizes["training"] = memory.current
    return {**sizes, "shards": torch.cat(shards).numpy()}
