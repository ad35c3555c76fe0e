"""What tests of pipelines with small GPT models share, inside rank processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

VOCABULARY, SEQUENCE, BATCH = 32, 8, 2


def micro_batches(count: int, seed: int = 5) -> list[torch.Tensor]:
    """Tokens ``[b, s]`` of micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(VOCABULARY, (count, BATCH, SEQUENCE), generator=generator))


def stage_of(vp_stage: int | None) -> dict[str, Any]:
    """Arguments of ``GPTModel`` that say which stage of Megatron's loop a chunk is."""
    from megatron.core import parallel_state

    ends = {"ignore_virtual": False, "vp_stage": vp_stage}
    return {
        "pre_process": parallel_state.is_pipeline_first_stage(**ends),
        "post_process": parallel_state.is_pipeline_last_stage(**ends),
        "vp_stage": vp_stage,
    }


def forward_step(reader: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """Megatron's ``forward_step_func``, whose labels are the tokens that follow."""
    tokens = next(reader)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    output = model(tokens, positions, mask, labels=tokens.roll(-1, 1))
    return output, partial(mean_loss)


def mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and what is reported of it: schedules divide the loss in place."""
    loss = output.mean()
    return loss, loss.detach().clone()
