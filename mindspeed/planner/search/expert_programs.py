"""Programs of a mixture-of-experts layer that are worth a candidate in a layout.

    programs = ExpertPrograms(args, cluster)
    programs.reason_against(layout)         # None: its program may be the best

Programs are simulated (:mod:`mindspeed.moe.comparison`), which takes milliseconds, before any is
counted. Worth a candidate are those of the front of time and memory: no other program of the
layout is both faster and keeps less. The simulation decides nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mindspeed.flags import read
from mindspeed.instruments.clock import Link
from mindspeed.job import Precision
from mindspeed.models.model_config import ModelConfig
from mindspeed.moe.comparison import ENTRIES, LayerJob, PricedProgram, compare, rates_of
from mindspeed.moe.parted_costs import Attention
from mindspeed.moe.sizes import Sizes
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.layout import Layout
from mindspeed.planner.search.space import searched_programs
from mindspeed.profiling.model_flops import attention_products
from mindspeed.training.token_counts import model_shape

WORSE = "another expert program is faster and keeps less"


class ExpertPrograms:
    """Programs of the layouts of a job.

    Args:
        args: final values of the job, in any layout.
    """

    def __init__(self, args: argparse.Namespace, cluster: Cluster) -> None:
        self._model, self._precision = read(ModelConfig, args), Precision.of(args)
        self._products = attention_products(model_shape(args))
        device, levels = cluster.device, cluster.levels
        self._node = levels[0].size
        inside, between = (Link(x.bytes_per_second, x.latency) for x in (levels[0], levels[-1]))
        kind = self._precision.products
        self._rates = rates_of(
            device.peak(kind) * device.efficiency(kind),
            inside,
            between,
            device.memory_gbs * 1e9 * device.memory_efficiency,
        )
        self._known: dict[tuple[Sizes, int], dict[str, str]] = {}

    def reason_against(self, layout: Layout) -> str | None:
        """The reason why the program of a layout is no candidate; None: it is one."""
        if layout.expert_program is None:
            return None
        sizes = self._sizes(layout)
        if (sizes, layout.tp) not in self._known:
            self._known[sizes, layout.tp] = self._reasons(sizes, layout.tp)
        return self._known[sizes, layout.tp].get(layout.expert_program)

    def _reasons(self, sizes: Sizes, tp: int) -> dict[str, str]:
        length, tokens = self._model.seq_length, 2.0 * sizes.tokens
        found = self._products
        attention = Attention(
            tokens * found.inputs, tokens * found.per_key * length / 2, tokens * found.output
        )
        priced = compare(LayerJob(sizes, self._rates, tp, attention=attention), searched_programs())
        none = {one.name: f"expert program: {one.reason}" for one in priced if one.reason}
        return none | {name: WORSE for name in dominated(priced)}

    def _sizes(self, layout: Layout) -> Sizes:
        model = self._model
        return Sizes(
            tokens=layout.mbs * model.seq_length // (layout.tp * layout.cp),
            hidden=model.hidden_size,
            experts=model.num_experts or 0,
            topk=model.moe_router_topk,
            ffn=model.moe_ffn_hidden_size or model.ffn_hidden_size,
            ep=layout.ep,
            etp=layout.expert_tp,
            itemsize=self._precision.element,
            shared=model.moe_shared_expert_intermediate_size or 0,
            gated=model.swiglu,
            node=self._node,
        )


def dominated(priced: Sequence[PricedProgram]) -> list[str]:
    """Programs than which another is as fast and keeps as little, and better in one of both."""
    found = []
    for one in priced:
        if one.simulation is not None:  # a pair runs two micro-batches at once
            seconds = one.simulation.total / (2 if ENTRIES[one.name].pair else 1)
            found.append((seconds, one.kept, one.name))
    kept, least = list[str](), float("inf")
    for _, nbytes, name in sorted(found):
        if nbytes < least:
            kept.append(name)
            least = nbytes
    return [name for *_, name in found if name not in kept]
