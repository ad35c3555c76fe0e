"""Steps of models by schedules that divide backward, compared with Megatron's own schedules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed.pipeline.schedule.weight_gradients import WeightGradients
from tests.pipeline.schedule import step_ranks
from tests.pipeline.schedule.step_ranks import SEQUENCE, VOCABULARY, Layout, Model


@dataclass(frozen=True)
class Case:
    """A model, and plans of it.

    Attributes:
        layout: of the model.
        runs: (number of micro-batches, fields of ``ScheduleRequest``).
        mtp: layers of multi-token prediction.
    """

    layout: Layout
    runs: tuple[tuple[int, dict[str, Any]], ...] = ((4, {"kind": "nanopipe"}),)
    mtp: int = 0


@dataclass(frozen=True)
class Found:
    """What differs, and what the store of this rank did in the last run.

    Attributes:
        different: from Megatron's own schedule.
        deferred: weight gradients that were computed in a W.
        peak: most bytes of pending weight gradients.
        copied: bytes to the host, and back.
    """

    different: list[str] = field(default_factory=list)
    deferred: int = 0
    peak: int = 0
    copied: tuple[int, int] = (0, 0)


class DividedModel(Model):
    """A model whose layers may divide backward, in both specs, with experts and further heads."""

    def __init__(self, case: Case) -> None:
        from mindspeed.memory.stash_swap import StashSwap

        self.case, self.store = case, WeightGradients(StashSwap(min_bytes=1))
        super().__init__(case.layout)

    def _chunk(self, stage: int | None) -> torch.nn.Module:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_decoder_block_spec,
            get_gpt_mtp_block_spec,
        )

        from mindspeed.te.split_backward import split

        te = self.layout.spec == "te"
        spec = get_gpt_decoder_block_spec(
            self.config, use_transformer_engine=te, normalization="RMSNorm", vp_stage=stage
        )
        mtp = None
        if self.case.mtp:
            mtp = get_gpt_mtp_block_spec(self.config, spec, te, vp_stage=stage)
        ends = {"ignore_virtual": False, "vp_stage": stage}
        model = GPTModel(
            self.config,
            spec,
            VOCABULARY,
            SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),
            post_process=parallel_state.is_pipeline_last_stage(**ends),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            mtp_block_spec=mtp,
            vp_stage=stage,
        )
        split(self.store, model, self.config, stage)
        return model


def compare(cases: dict[str, Case]) -> dict[str, Found]:
    """Every run of every case against Megatron's schedule."""
    from mindspeed.megatron_adaptor import repatch

    repatch({"moe_grouped_gemm": True})
    return {name: _compare(case) for name, case in cases.items()}


def _compare(case: Case) -> Found:
    from mindspeed.pipeline.schedule.megatron import scheduled

    model = DividedModel(case)
    found, store = [], model.store
    figures = store.swap.figures
    for m, changes in case.runs:
        expected = model.step(m)
        deferred, out, back = store.computed, figures.copied_out, figures.copied_in
        store.peak_bytes = 0
        step = model.step(m, scheduled(None, **changes))
        found += [f"{changes}: {text}" for text in step_ranks.differences(step, expected)]
    copied = figures.copied_out - out, figures.copied_in - back
    return Found(found, store.computed - deferred, store.peak_bytes, copied)
