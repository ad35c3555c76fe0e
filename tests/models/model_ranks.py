"""The Megatron side of the comparison, on any layout: loss and gradients of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.support.tiny import LENGTH, batch

COMMON = (
    "--micro-batch-size=2",
    "--lr=1",
    "--train-iters=1",
    "--mock-data",
    "--tokenizer-type=NullTokenizer",
    "--make-vocab-size-divisible-by=64",
    "--no-gradient-accumulation-fusion",
)


def resolved(folder: str, flags: Sequence[str], world_size: int = 1) -> Any:
    """Final values of a run that takes its model from ``folder``."""
    from mindspeed.training.arguments import build_parser
    from mindspeed.training.recipe import parse_with_recipe
    from mindspeed.training.resolve import resolve
    from mindspeed.training.resolve_data import load_tokenizer

    words = [f"--model={folder}", f"--seq-length={LENGTH}", *COMMON, *flags]
    args = parse_with_recipe(words, build_parser())
    args.max_position_embeddings = max(args.max_position_embeddings, LENGTH)
    args = resolve(args, world_size).args
    load_tokenizer(args)
    return args


def loaded(folder: str, flags: Sequence[str]) -> tuple[Any, Any]:
    """Values and the built model of this rank, its weights read from ``folder``."""
    from mindspeed import session
    from mindspeed.models.hf_load import load_hf
    from mindspeed.training import setup
    from mindspeed.training.model import build

    args = resolved(folder, flags, dist.get_world_size())
    session.install().configure(args)
    setup.initialize(args)
    model = build(args)
    assert load_hf(args, model.modules, folder) == []
    return args, model


def logits(folder: str, flags: Sequence[str] = ()) -> torch.Tensor:
    """Logits ``[b, s, v]``; the vocabulary without its padding."""
    args, model = loaded(folder, flags)
    tokens, _ = batch()
    positions = torch.arange(LENGTH).expand_as(tokens)
    with torch.no_grad():
        out = model.modules[0].eval()(tokens, positions, None)
    assert bool((out[..., args.vocab_size :] == float("-inf")).all())
    return out[..., : args.vocab_size]


def loss_and_gradients(folder: str, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Loss and logits (last stage; the rank's part of the vocabulary), both again for MTP
    tokens, and this rank's shards of all gradients.

    Gradients take the place of the weights, so that they are found, sharded and named like them.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    from mindspeed.adaptor.micro_batch import shard_batch
    from mindspeed.attention.packed_batch import cu_seqlens_of_samples
    from mindspeed.models.families import family_of_args
    from mindspeed.models.hf_load import local_shards
    from mindspeed.models.shape import shape_of
    from mindspeed.training.forward_step import forward_step
    from tests.support.release import prediction_losses

    args, model = loaded(folder, flags)
    tokens, labels = batch()
    data = {
        "tokens": tokens,
        "labels": labels,
        "position_ids": torch.arange(LENGTH).expand_as(tokens),
        "attention_mask": None,
        "loss_mask": torch.ones(tokens.shape),
    }
    if args.context_parallel_size > 1:
        ends = cu_seqlens_of_samples(*tokens.shape)
        data, _ = shard_batch(data, ends, len(tokens), reset_mask=False, reset_positions=False)
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    logits: list[torch.Tensor] = []
    for module in model.modules:
        if module.post_process:
            module.output_layer.register_forward_hook(
                lambda layer, inputs, out: logits.append(out[0].detach().transpose(0, 1).clone())
            )
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([data]),
        model=model.chunks[0],
        num_microbatches=1,
        seq_length=LENGTH,
        micro_batch_size=tokens.shape[0],
        forward_only=False,
    )
    buffers = {id(buffer) for module in model.modules for buffer in module.buffers()}
    with torch.no_grad():
        for module in model.modules:
            for parameter in module.parameters():
                parameter.copy_(parameter.main_grad)
    found = [
        (part.parameter.name, part.start, part.data.clone())
        for part in local_shards(model.modules, family_of_args(args), shape_of(args))
        if id(part.data) not in buffers
    ]
    total, count = reports[0]["lm loss"] if reports else (None, None)
    if args.context_parallel_size > 1 and reports:
        total, count = summed(total), summed(count)
    loss = total / count if reports else None
    rank = parallel_state.get_tensor_model_parallel_rank()
    losses = prediction_losses() if reports else None
    mtp = None if losses is None else losses[0].clone()
    MTPLossLoggingHelper.tracker.clear()
    if args.context_parallel_size > 1 and logits:
        logits[-1] = of_all_tokens(logits[-1], data["position_ids"])
    return {
        "loss": loss,
        "parts": found,
        "logits": (rank, logits[-1]) if logits else None,
        "mtp loss": mtp,
        "mtp logits": (rank, logits[0]) if logits else None,
    }


def of_all_tokens(part: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The tokens ``[b, s, v]`` of all context-parallel ranks, of those at some positions here."""
    whole = part.new_zeros(len(part), LENGTH, part.shape[-1])
    whole[torch.arange(len(part))[:, None], positions] = part
    return summed(whole)


def summed(part: torch.Tensor) -> torch.Tensor:
    """The sum over the context-parallel ranks."""
    from megatron.core import parallel_state

    whole = part.clone()
    dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole


def logits_of_each(folders: Sequence[str]) -> list[torch.Tensor | str]:
    """Logits of several models in one process; a message where one is refused."""
    from megatron.core import parallel_state

    from mindspeed.errors import MindSpeedError

    found: list[torch.Tensor | str] = []
    for folder in folders:
        try:
            found.append(logits(folder))
        except MindSpeedError as error:
            found.append(str(error))
        parallel_state.destroy_model_parallel()
    return found
