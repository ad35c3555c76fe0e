"""Choice of the attention that runs, for the Transformer Engine substitute and the local spec.

    a sequence shared by context-parallel ranks, or a user's mask   context_parallel.attend
    documents concatenated to one sequence (thd)                    kernels.attend_packed
    documents inside the samples of an sbhd batch                   kernels.attend_packed
    anything else                                                   kernels.attend

    scores between two bounds (Gemma 2)                             te.attention, the plain formula

Plain formula, fused operator or blocks that skip masked keys (triangle): that is the choice of
features, which replace the two kernels. None of them bounds scores, so these go past them. A module
describes its call in an :class:`AttentionCall`; nothing here knows Megatron's or Transformer
Engine's modules.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed.errors import ConfigError
from mindspeed.te import attention, attention_policy, context_groups, kernels
from mindspeed.te.attention import Documents, each_document, max_logit, own_value
from mindspeed.te.masks import Visibility, Window

if TYPE_CHECKING:
    from mindspeed.attention.mask import Mask
    from mindspeed.attention.packed_batch import PackedBatch

_TO_BHSD = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}
_FROM_BHSD = {"sbhd": (2, 0, 1, 3), "bshd": (0, 2, 1, 3)}


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of core attention, as its module describes it.

    Attributes:
        layout: ``"sbhd"``, ``"bshd"`` or ``"thd"``.
        mask_type: Transformer Engine's name of the mask, after ``attention_policy``.
        window: Sliding window, after ``attention_policy``.
        visibility: Which keys the queries of a dense call see; only evaluated for one.
        dropout: Probability of dropping a probability.
        bias: Added to the scaled scores, broadcastable to ``[b, h, s_q, s_k]``.
        slopes: ALiBi slopes of this rank's heads, fp32 ``[h]``.
        sink: ``[h]`` score of a key without a value.
        packed: Which documents the tokens of an sbhd batch belong to.
        packed_documents: The same as cumulative lengths over the concatenated samples.
        self_attention: Queries and keys are of the same tokens.
        mask_tensor: A mask tensor says more than ``mask_type``.
        groups: Context-parallel group, or the groups of a hierarchy; None for one rank.
        comm_type: Megatron's ``--cp-comm-type`` of the layer.
        layer: Number of the layer, from 1.
        max_logit: Also return the largest score of each head.
        softcap: Bound of the scaled scores, by tanh; None without one.
        config: Megatron's transformer configuration; None counts as no norms of q and k.
    """

    layout: str
    mask_type: str
    window: Window
    visibility: Callable[[], Visibility]
    scale: float
    dropout: float
    random_stream: Callable[[], AbstractContextManager[Any]]
    bias: Tensor | None = None
    slopes: Tensor | None = None
    sink: Tensor | None = None
    documents: Documents | None = None
    packed: PackedBatch | None = None
    packed_documents: Documents | None = None
    self_attention: bool = True
    mask_tensor: bool = False
    groups: Any = None
    comm_type: str = "p2p"
    layer: int = 1
    max_logit: bool = False
    softcap: float | None = None
    config: Any = None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments that every kind of attention takes, and the bound of the one that has it."""
        options = {
            "scale": self.scale,
            "dropout": self.dropout,
            "slopes": self.slopes,
            "sink": self.sink,
        }
        return options if self.softcap is None else options | {"softcap": self.softcap}


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Any:
    """Attend; differentiable, collective where ranks share the sequence.

    Args:
        q: Queries, ``[s, b, h, d]``, ``[b, s, h, d]`` or ``[t, h, d]`` as ``call.layout`` says.
        k: Keys, with as many heads or a divisor of that.
        v: Values, ``d_v`` channels.

    Returns:
        ``[s, b, h * d_v]`` (``[b, s, h * d_v]``, ``[t, h * d_v]``) in the dtype of q, and with
        ``call.max_logit`` the largest scores, fp32 ``[h]``.
    """
    v = own_value(q, k, v, call.config)
    mask = _user_mask(q, k, call)
    with call.random_stream():
        if mask is not None or context_groups.group_size(call.groups) > 1:
            return _by_plan(q, k, v, mask, call)
        if call.documents is not None:
            return _packed(q, k, v, call.documents, call)
        if call.packed is not None and call.packed_documents is not None:
            q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
            out = _packed(q, k, v, call.packed_documents, call)
            return out.unflatten(0, (call.packed.samples, -1)).transpose(0, 1)
        return _dense(q, k, v, call)


def _dense(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Any:
    q, k, v = (x.permute(_TO_BHSD[call.layout]) for x in (q, k, v))
    seen = call.visibility()
    function = kernels.attend if call.softcap is None else attention.attend
    out = function(q, k, v, seen, bias=call.bias, **call.options)
    out = out.permute(_FROM_BHSD[call.layout]).flatten(2)
    if not call.max_logit:
        return out
    return out, max_logit(q, k, seen, scale=call.scale, bias=call.bias)


def _packed(q: Tensor, k: Tensor, v: Tensor, documents: Documents, call: AttentionCall) -> Any:
    where = (documents, call.mask_type)
    function = kernels.attend_packed if call.softcap is None else attention.attend_packed
    out = function(q, k, v, *where, window=call.window, **call.options)
    if not call.max_logit:
        return out
    logits = [
        max_logit(q_i, k_i, seen, scale=call.scale)
        for _, (q_i, k_i, _, seen) in each_document(q, k, v, *where, call.window)
        if q_i.shape[2] and k_i.shape[2]
    ]
    return out, torch.stack(logits).amax(0)


def _by_plan(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, call: AttentionCall) -> Tensor:
    from mindspeed.te import context_parallel

    _refuse_by_plan(call)
    groups, lowest = call.groups, context_groups.lowest_level(call.groups)
    strategy = attention_policy.context_strategy(call.comm_type, lowest)
    options = call.options | {
        "causal": "causal" in call.mask_type,
        "window": call.window,
        "layer": call.layer,
    }
    if call.documents is not None:
        attend_thd, where = context_parallel.attend_thd, (call.documents, groups, strategy)
        return kernels.attend_by_plan(attend_thd, q, k, v, *where, **options)
    if call.layout == "bshd":
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    options |= {"packed": call.packed, "mask": mask}
    out = kernels.attend_by_plan(context_parallel.attend, q, k, v, groups, strategy, **options)
    return out.transpose(0, 1) if call.layout == "bshd" else out


def _user_mask(q: Tensor, k: Tensor, call: AttentionCall) -> Mask | None:
    sequence = call.layout.find("s")
    if sequence < 0 or not call.self_attention or q.shape[sequence] != k.shape[sequence]:
        return None
    length = q.shape[sequence] * context_groups.group_size(call.groups)
    return context_groups.user_mask(length, q.shape[1 - sequence], call.packed)


def _refuse_by_plan(call: AttentionCall) -> None:
    """Raise where a plan cannot say what the module requires.

    Raises:
        NotImplementedError: A bias tensor, padding masks, bounds or maxima of the scores.
        ConfigError: A mask tensor of the whole sequence.
    """
    padding = call.documents is None and (
        "padding" in call.mask_type or "arbitrary" in call.mask_type
    )
    unavailable = {
        "a bias tensor": call.bias is not None,
        f"mask type {call.mask_type!r}": padding,
        "return_max_logit": call.max_logit,
        "--attention-logit-softcap": call.softcap is not None,
    }
    ranks = context_groups.group_size(call.groups)
    flag = f"--context-parallel-size {ranks} (--cp-comm-type {call.comm_type})"
    for what, is_asked in unavailable.items():
        if is_asked:
            raise NotImplementedError(
                f"{flag if ranks > 1 else 'set_attention_mask'} does not work with {what} yet"
            )
    if call.mask_tensor and call.packed is None:
        raise ConfigError(
            f"{flag} needs --no-create-attention-mask-in-dataloader: a mask tensor of the whole "
            "sequence is not sharded over ranks"
        )
