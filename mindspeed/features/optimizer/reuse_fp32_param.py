"""Master weights that share their upper half with the bf16 parameters: ``--reuse-fp32-param``.

In bf16 training the optimizer keeps an fp32 master weight of every parameter. Its upper 16 bits are
the parameter, up to rounding, so 16 bits more are enough: 2 bytes per parameter are saved (2 / DP
with the distributed optimizer; 18 -> 16 bytes per parameter without it). Checkpoints are those of a
run without the flag, at any data-parallel size.

Losses are those of a run without it except for rounding: in one of 2 ** 17 updates a master weight
loses its last bit (:mod:`mindspeed.optimizer.remainder`). ``--reuse-fp32-param-exact``, implied by
``--npu-deterministic`` and ``--deterministic-mode``, keeps that bit, at 1/8 byte per parameter: the
same bits as without ``--reuse-fp32-param``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed.features.feature import Feature, Megatron, Option, Problem, conflict
from mindspeed.features.optimizer import precision_aware
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


class ReuseFp32Param(
    Feature,
    level=2,
    seams=(*precision_aware.SEAMS, "kernels"),
    options=(
        Option(
            "memory",
            "reuse-fp32-param",
            {"reuse_fp32_param": True},
            "bf16 weights share the memory of the fp32 ones",
        ),
    ),
):
    """Master weights share their upper half with the bf16 parameters."""

    reuse_fp32_param: bool = flag(
        False, "keep of fp32 master weights only the 16 bits that the bf16 parameters lack"
    )
    reuse_fp32_param_exact: bool = flag(
        False, "and one bit more per parameter: bit-equal to training without it"
    )

    def enabled(self, megatron: Megatron) -> bool:
        return self.reuse_fp32_param or self.reuse_fp32_param_exact

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        name = "--reuse-fp32-param"
        if not self.reuse_fp32_param:
            yield Problem(
                "--reuse-fp32-param-exact", f"has no effect without {name}", f"add {name}"
            )
            return
        yield from precision_aware.problems(name, megatron)
        if megatron.get("fp16") or not megatron.get("bf16", True):
            given = "--fp16" if megatron.get("fp16") else "fp32 training"
            why = "parameters are no upper halves of fp32 numbers"
            yield conflict(name, given, why, "use --bf16")
        if str(megatron.get("main_params_dtype", "fp32")) not in ("fp32", "torch.float32"):
            yield conflict(name, "--main-params-dtype fp16", fix="drop one")

    def _exact(self, megatron: Megatron) -> bool:
        deterministic = megatron.get("npu_deterministic") or megatron.get("deterministic_mode")
        return self.reuse_fp32_param_exact or bool(deterministic)

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.optimizer.remainder import Remainder

        precision_aware.attach(seams, self.name, remainders=True)
        if self._exact(megatron):
            seams.use_kernels(owner=self.name, remainder_codec=lambda: Remainder(exact=True))
