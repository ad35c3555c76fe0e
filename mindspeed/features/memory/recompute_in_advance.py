"""``--recompute-in-advance``: recomputation does not wait for the gradient that needs it.

Layers that ``--recompute-granularity full --recompute-method block`` recomputes get their
activations back while the gradient from the next stage is on its way
(:mod:`mindspeed.pipeline.schedule.recompute`), not after it has arrived. The last stage computes
its own gradient right after its forward, so it stores its layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.features.memory import scheduled_recomputation as shared
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

_FLAG = "--recompute-in-advance"


class RecomputeInAdvance(
    Feature,
    level=2,
    page="features/recompute-in-bubble.md",
    megatron_versions=">=0.15",
    seams=("chunk", "schedule"),
    conflicts=("recompute-in-bubble",),
    excludes=shared.EXCLUDES,
    after=("pipeline-schedule", "nanopipe", "recompute-layers-per-pp-rank"),
    planning=("changes layers", "needs steps"),
):
    """Layers are recomputed before the gradient from the next pipeline stage arrives."""

    recompute_in_advance: bool = flag(
        False, "recompute layers before the gradient from the next stage arrives"
    )

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        return {"recompute_granularity": None}

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        chunks = "with one, a rank has nothing to do while it waits for a gradient"
        yield from shared.problems_of(_FLAG, "advance", megatron, chunks=chunks)
        for name, wanted in (("recompute_granularity", "full"), ("recompute_method", "block")):
            if (given := megatron.get(name)) != wanted:
                other = "--" + name.replace("_", "-")
                yield Problem(
                    _FLAG,
                    f"needs {other} {wanted}, " + (f"not {given}" if given else "not given"),
                    f"add {other} {wanted}, or remove it",
                )
        if not (number := megatron.get("recompute_num_layers")) or number < 0:
            yield Problem(
                _FLAG,
                "needs --recompute-num-layers of at least 1, "
                + ("not given" if number is None else f"not {number}"),
                "say how many layers of every model chunk are recomputed",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        number = megatron.get("recompute_num_layers")
        shared.attach_recomputation(seams, self.name, _FLAG, megatron, "advance", number)
