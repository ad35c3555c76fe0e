"""No fp32 copies of 16-bit gradients: ``--release-fp32-grad``.

Where gradients are accumulated in 16 bits (fp16 training, or bf16 with ``--grad-reduce-in-bf16`` or
``--main-grads-dtype bf16``), Megatron casts all of them to fp32 before the update: 4 bytes per
parameter, 4 / DP with the distributed optimizer. Here the update reads them where they are. It
unscales and clips in fp32, in Megatron's order, so weights are the same bits, and a step with an
overflow changes nothing.

With gradients in fp32 there is no copy, and the flag is refused rather than ignored: who adds it to
save memory should hear that it saves none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed.features.feature import Feature, Megatron, Option, Problem
from mindspeed.features.optimizer import precision_aware
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


class ReleaseFp32Grad(
    Feature,
    level=2,
    seams=precision_aware.SEAMS,
    options=(
        Option(
            "memory",
            "grad-reduce-in-bf16",
            {
                "grad_reduce_in_bf16": True,
                "accumulate_allreduce_grads_in_fp32": None,
                "release_fp32_grad": True,
            },
            "gradients are kept and reduced in bf16, which rounds their sums",
            faster=True,
            exact=False,
        ),
    ),
):
    """The update reads 16-bit gradients, without fp32 copies."""

    release_fp32_grad: bool = flag(False, "update from 16-bit gradients, without fp32 copies")

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        name = "--release-fp32-grad"
        yield from precision_aware.problems(name, megatron)
        if not precision_aware.is_narrow(megatron):
            yield Problem(
                name, "gradients of fp32 training have no copies", "add --fp16, or drop it"
            )
        elif megatron.get("accumulate_allreduce_grads_in_fp32") and not megatron.get("quant_grads"):
            narrow = "--grad-reduce-in-bf16" if megatron.get("bf16") else "16-bit gradients"
            yield Problem(
                name,
                "has no effect: gradients are accumulated in fp32, which needs no copies",
                f"drop it, or accumulate in 16 bits ({narrow}, without "
                "--accumulate-allreduce-grads-in-fp32)",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        precision_aware.attach(seams, self.name)
