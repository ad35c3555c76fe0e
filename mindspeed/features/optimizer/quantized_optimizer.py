"""Optimizer states in fp8 and gradients in bf16: ``--quant-states``, ``--quant-grads``.

``--quant-states fp8`` stores both moments of Adam in 1 + 1/64 bytes instead of 4 each
(:mod:`mindspeed.optimizer.block_fp8`): 6 bytes less per parameter, 6 / DP with the distributed
optimizer. Megatron's ``--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8`` choose the same storage, with
the distributed optimizer only. The formats ``hif8`` and ``mxfp8`` need hardware that computes in
them. With either flag embeddings, routers and parameters of fewer than 4,096 elements keep fp32
moments; ``--no-quant-states-exempt`` stores theirs in fp8 too.

``--quant-grads`` accumulates and reduces the gradients of bf16 training in bf16
(``--grad-reduce-in-bf16``) and updates from them without fp32 copies (``--release-fp32-grad``):
2 bytes less per parameter.

Both change losses within rounding: compare a short run with one in fp32 first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.features.feature import Feature, Megatron, Problem, conflict, option_of
from mindspeed.features.optimizer import precision_aware
from mindspeed.flags import flag

if TYPE_CHECKING:
    import torch

    from mindspeed.adaptor.seams import Seams
    from mindspeed.optimizer.codecs import StateCodec


class QuantizedOptimizer(Feature, level=2, seams=(*precision_aware.SEAMS, "kernels")):
    """Moments of Adam in fp8, gradients in bf16."""

    quant_states: Literal["fp8", "hif8", "mxfp8"] | None = flag(
        None, "store both moments of Adam in this format"
    )
    quant_states_exempt: bool = flag(
        True, "moments of embeddings, routers and small parameters stay fp32 beside fp8 ones"
    )
    quant_grads: bool = flag(False, "accumulate and reduce gradients in bf16, update from them")

    def enabled(self, megatron: Megatron) -> bool:
        return bool(self.quant_states or self.quant_grads or not self.quant_states_exempt)

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        if not (self.quant_states_exempt or self._stores_fp8(megatron)):
            what, fix = "has no effect without moments in fp8", "add --quant-states fp8"
            yield Problem("--no-quant-states-exempt", what, fix)
        if self.quant_states:
            name = f"--quant-states {self.quant_states}"
            yield from precision_aware.problems(name, megatron)
            if self.quant_states != "fp8":
                yield Problem(name, "this device does not compute in that format", "use fp8")
            if not precision_aware.is_narrow(megatron):
                yield Problem(name, "needs 16-bit training", "add --bf16 or --fp16")
            for moment in ("exp_avg", "exp_avg_sq"):
                if str(given := megatron.get(f"{moment}_dtype", "fp32")) not in _FP32:
                    other = f"{option_of(f'{moment}_dtype')} {given}"
                    yield conflict(name, other, fix="drop one")
        if self.quant_grads:
            name = "--quant-grads"
            yield from precision_aware.problems(name, megatron)
            if megatron.get("fp16") or not megatron.get("bf16", True):
                yield Problem(
                    name,
                    "keeps gradients of bf16 training in bf16",
                    "add --bf16; with --fp16 gradients have 16 bits already, and "
                    "--release-fp32-grad updates from them",
                )

    def _stores_fp8(self, megatron: Megatron) -> bool:
        """Whether a flag of ours or of Megatron's stores a moment in fp8."""
        given = (megatron.get(f"{moment}_dtype") for moment in ("exp_avg", "exp_avg_sq"))
        return bool(self.quant_states) or any(str(dtype) in _FP8 for dtype in given)

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        if not self.quant_grads:
            return {}
        return {"grad_reduce_in_bf16": True, "accumulate_allreduce_grads_in_fp32": False}

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.optimizer.block_fp8 import BlockFp8, RootBlockFp8
        from mindspeed.te import optimizer_policy

        if not self.quant_states_exempt:
            seams.use_kernels(owner=self.name, keeps_fp32=_copied)
        if not (self.quant_states or self.quant_grads):
            return
        precision_aware.attach(seams, self.name)
        if not self.quant_states:
            return
        others = optimizer_policy.state_codec
        moments = {"exp_avg": BlockFp8, "exp_avg_sq": RootBlockFp8}

        def codec_of(name: str, dtype: torch.dtype) -> StateCodec:
            return moments[name]() if name in moments else others(name, dtype)

        seams.use_kernels(owner=self.name, state_codec=codec_of)


_FP32 = ("fp32", "torch.float32")
_FP8 = ("fp8", "torch.uint8")


def _copied(param: torch.Tensor) -> bool:
    """Whether several stages have copies of a parameter, which must stay equal."""
    return getattr(param, "rare_gradients", False) == "copied"
