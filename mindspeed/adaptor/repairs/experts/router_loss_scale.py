"""Defect: losses of the router have another strength on several ranks, or are rounded.

Where: ``megatron.core.transformer.moe``. ``TopKRouter`` under ``calculate_per_token_loss``
multiplies its losses with the tokens of one rank, while the gradients are divided by the tokens of
all ranks that share a micro-batch (Megatron-LM PR 5047); for the loss per sequence it takes the
tokens of one sequence of the micro-batch (PR 5798).
``moe_utils.get_tokens_per_expert_and_token_count`` sums the counts of a rank in place over the
ranks before it reads them (PR 7481). The z-loss in the log is that of one rank (PR 3199). Without
``--moe-router-dtype`` sigmoid scores and the z-loss are computed in 16 bits (PR 2765). Each
data-parallel rank has a part of the global loss, and the parts are averaged (issue 3672); it
divides the counts of all micro-batches of a step by the tokens of the last one, as if all had as
many (PR 7214). A layer that predicts several tokens adds its z-loss for each of them
(``mtp_use_repeated_layer``), its other losses once. Before 0.16, without a loss per token, the
parts of the context-parallel ranks are averaged instead of added.
Symptom: silent; experts are balanced with 1 / (TP x CP), or 1 / micro-batch size, of the
coefficient that the user gave, with the global loss 1 / DP. With a padding mask, the weight of a
rank depends on the others, and the global loss on the order of micro-batches. Rounded scores tie,
and choose other experts for the loss than those that get the tokens.
Fix: losses are multiplied with the tokens of the micro-batch on all ranks that share it, without
padding, and computed in fp32 at least; the z-loss is logged as the mean over the ranks. Cost: one
scalar all-reduce per loss and layer, only with a padding mask.
Versions: the faults of padding, and of the loss per sequence, came with 0.16, the repeated layer
with 0.17; since 0.17 scores are fp32. Since 0.19 a loss per token has the tokens of all ranks that
share a micro-batch, with as many of each as of this one, and the loss per sequence is right.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind
from mindspeed.adaptor.versions import at_least

_SEQUENCES = "_sequences_of_loss"  # of the micro-batch, while the loss per sequence is attached
_global_router: ContextVar[Any] = ContextVar("_global_router", default=None)  # computes its loss


def count_own_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that counts tokens per expert, of this rank, and of all ranks."""

    def get_tokens_per_expert_and_token_count(
        routing_map: torch.Tensor,
        reduce_group: Any,
        topk: int | None = None,
        with_padding_mask: bool = False,
    ) -> Any:
        own = routing_map.sum() / (topk or 1) if with_padding_mask else routing_map.shape[0]
        counts, _, total = original(routing_map, reduce_group, topk, with_padding_mask)
        if (router := _global_router.get()) is not None:
            # Megatron adds the counts, and 1 to the steps by which it divides the sum.
            router.ga_steps.copy_(router.global_tokens_per_expert.sum() / router.topk / total)
        return counts, own, total

    return get_tokens_per_expert_and_token_count


def count_sequences(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``_apply_seq_aux_loss``, which counts the tokens of one sequence.

    Its maps are ``[s, b * experts]``, the result ``[s * b, experts]``.
    """

    def _apply_seq_aux_loss(
        self: Any,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        setattr(self, _SEQUENCES, bsz)
        try:
            return original(
                self, probs, scores_for_aux_loss, routing_map, seq_length, bsz, with_padding_mask
            )
        finally:
            delattr(self, _SEQUENCES)

    return _apply_seq_aux_loss


def count_micro_batches(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``_apply_global_aux_loss``: its steps are earlier tokens by those of this one.

    It attaches the loss, a scalar, to probabilities ``[s * b, experts]``.
    """

    def _apply_global_aux_loss(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        token = _global_router.set(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            _global_router.reset(token)

    return _apply_global_aux_loss


def scale_by_micro_batch(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap the method that attaches a load-balancing loss, a scalar, to ``[s * b, experts]``.

    Its number of tokens changes. A loss of which each data-parallel rank has a part is multiplied
    with these ranks, over which gradients are averaged; its coefficient too, for the log.
    """

    def attach_and_log_load_balancing_loss(
        self: Any,
        activation: torch.Tensor,
        aux_loss_coeff: float,
        aux_loss: torch.Tensor,
        aux_loss_name: str,
        reduce_group: Any,
        *averaged: bool,
        valid_token_count: float | torch.Tensor | None = None,
        **named: bool,
    ) -> torch.Tensor:
        if self.calculate_per_token_loss:
            own: float | torch.Tensor = activation.shape[0]
            if valid_token_count is not None:
                own = valid_token_count * getattr(self, _SEQUENCES, 1)
            valid_token_count = _over_ranks(own, reduce_group)
            if at_least("0.19"):  # which multiplies with the ranks itself
                valid_token_count = valid_token_count / self.tp_cp_group.size()
        else:
            parts = reduce_group.size() // self.tp_cp_group.size()
            aux_loss_coeff, aux_loss = aux_loss_coeff * parts, aux_loss * parts
        return original(
            self, activation, aux_loss_coeff, aux_loss, aux_loss_name, reduce_group,
            *averaged, valid_token_count=valid_token_count, **named,
        )  # fmt: skip

    return attach_and_log_load_balancing_loss


def scale_by_ranks(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap the same method before 0.16, which multiplies with the tokens of this rank itself."""

    def attach_and_log_load_balancing_loss(
        self: Any,
        activation: torch.Tensor,
        aux_loss_coeff: float,
        aux_loss: torch.Tensor,
        aux_loss_name: str,
        reduce_group: Any,
    ) -> torch.Tensor:
        factor = int(reduce_group.size())
        if not self.calculate_per_token_loss:
            factor //= self.tp_cp_group.size()
        return original(
            self,
            activation,
            aux_loss_coeff * factor,  # for the log
            aux_loss * factor,
            aux_loss_name,
            reduce_group,
        )

    return attach_and_log_load_balancing_loss


def attach_loss(
    self: Any, activation: torch.Tensor, load_balancing_loss_func: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Attach a load-balancing loss to the router's probabilities, before 0.15.

    Args:
        self: The router.
        activation: ``[n, experts]``, probabilities of this rank's tokens.
        load_balancing_loss_func: Gets a coefficient and the ranks that share the sequences, and
            returns this rank's part of the loss, a scalar.

    Returns:
        The probabilities; their backward adds the gradient of the loss.
    """
    from megatron.core.transformer.moe import moe_utils

    config = self.config
    if config.moe_aux_loss_coeff == 0:
        return activation
    ranks = self.tp_cp_group.size()
    group = self.tp_cp_group if ranks > 1 else None
    loss = load_balancing_loss_func(
        moe_aux_loss_coeff=config.moe_aux_loss_coeff, sequence_partition_group=group
    )
    moe_utils.save_to_aux_losses_tracker(
        "load_balancing_loss",
        loss / config.moe_aux_loss_coeff,
        self.layer_number,
        config.num_layers,
        reduce_group=group,
    )
    if self.calculate_per_token_loss:
        loss = loss * (activation.shape[0] * ranks)
    return moe_utils.MoEAuxLossAutoScaler.apply(activation, loss)  # type: ignore[no-any-return]


def scale_by_context(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that sets by what losses of routers are multiplied in backward."""

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        from megatron.core import parallel_state
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        result = original(*args, **kwargs)
        config = bind(original, args, kwargs)["config"]
        if config.num_moe_experts is not None and not config.calculate_per_token_loss:
            ranks = parallel_state.get_context_parallel_world_size()
            MoEAuxLossAutoScaler.main_loss_backward_scale.mul_(ranks)
        return result

    return forward_step


def score_own_in_fp32(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``TopKRouter.compute_routing_scores_for_aux_loss``, a method before 0.15."""

    def compute_routing_scores_for_aux_loss(self: Any, logits: torch.Tensor) -> Any:
        return original(self, _wide(logits))

    return compute_routing_scores_for_aux_loss


def score_in_fp32(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that computes the scores of a load-balancing loss."""

    def compute_routing_scores_for_aux_loss(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(_wide(logits), *args, **kwargs)

    return compute_routing_scores_for_aux_loss


def apply_z_loss(
    self: Any, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attach the z-loss of a router to its logits.

    Args:
        self: The router.
        logits: ``[n, experts]``, tokens of this rank.
        padding_mask: bool ``[n]``, tokens that are left out.

    Returns:
        The logits; their backward adds the gradient of the loss.
    """
    from megatron.core.transformer.moe import moe_utils

    config, ranks, layer = self.config, self.tp_cp_group.size(), self.layer_number
    if config.moe_z_loss_coeff is None or not (self.training and torch.is_grad_enabled()):
        return logits
    left_out = {} if padding_mask is None else {"padding_mask": padding_mask}
    loss = moe_utils.z_loss_func(_wide(logits), 1.0, **left_out)
    if getattr(self, "is_mtp_layer", False):  # since 0.17 counted on its own
        layer = layer + config.num_layers
        if config.mtp_use_repeated_layer:
            loss = loss / config.mtp_num_layers
    strength: Any = config.moe_z_loss_coeff / ranks
    if self.calculate_per_token_loss:
        own = logits.shape[0] if padding_mask is None else (~padding_mask).sum()
        strength = config.moe_z_loss_coeff * own  # gradients of the ranks are added
    moe_utils.save_to_aux_losses_tracker(
        "z_loss",
        loss,
        layer,
        config.num_layers + (config.mtp_num_layers or 0),
        avg_group=self.tp_dp_cp_group,
    )
    return moe_utils.MoEAuxLossAutoScaler.apply(logits, loss * strength)  # type: ignore[no-any-return]


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.element_size() < 4 else logits


def _over_ranks(tokens: float | torch.Tensor, group: Any) -> float | torch.Tensor:
    """The sum over the group; numbers are equal on all ranks, tensors need not be."""
    if not isinstance(tokens, torch.Tensor):
        return tokens * int(group.size())
    total = tokens.detach().clone()
    dist.all_reduce(total, group=group)
    return total


_ROUTER = "megatron.core.transformer.moe.router:TopKRouter."
_VERSIONS = ">=0.16"
PATCHES = (
    repair(
        "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count",
        count_own_tokens,
        "the tokens of this rank are not those of all ranks",
        expects="(routing_map, reduce_group, topk, with_padding_mask)",
        versions=_VERSIONS,
    ),
    repair(
        _ROUTER + "_apply_seq_aux_loss",
        count_sequences,
        "the tokens of a micro-batch are those of all its sequences",
        expects="(self, probs, scores_for_aux_loss, routing_map, seq_length, bsz, ...)",
        versions=">=0.16,<0.19",
    ),
    repair(
        _ROUTER + "_apply_global_aux_loss",
        count_micro_batches,
        "the global loss divides the counts of all micro-batches by the tokens of all",
        expects="(self, probs, scores_for_aux_loss, routing_map, with_padding_mask)",
        versions=_VERSIONS,
    ),
    repair(
        _ROUTER + "attach_and_log_load_balancing_loss",
        scale_by_micro_batch,
        "with a loss per token, balancing losses have the same strength under TP and CP",
        expects={
            "<0.18": "(self, activation, aux_loss_coeff, aux_loss, aux_loss_name, reduce_group, "
            "reduce_group_has_dp, valid_token_count)",
            ">=0.18": "(self, activation, aux_loss_coeff, aux_loss, aux_loss_name, reduce_group, "
            "needs_dp_avg, valid_token_count)",
        },
        versions=_VERSIONS,
    ),
    repair(
        _ROUTER + "attach_and_log_load_balancing_loss",
        scale_by_ranks,
        "the same, and with the global loss",
        expects="(self, activation, aux_loss_coeff, aux_loss, aux_loss_name, reduce_group)",
        versions=">=0.15,<0.16",
    ),
    repair(
        "megatron.core.transformer.moe.moe_utils:compute_routing_scores_for_aux_loss",
        score_in_fp32,
        "scores of a load-balancing loss are not rounded",
        expects="(logits, topk, score_function, fused, ...)",
        versions=">=0.15,<0.17",
    ),
    repair(
        _ROUTER + "compute_routing_scores_for_aux_loss",
        score_own_in_fp32,
        "the same before 0.15",
        expects="(self, logits)",
        versions="<0.15",
    ),
    repair(
        _ROUTER + "apply_load_balancing_loss",
        lambda original: attach_loss,
        "balancing losses have the same strength under TP and CP",
        kind="replace",
        expects="(self, activation, load_balancing_loss_func)",
        versions="<0.15",
    ),
    *(
        repair(
            f"megatron.core.pipeline_parallel.schedules:{name}",
            scale_by_context,
            "without a loss per token losses of routers have the same strength under CP",
            versions=versions,
        )
        for name, versions in (
            ("forward_step", "<0.15"),
            ("forward_step_calc_loss", ">=0.15,<0.16"),
        )
    ),
    repair(
        _ROUTER + "apply_z_loss",
        lambda original: apply_z_loss,
        "the z-loss too, and the log has its mean over the ranks",
        kind="replace",
        expects={"<0.16": "(self, logits)", ">=0.16": "(self, logits, padding_mask)"},
    ),
)
