"""Cadam: ``--optimizer cadam``.

One moment in 16 bits instead of two in 32: with the main weights ``4 + 2 + 4/row`` bytes of states
per parameter, where Adam keeps 12. Only the sign of the moment moves a weight, by the learning rate
as a whole. So this is 3 to 10 times lower than with Adam, and the weight decay 3 to 10 times
higher; ``--adam-beta1 0.965`` is a good start. Use it when optimizer states do not fit.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Problem, conflict, option_of
from mindspeed.optimizer.rules import chosen

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

logger = logging.getLogger("mindspeed")

FLAG = "--optimizer cadam"
_ADAMS_BETA = 0.9
# Flags that change nothing here, and the values that they have when nobody gives them: two where
# Megatron-LM and megatron.core disagree.
_WITHOUT_EFFECT = {
    "adam_beta2": (0.999,),
    "adam_eps": (1e-8,),
    "muon_momentum": (0.9, 0.95),
    "muon_split_qkv": (True,),
    "muon_use_nesterov": (False,),
    "muon_scale_mode": ("spectral",),
    "muon_fp32_matmul_prec": ("medium",),
    "muon_num_ns_steps": (5,),
    "muon_tp_mode": ("blockwise", "duplicated"),  # the second since 0.20
    "muon_extra_scale_factor": (1.0,),
}
_EXCLUDED = {
    "optimizer_cpu_offload": "the optimizer on the host is Adam",
    "use_megatron_fsdp": "ZeRO 2 and 3 store Adam's two moments",
    "quant_states": "its moment has 16 bits already",
}


class Cadam(
    Feature,
    level=2,
    seams=("kernels",),
    omits_states=f"second moments: it was trained with {FLAG}",
):
    """One moment in 16 bits instead of two in 32, and sign updates."""

    def enabled(self, megatron: Megatron) -> bool:
        return chosen(megatron) == "cadam"

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        return {"update_rule": "cadam"}

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        beta = megatron.get("adam_beta1", _ADAMS_BETA)
        if not 0 <= beta < 1:
            yield Problem("--adam-beta1", f"{beta} is not in [0, 1)", "0.965 is usual")
        for name, values in _WITHOUT_EFFECT.items():
            if name in megatron and megatron[name] not in values:
                what = f"has no effect with {FLAG}"
                yield Problem(option_of(name), what, "remove it")
        for name, reason in _EXCLUDED.items():
            if megatron.get(name):
                yield conflict(option_of(name), FLAG, reason)
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            if str(megatron.get(name, "fp32")) not in ("fp32", "torch.float32"):
                why = "it stores one moment in 16 bits"
                yield conflict(option_of(name), FLAG, why, "remove it")

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.optimizer.cadam import CADAM, RowScaled
        from mindspeed.te import optimizer_policy

        plain = optimizer_policy.state_codec
        seams.use_kernels(
            owner=self.name,
            update_rule=lambda: CADAM,
            state_codec=lambda name, dtype: (
                RowScaled() if name == "exp_avg" else plain(name, dtype)
            ),
        )
        lr, beta = megatron.get("lr") or 0.0, megatron.get("adam_beta1", _ADAMS_BETA)
        if lr > 1e-4 and beta == _ADAMS_BETA and int(os.environ.get("RANK", "0")) == 0:
            logger.warning(
                "%s with --lr %g and Adam's --adam-beta1 %g: Cadam is usually trained with --lr "
                "and --min-lr 3 to 10 times lower than Adam, --weight-decay 3 to 10 times higher "
                "and --adam-beta1 0.965",
                FLAG,
                lr,
                beta,
            )
