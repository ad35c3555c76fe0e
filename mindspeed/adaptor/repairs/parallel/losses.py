"""Defects of losses over several ranks.

Defect: losses are divided by the wrong number of tokens.

Where: ``megatron.core.pipeline_parallel.schedules.forward_step_calc_loss``. A loss function of
three values, ``(sum, number of tokens, report)``, is divided by the tokens of one context-parallel
rank (Megatron-LM PR 7513). One of two values is divided by nothing if losses are per token, which
sums gradients over the data- and context-parallel ranks (verl issue 6609). The loss is divided in
place, and with it a report that shares its memory, such as ``loss.detach()`` (Primus PR 1079).
Symptom: silent; with context parallelism and masked tokens (fine-tuning) a token counts the more,
the fewer tokens its rank has; with ``--calculate-per-token-loss`` the gradients of a loss function
of two values are too large by the number of ranks. A reported loss is divided by the number of
micro-batches.
Fix: the number of tokens is the mean over the context-parallel ranks; equal numbers change nothing.
Cost: one scalar all-reduce per micro-batch. A loss function of two values is refused where losses
are per token.
Versions: all; before 0.15 a loss function of three values counts the tokens of all ranks itself.

Defect: the vocabulary-parallel loss takes one rank's part of the vocabulary for the whole.

Where: ``megatron.core.tensor_parallel.cross_entropy``: label smoothing spreads over the size, and
with the mean, of one rank's part (Megatron-LM PR 7466). ``LanguageModule`` passes logits that are
gathered (``parallel_output=False``) to it as if they were a part (Megatron-LM issue 7452).
Symptom: silent; with smoothing the ranks have different losses, none of them right; with gathered
logits the loss is too large by the logarithm of the tensor-parallel size.
Fix: smoothing is added to the plain loss, with one all-reduce over the whole vocabulary; gathered
logits are split again.

Defect: the fused loss rounds its gradient to bf16, whatever the logits are.

Where: ``megatron.core.fusions.fused_cross_entropy:calculate_gradients``, line 82, behind
``cross_entropy_loss_fusion`` with the implementation ``native``, the default of Megatron-Bridge.
Symptom: silent; a training in fp32 or fp16 has gradients with 8 bits of precision.
Fix: the gradient stays in fp32, and autograd gives it the dtype of the logits.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind
from mindspeed.errors import TrainingError


def divide_by_tokens_of_all_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward_step_calc_loss``, which calls the loss function on a last stage."""

    def forward_step_calc_loss(
        model: Any, output_tensor: Any, loss_func: Any, config: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        if loss_func is None:
            return original(model, output_tensor, loss_func, config, *args, **kwargs)
        counts: list[torch.Tensor] = []

        def normalised(output: Any, **options: Any) -> Any:
            returned = loss_func(output, **options)
            if options.get("non_loss_data") or not isinstance(returned, tuple):
                return returned
            returned = (returned[0].clone(), *returned[1:])  # Megatron divides it in place
            if config.calculate_per_token_loss:
                _refuse_two_values(returned)
            elif len(returned) == 3:
                loss, count, report = returned
                counts.append(count)
                return (*normalised_loss(loss, count, _context_group()), report)
            return returned

        loss, count = original(model, output_tensor, normalised, config, *args, **kwargs)
        return loss, counts[0] if counts else count

    return forward_step_calc_loss


def check_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward_step``, which before 0.15 calls the loss function itself.

    There a loss function of three values counts the tokens of all context-parallel ranks.
    """

    def forward_step(forward_step_func: Any, *args: Any, **kwargs: Any) -> Any:
        config = bind(original, (forward_step_func, *args), kwargs)["config"]

        def step(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            output, loss_func = forward_step_func(*args, **kwargs)

            def checked(output: Any, **options: Any) -> Any:
                returned = loss_func(output, **options)
                if options.get("non_loss_data") or not isinstance(returned, tuple):
                    return returned
                if config.calculate_per_token_loss:
                    _refuse_two_values(returned)
                return (returned[0].clone(), *returned[1:])  # Megatron divides it in place

            return output, checked

        return original(step, *args, **kwargs)

    return forward_step


def normalised_loss(
    loss: torch.Tensor, count: torch.Tensor, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the number by which each rank divides it, so that their mean is right.

    Args:
        loss: ``[]``, the sum over this rank's tokens.
        count: ``[]``, any dtype, how many of them count.
        group: The ranks that share the sequences, or None.
    """
    if group is None or group.size() == 1:
        return loss, count
    total = torch.as_tensor(count, device=loss.device).detach().clone()
    dist.all_reduce(total, group=group)
    mean = total / group.size()
    # Megatron divides by 1 at least; a few tokens of many ranks have a mean below it.
    below = torch.where((mean > 0) & (mean < 1), 1 / mean, torch.ones_like(mean))
    return loss * below.to(loss.dtype), mean


def _context_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group(check_initialized=False)


def _refuse_two_values(returned: tuple[Any, ...]) -> None:
    if len(returned) == 2 and getattr(returned[0], "requires_grad", False):  # not an evaluation
        raise TrainingError(
            "--calculate-per-token-loss needs a loss function that returns (sum of the losses, "
            "number of tokens, report); this one returns (loss, report), whose gradients nothing "
            "would divide: return the number of tokens too, or drop the flag"
        )


def smooth_over_all_labels(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``vocab_parallel_cross_entropy`` of logits ``[s, b, v / ranks]``."""

    def vocab_parallel_cross_entropy(
        vocab_parallel_logits: torch.Tensor,
        target: torch.Tensor,
        label_smoothing: float = 0.0,
        tp_group: Any = None,  # since 0.19
    ) -> torch.Tensor:
        from megatron.core import parallel_state

        given = () if tp_group is None else (tp_group,)
        group = tp_group or parallel_state.get_tensor_model_parallel_group()
        if not label_smoothing or group.size() == 1:
            return original(vocab_parallel_logits, target, label_smoothing, *given)
        # Before the loss, which works in place on its logits.
        excess = _excess(vocab_parallel_logits, target, group, *given)
        labels = vocab_parallel_logits.size(-1) * group.size()
        share = label_smoothing * labels / (labels - 1)
        return original(vocab_parallel_logits, target, 0.0, *given) + share * excess

    return vocab_parallel_cross_entropy


def _excess(logits: torch.Tensor, target: torch.Tensor, group: Any, *given: Any) -> torch.Tensor:
    """The target's logit less the mean of all: what the mean loss of all labels has in addition.

    Args:
        logits: ``[s, b, v / ranks]``, any floating dtype.
        target: ``[s, b]``, int64.
        group: The ranks that have the parts of the vocabulary, in order.
        given: The group, if Megatron's reduction shall be told.

    Returns:
        ``[s, b]``, fp32, equal on all ranks.
    """
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    logits = logits.float()
    labels = logits.size(-1)
    local = target - group.rank() * labels
    inside = (local >= 0) & (local < labels)
    # Indexing keeps no logits for the backward, which the loss overwrites.
    token = torch.arange(target.numel(), device=target.device).view_as(target)
    own = logits.flatten(0, -2)[token, local.clamp(0, labels - 1)]
    part = own * inside - logits.sum(-1) / (labels * group.size())
    whole: torch.Tensor = reduce_from_tensor_model_parallel_region(part, *given)
    return whole


def keep_precision(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Replace ``calculate_gradients``; its result is fp32 ``[s * b, v / ranks]``.

    It is compiled where Megatron's is.
    """
    from megatron.core.jit import jit_fuser

    def calculate_gradients(
        softmax: torch.Tensor,
        grad_output: torch.Tensor,
        target_mask: torch.Tensor,
        masked_target_1d: torch.Tensor,
    ) -> torch.Tensor:
        from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy as Loss

        rows, row, update, gradient = Loss.prepare_gradient_calculation_operands(
            softmax, target_mask
        )
        found: torch.Tensor = Loss.calculate_gradients(
            rows, row, masked_target_1d, update, gradient, grad_output
        )
        return found

    compiled = hasattr(original, "_torchdynamo_orig_callable")
    return jit_fuser(calculate_gradients) if compiled else calculate_gradients


def split_gathered(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``LanguageModule.compute_language_model_loss`` of logits ``[s, b, v]`` or a part."""

    def compute_language_model_loss(
        self: Any, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        from megatron.core import tensor_parallel

        ranks = self.config.tensor_model_parallel_size
        if ranks > 1 and logits.size(-1) == getattr(self, "vocab_size", None):
            logits = tensor_parallel.scatter_to_tensor_model_parallel_region(logits)
        return original(self, labels, logits)

    return compute_language_model_loss


PATCHES = (
    repair(
        "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
        divide_by_tokens_of_all_ranks,
        "a loss is a mean over the tokens of all context-parallel ranks",
        expects="(model, output_tensor, loss_func, config, ...)",
        versions=">=0.15",
    ),
    repair(
        "megatron.core.pipeline_parallel.schedules:forward_step",
        check_values,
        "a loss function whose gradients nothing would divide is refused",
        expects=(
            "(forward_step_func, data_iterator, model, num_microbatches, input_tensor, "
            "forward_data_store, config, ...)"
        ),
        versions="<0.15",
    ),
    repair(
        "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy",
        smooth_over_all_labels,
        "label smoothing spreads over the whole vocabulary",
        expects={
            "<0.19": "(vocab_parallel_logits, target, label_smoothing)",
            ">=0.19": "(vocab_parallel_logits, target, label_smoothing, tp_group)",
        },
    ),
    repair(
        "megatron.core.fusions.fused_cross_entropy:calculate_gradients",
        keep_precision,
        "the gradient of the fused loss has the precision of the logits",
        expects="(softmax, grad_output, target_mask, masked_target_1d)",
    ),
    repair(
        "megatron.core.models.common.language_module.language_module:"
        "LanguageModule.compute_language_model_loss",
        split_gathered,
        "gathered logits are a part again before the vocabulary-parallel loss",
        expects="(self, labels, logits)",
    ),
)
