"""The Megatron side: adapters on a tiny LLaMA of any layout, loss and gradients of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

LENGTH, BATCH, VOCAB = 16, 4, 99
COMMON = (
    f"--seq-length={LENGTH}",
    "--micro-batch-size=2",
    f"--global-batch-size={BATCH}",
    "--lr=1",
    "--train-iters=1",
    "--mock-data",
    "--tokenizer-type=NullTokenizer",
    "--make-vocab-size-divisible-by=32",
    "--no-gradient-accumulation-fusion",
)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels ``[b, s]``."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def resolved(folder: str, flags: Sequence[str], world_size: int = 1) -> Any:
    """Final values of a run with the model of ``folder``."""
    from mindspeed.training.arguments import build_parser
    from mindspeed.training.data import load_tokenizer
    from mindspeed.training.recipe import parse_with_recipe
    from mindspeed.training.resolve import resolve

    args = parse_with_recipe([f"--model={folder}", *COMMON, *flags], build_parser())
    args = resolve(args, world_size).args
    load_tokenizer(args)
    return args


def built(folder: str, flags: Sequence[str]) -> tuple[Any, Any]:
    """Values and the model of this rank, its base weights read from ``folder``."""
    import torch.distributed as dist

    from mindspeed.adaptor import session
    from mindspeed.models.hf_load import load_hf
    from mindspeed.training import pretrain, setup
    from mindspeed.training.model import build

    args = resolved(folder, flags, dist.get_world_size())
    session.install().configure(vars(args))
    setup.initialize(args)
    pretrain.count_batches(args)
    model = build(args)
    load_hf(args, model.modules, folder)
    return args, model


def run(args: Any, model: Any) -> float | None:
    """Forward and backward passes of one step; the loss on the last stage."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from mindspeed.training.step import forward_step

    tokens, labels = batch()
    rank = parallel_state.get_data_parallel_rank()
    size = args.micro_batch_size
    count = get_num_microbatches()
    data = [
        {
            "tokens": t,
            "labels": y,
            "position_ids": torch.arange(LENGTH).expand_as(t),
            "attention_mask": None,
            "loss_mask": torch.ones(t.shape),
        }
        for t, y in zip(
            tokens.split(size)[rank * count :], labels.split(size)[rank * count :], strict=True
        )
    ]
    for chunk in model.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    single = len(model.chunks) == 1
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(data) if single else [iter(data) for _ in model.chunks],
        model=model.chunks[0] if single else model.chunks,
        num_microbatches=count,
        seq_length=args.seq_length,
        micro_batch_size=size,
        forward_only=False,
    )
    losses = torch.stack(reports) if reports else None
    return None if losses is None else (losses[:, 0].sum() / losses[:, 1].sum()).item()


def parts(model: Any) -> list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """Names, offsets, whole shapes and gradients of the trainable parameters of this rank."""
    from mindspeed.lora.state import sharded_state

    found = []
    for module in model.modules:
        named = dict(module.named_parameters())
        for name, tensor in sharded_state(module).items():
            grad = named[name].main_grad.clone()
            found.append((tensor.key, tensor.global_offset, tensor.global_shape, grad))
    return found


def loss_and_gradients(
    folder: str, adapter: str, flags: Sequence[str]
) -> tuple[float | None, list[Any]]:
    """Loss and gradients of a PEFT adapter on the model of ``folder``."""
    from mindspeed import lora

    args, model = built(folder, flags)
    lora.load(model.chunks, adapter)
    return run(args, model), parts(model)


def assembled(results: Sequence[tuple[Any, list[Any]]]) -> dict[str, torch.Tensor]:
    """Whole gradients from all ranks' parts."""
    whole: dict[str, torch.Tensor] = {}
    for _, found in results:
        for name, offset, shape, data in found:
            target = whole.setdefault(name, torch.full(shape, float("nan")))
            place = tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))
            target[place] = data
    return whole
