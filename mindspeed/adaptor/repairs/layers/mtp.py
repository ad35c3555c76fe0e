"""Defects of multi-token prediction (MTP).

Defect: a layer of multi-token prediction has another attention than the last decoder layer.

Where: ``gpt_builders.py`` of Megatron-LM asks ``get_gpt_decoder_layer_specs`` of
``megatron.core.models.gpt.gpt_layer_specs`` for it, which knows ordinary attention only
(Megatron-LM PR 3026).
Symptom: silent; with ``--experimental-attention-variant`` and ``--mtp-num-layers`` the model is
another one than newer releases build, whose checkpoints do not fit.
Fix: the function returns the layers of the decoder.
Versions: 0.16 to 0.18.

Defect: recomputing a layer of multi-token prediction fails with packed documents.

Where: ``megatron.core.transformer.multi_token_prediction.MultiTokenPredictionLayer.
_checkpointed_forward`` hands all arguments of the layer to the checkpoint, which saves tensors only
(Megatron-LM PR 4593); the boundaries of documents are none.
Symptom: a TypeError in the first forward pass.
Fix: what is no tensor is bound to the function that runs again.
Versions: >=0.16,<0.18.

Defect: no layer of multi-token prediction can be recomputed.

Where: ``MultiTokenPredictionLayer._checkpointed_forward`` does not take the padding mask, which
``forward`` gives it.
Symptom: a TypeError in the first forward pass.
Fix: the mask is bound to the function that runs again.
Versions: 0.18.

Defect: tied embeddings with multi-token prediction (MTP) and pipeline parallelism.

Where: ``megatron.core.models.gpt.gpt_model.GPTModel.__init__``. The last stage holds a copy of the
embedding for MTP, which is also its output weight.
Symptom and fix:

* Megatron still allocates an unused weight for the output layer, and ``sharded_state_dict`` then
  raises because there should be none: no checkpoint can be saved. The weight is removed after
  construction, before gradient buffers and the optimizer are built.
* With gradient accumulation fusion, the output layer marks the weight's gradient as already added
  to ``main_grad``, and DDP drops the gradient of the embedding. Megatron sets ``zero_out_wgrad`` on
  a weight that is both with one pipeline stage only; it is set here, too.

Versions: >=0.15.

Defect: multi-token prediction divides its loss by the wrong number of tokens.

Where: ``megatron.core.transformer.multi_token_prediction.roll_tensor``, whose second result, the
number of tokens with a target, is that of one context-parallel rank's shard (Megatron-LM PR 7498).
The last tokens of a sequence have no target, and they are all on one rank. A micro-batch without
any target has none (PR 3396). ``GPTModel._postprocess`` divides by no number if losses are per
token: gradients are divided by the tokens of the main loss, which are more (PR 3159); without a
loss mask it predicts tokens whose label is negative (Megatron-Bridge issue 6103). Since 0.17
``process_mtp_loss`` does this; per token it multiplies by the tokens of one rank's shard.
Symptom: unless losses are per token, the mean over the ranks is not the mean over the sequence:
loss and gradients differ from those of one rank. Per token, a document of ten tokens that count
from the first on has nine tenths of its weight. Without targets loss and gradients are NaN. A
framework that passes no mask trains the prediction of prompts and padding.
Fix: the count is all-reduced over the context-parallel group and divided by its size; zero becomes
one, and with fewer targets than ranks each weighs more. If losses are per token, they are means
times the tokens of the main loss. A mask that is not given is made from the labels. Cost: one
scalar all-reduce per predicted token and micro-batch, two if losses are per token.
Versions: >=0.15.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind

NEEDED_WITH = ("mtp_num_layers",)
_per_token = ContextVar("_per_token", default=False)  # while a model computes such losses


def return_layers_of_decoder(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_gpt_decoder_layer_specs``."""

    def get_gpt_decoder_layer_specs(config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.experimental_attention_variant is None:
            return original(config, *args, **kwargs)
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

        whole = copy.copy(config)
        whole.pipeline_model_parallel_layout = SimpleNamespace(
            get_layer_id_list=lambda **options: range(config.num_layers)
        )
        block = specs.get_transformer_block_with_experimental_attention_variant_spec(whole)
        return block.layer_specs

    return get_gpt_decoder_layer_specs


def checkpoint_tensors_only(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_checkpointed_forward``."""

    def _checkpointed_forward(self: Any, forward_func: Any, **arguments: Any) -> Any:
        tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor)}
        others = {k: v for k, v in arguments.items() if k not in tensors}

        def forward(*values: Any, **named: Any) -> Any:
            return forward_func(**dict(zip(tensors, values, strict=False)), **named, **others)

        return original(self, forward, **tensors)

    return _checkpointed_forward


def checkpoint_with_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_checkpointed_forward``, whose checkpoint runs ``_proj_and_transformer_layer``."""

    def _checkpointed_forward(
        self: Any, *args: Any, padding_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        view = copy.copy(self)
        view._proj_and_transformer_layer = functools.partial(
            self._proj_and_transformer_layer, padding_mask=padding_mask
        )
        return original(view, *args, **kwargs)

    return _checkpointed_forward


def share_last_stage_weight(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``GPTModel.__init__``."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        copies = self.mtp_process and self.post_process and not self.pre_process
        if copies and self.share_embeddings_and_output_weights:
            self.output_layer.register_parameter("weight", None)
            self.embedding.word_embeddings.weight.zero_out_wgrad = True

    return __init__


def count_whole_sequence(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``roll_tensor``, which returns the rolled tensor and its sum."""

    def roll_tensor(
        tensor: torch.Tensor,
        shifts: int = -1,
        dims: int = -1,
        cp_group: Any = None,
        *packed_seq_params: Any,
        **named: Any,
    ) -> Any:
        rolled, total = original(tensor, shifts, dims, cp_group, *packed_seq_params, **named)
        if rolled is None:  # since 0.19 nothing may be given
            return rolled, total
        return weighed(rolled, tensor, cp_group)

    return roll_tensor


def mask_by_labels(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GPTModel._postprocess``, which computes the losses."""

    def _postprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = bind(original, (self, *args), kwargs)
        if given["loss_mask"] is None and given["labels"] is not None:
            given["loss_mask"] = (given["labels"] >= 0).float()
        token = _per_token.set(self.config.calculate_per_token_loss)
        try:
            return original(**given)
        finally:
            _per_token.reset(token)

    return _postprocess


def take_means_times_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``process_mtp_loss``, which computes the losses since 0.17."""

    def process_mtp_loss(*args: Any, **kwargs: Any) -> Any:
        given = bind(original, args, kwargs)
        config, labels = given["config"], given["labels"]
        if labels is None:
            return original(**given)
        if given["loss_mask"] is None:
            given["loss_mask"] = (labels >= 0).float()
        if config.calculate_per_token_loss:
            tokens = mean_count(given["loss_mask"], given["cp_group"])
            given["config"] = means = copy.copy(config)
            means.calculate_per_token_loss = False
            means.mtp_loss_scaling_factor = config.mtp_loss_scaling_factor * tokens
        return original(**given)

    return process_mtp_loss


def weighed(
    rolled: torch.Tensor, before: torch.Tensor, cp_group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """A rolled loss mask and the number of tokens by which its loss is a mean.

    Args:
        rolled: ``[b, s / ranks]``, see :func:`mean_count`.
        before: The same before it was rolled.
        cp_group: The ranks that share the sequence; None for one rank.
    """
    count = mean_count(rolled, cp_group)
    if not rolled.is_floating_point():
        return rolled, count
    if not _per_token.get():  # since 0.17 Megatron divides by 1 at least: fewer weigh more instead
        divisor = count.clamp(min=1)
        return rolled * (divisor / count), divisor
    whole = mean_count(before, cp_group)
    return rolled * (whole / count), whole


def mean_count(mask: torch.Tensor, cp_group: Any) -> torch.Tensor:
    """The sum of a loss mask over the sequence, divided by the ranks that share it; 1 for 0.

    Args:
        mask: ``[b, s / ranks]``, floating dtype. Integer tensors are tokens or positions, whose sum
            is not used.
        cp_group: The ranks that share the sequence; None for one rank.
    """
    total = mask.sum()
    if not mask.is_floating_point():
        return total
    if cp_group is not None and cp_group.size() > 1:
        dist.all_reduce(total, group=cp_group)
        total = total / cp_group.size()
    return torch.where(total == 0, 1, total)


PATCHES = (
    repair(
        "megatron.core.models.gpt.gpt_layer_specs:get_gpt_decoder_layer_specs",
        return_layers_of_decoder,
        "multi-token prediction has the attention of the last decoder layer",
        expects="(config, ...)",
        versions=">=0.16,<0.19",
    ),
    repair(
        "megatron.core.transformer.multi_token_prediction:"
        "MultiTokenPredictionLayer._checkpointed_forward",
        checkpoint_tensors_only,
        "layers of multi-token prediction are recomputed with packed documents",
        expects="(self, forward_func, *args, **kwargs)",
        versions=">=0.16,<0.18",
    ),
    repair(
        "megatron.core.transformer.multi_token_prediction:"
        "MultiTokenPredictionLayer._checkpointed_forward",
        checkpoint_with_mask,
        "layers of multi-token prediction are recomputed",
        expects="(self, hidden_states, decoder_input, attention_mask, context, ...)",
        versions=">=0.18,<0.19",
    ),
    repair(
        "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        share_last_stage_weight,
        "a last stage with MTP has one weight for embedding and output",
        expects="(self, config, transformer_layer_spec, vocab_size, max_sequence_length, ...)",
        versions=">=0.15",
    ),
    repair(
        "megatron.core.transformer.multi_token_prediction:roll_tensor",
        count_whole_sequence,
        "the MTP loss is a mean over the whole sequence, and zero without targets",
        expects={
            ">=0.16": "(tensor, shifts, dims, cp_group, packed_seq_params, ...)",
            "<0.16": "(tensor, shifts, dims, cp_group)",
        },
        versions=">=0.15",
    ),
    repair(
        "megatron.core.models.gpt.gpt_model:GPTModel._postprocess",
        mask_by_labels,
        "a token weighs in the MTP loss what it weighs in the loss",
        expects=(
            "(self, hidden_states, input_ids, position_ids, labels, rotary_pos_emb, "
            "rotary_pos_cos, rotary_pos_sin, mtp_in_postprocess, loss_mask, ...)"
        ),
        versions=">=0.15,<0.17",
    ),
    repair(
        "megatron.core.transformer.multi_token_prediction:process_mtp_loss",
        take_means_times_tokens,
        "the same since 0.17, and with context parallelism",
        expects=(
            "(hidden_states, labels, loss_mask, output_layer, output_weight, "
            "runtime_gather_output, is_training, compute_language_model_loss, config, "
            "cp_group, ...)"
        ),
        versions=">=0.17",
    ),
)
