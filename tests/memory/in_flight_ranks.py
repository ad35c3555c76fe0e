"""Jobs for ranks: Megatron's pipeline schedules run with empty steps; what they hold is noted."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch

Case = tuple[int, int | None, int, int | None]


def counted_and_run(cases):
    """For each stage of each case, the counts of the formula and those of the schedule that ran."""
    from mindspeed.memory.megatron_in_flight import held_by_stage

    return {
        (case, stage): (held_by_stage(stage, case[2], _config(case)), _run(case, stage))
        for case in cases
        for stage in range(case[0])
    }


def _config(case: Case):
    from megatron.core.transformer import TransformerConfig

    stages, chunks, _, group = case
    return TransformerConfig(
        num_layers=stages * (chunks or 1),
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        microbatch_group_size_per_vp_stage=group,
        pipeline_dtype=torch.float32,
    )


def _run(case: Case, stage: int):
    """Every state (micro-batches held of each chunk) right after a forward step."""
    from megatron.core.pipeline_parallel import schedules

    stages, chunks, micro_batches, _ = case
    held, seen = [0] * (chunks or 1), set()

    def forward(*args, vp_stage=0, **kwargs):
        held[vp_stage] += 1
        seen.add(tuple(held))
        return [vp_stage], 0

    def backward(received, sent, *args):
        held[sent[0]] -= 1

    group = SimpleNamespace(size=lambda: stages, rank=lambda: stage)
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    config = _config(case)
    links = mock.MagicMock(
        pp_group=group, virtual_pipeline_model_parallel_size=chunks, config=config
    )
    links.send_forward_backward_recv_forward_backward.return_value = (None, None)
    models = [torch.nn.Module() for _ in range(chunks or 1)]
    for model in models:
        model.config, model.model_type = config, None
    run = (
        schedules.forward_backward_pipelining_with_interleaving
        if chunks
        else schedules.forward_backward_pipelining_without_interleaving
    )
    with mock.patch.multiple(schedules, forward_step=forward, backward_step=backward):
        run(
            forward_step_func=None,
            data_iterator=[None] * len(models),
            model=models,
            num_microbatches=micro_batches,
            seq_length=8,
            micro_batch_size=1,
            p2p_communicator=links,
            pg_collection=SimpleNamespace(
                tp=one, cp=one, embd=one, pos_embd=one, pp=group, dp_cp=one
            ),
        )
    assert not any(held)
    return frozenset(seen)
