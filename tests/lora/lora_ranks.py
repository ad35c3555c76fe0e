"""The Megatron side: adapters on a tiny LLaMA of any layout, loss and gradients of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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


def command(words: Sequence[str]) -> tuple[int, str]:
    """``mindspeed WORDS`` in a process that imported the adaptor first: status and messages."""
    import contextlib
    import io

    from mindspeed.cli.main import main

    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = main(list(words))
    return status, errors.getvalue()


def _source(folder: str) -> list[str]:
    return [f"--model={folder}", f"--load=hf:{folder}"]


def resolved(folder: str, flags: Sequence[str], world_size: int = 1) -> Any:
    """Final values of a run with the model of ``folder``."""
    from mindspeed.training.arguments import build_parser
    from mindspeed.training.recipe import parse_with_recipe
    from mindspeed.training.resolve import resolve
    from mindspeed.training.resolve_data import load_tokenizer

    args = parse_with_recipe([*_source(folder), *COMMON, *flags], build_parser())
    args = resolve(args, world_size).args
    load_tokenizer(args)
    return args


def built(folder: str, flags: Sequence[str]) -> tuple[Any, Any]:
    """Values and the model of this rank, its base weights read from ``folder``."""
    import torch.distributed as dist

    from mindspeed import session
    from mindspeed.models.hf_load import load_hf
    from mindspeed.training import pretrain, setup
    from mindspeed.training.model import build

    args = resolved(folder, flags, dist.get_world_size())
    session.install().configure(args)
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

    from mindspeed.training.forward_step import forward_step

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
    if not reports:
        return None
    total, count = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
    return (total / count).item()


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


def adapter_tensors(
    folder: str, adapter: str, flags: Sequence[str], save: str | None = None
) -> list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """Names, offsets, whole shapes and values of an adapter's tensors once it is loaded.

    ``save`` also writes it as a checkpoint.
    """
    from pathlib import Path

    from megatron.core import dist_checkpointing

    from mindspeed import lora
    from mindspeed.lora.config import DESCRIPTION
    from mindspeed.lora.state import description, sharded_state

    _, model = built(folder, flags)
    config = lora.load(model.chunks, adapter)
    (module,) = model.modules
    state = sharded_state(module)
    if save is not None:
        Path(save).mkdir()
        dist_checkpointing.save({"0": state}, save)
        Path(save, DESCRIPTION).write_text(description(model.chunks, config))
    return [(t.key, t.global_offset, t.global_shape, t.data.detach()) for t in state.values()]


def adapter_after_steps(
    folder: str, adapter: str, flags: Sequence[str]
) -> list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """The adapter's tensors after three steps of the optimizer on one batch."""
    from mindspeed import lora
    from mindspeed.lora.state import sharded_state

    args, model = built(folder, flags)
    lora.load(model.chunks, adapter)
    model.optimizer.reload_model_params()
    model.schedule.step(0)
    for _ in range(3):
        model.optimizer.zero_grad()
        run(args, model)
        model.optimizer.step()
    state = [t for module in model.modules for t in sharded_state(module).values()]
    return [(t.key, t.global_offset, t.global_shape, t.data.detach()) for t in state]


def assembled(results: Sequence[tuple[Any, list[Any]]]) -> dict[str, torch.Tensor]:
    """Whole gradients from all ranks' parts."""
    whole: dict[str, torch.Tensor] = {}
    for _, found in results:
        for name, offset, shape, data in found:
            target = whole.setdefault(name, torch.full(shape, float("nan")))
            place = tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))
            target[place] = data
    return whole


def train(folder: str, flags: Sequence[str]) -> None:
    """Train as ``mindspeed pretrain`` does."""
    import torch.distributed as dist

    from mindspeed.training.initialize import prepare
    from mindspeed.training.pretrain import pretrain

    pretrain(prepare([*_source(folder), *COMMON, *flags], dist.get_world_size()))


def logits(
    folder: str, adapter: str, flags: Sequence[str] = (), *, merge: bool = False
) -> torch.Tensor:
    """Logits ``[b, s, v]`` of the model with an adapter that is loaded into it."""
    from mindspeed import lora

    _, model = built(folder, flags)
    lora.load(model.chunks, adapter)
    if merge:
        lora.merge(model.chunks)
        assert not lora.adapted(model.chunks)
    tokens, _ = batch()
    positions = torch.arange(LENGTH).expand_as(tokens)
    with torch.no_grad():
        return model.modules[0].eval()(tokens, positions, None)[..., :VOCAB]


def merged_logits(folder: str, adapter: str, flags: Sequence[str] = ()) -> torch.Tensor:
    """The same with the adapter merged into the weights."""
    return logits(folder, adapter, flags, merge=True)


class Traffic(NamedTuple):
    """Tensor-parallel collectives of one rank in all micro-batches, and once per step."""

    calls: int
    bytes: int
    step_calls: int
    step_bytes: int


def communication(
    folder: str, flags: Sequence[str], targets: Sequence[str], r: int
) -> tuple[Traffic, Traffic]:
    """Of the frozen model, whose input carries gradients, and of the same with adapters."""
    from megatron.core import parallel_state

    from mindspeed import lora
    from mindspeed.lora.attach import _carry_gradients

    args, model = built(folder, flags)
    for module in model.modules:
        module.requires_grad_(False)
        _carry_gradients(module, ())
    frozen = _traffic(args, model)
    lora.attach(model.chunks, lora.LoraConfig(tuple(targets), r=r))
    adapted = _traffic(args, model)
    assert parallel_state.get_tensor_model_parallel_world_size() == 2
    return frozen, adapted


def _traffic(args: Any, model: Any) -> Traffic:
    from megatron.core import parallel_state

    from mindspeed.instruments import CommLedger
    from mindspeed.lora.linear import sum_partial_gradients

    group = parallel_state.get_tensor_model_parallel_group()
    model.config.finalize_model_grads_func = None
    with CommLedger() as layers:
        run(args, model)
    with CommLedger() as step:
        sum_partial_gradients(model.chunks)
    return Traffic(
        layers.calls(group=group),
        layers.bytes(group=group),
        step.calls(group=group),
        step.bytes(group=group),
    )


def sizes(folder: str, targets: Sequence[str], r: int) -> dict[str, int]:
    """Elements and bytes of what is trained, kept by the optimizer and stored.

    Without targets the whole model is trained.
    """
    from mindspeed.lora.state import sharded_state

    flags = ["--lora-target-modules", *targets, f"--lora-r={r}"] if targets else []
    args, model = built(folder, flags)
    run(args, model)
    model.optimizer.step()
    trainable = [p for m in model.modules for p in m.parameters() if p.requires_grad]
    states = model.optimizer.state_dict()["state"].values()
    moments = [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
    buffers = [b for chunk in model.chunks for b in chunk.buffers]
    return {
        "trainable": sum(p.numel() for p in trainable),
        "gradient bytes": sum(b.grad_data.nbytes for b in buffers),
        "optimizer bytes": sum(t.nbytes for t in moments if t.numel() > 1),
        "stored elements": sum(
            t.data.numel() for m in model.modules for t in sharded_state(m).values()
        ),
    }


def activations(folder: str, targets: Sequence[str], r: int) -> dict[str, int]:
    """Bytes that the forward pass of one micro-batch keeps, of full training and of adapters."""
    from mindspeed import lora
    from mindspeed.instruments import saved_for_backward

    _, model = built(folder, [])
    tokens, labels = (tensor[:2] for tensor in batch())
    positions = torch.arange(LENGTH).expand_as(tokens)

    def kept() -> int:
        with saved_for_backward(*model.modules) as saved:
            model.modules[0].train()(tokens, positions, None, labels=labels)
        return saved.bytes

    full = kept()
    lora.attach(model.chunks, lora.LoraConfig(tuple(targets), r=r))
    return {"full": full, "adapters": kept()}


def steps(folder: str, flags: Sequence[str]) -> dict[str, Any]:
    """Losses of three steps of plain training; bytes of weights, gradients, optimizer states."""
    import torch.distributed as dist

    from mindspeed import session
    from mindspeed.training import pretrain, setup
    from mindspeed.training.model import build

    flags = [*flags, "--micro-batch-size=1", "--lr=0.01", "--lr-decay-style=constant"]
    args = resolved(folder, flags, dist.get_world_size())
    session.install().configure(args)
    setup.initialize(args)
    pretrain.count_batches(args)
    model = build(args)
    pretrain.resume(args, model)
    losses = []
    for _ in range(3):
        model.optimizer.zero_grad()
        loss = torch.tensor(run(args, model))
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
        model.optimizer.step()
    return {"losses": losses, **_bytes_of(model)}


def planned(folder: str, flags: Sequence[str], ranks: int) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer states, as the planner counts them."""
    from mindspeed import session
    from mindspeed.planner.count.check import check

    args = resolved(folder, [*flags, "--micro-batch-size=1"], ranks)
    session.install().configure(args)
    static = check(args).fullest.static
    kinds = {"parameters": "weights", "gradients": "gradients", "optimizer": "optimizer"}
    return {name: static.get(kind, 0) for name, kind in kinds.items()}


def _bytes_of(model: Any) -> dict[str, int]:
    """Bytes that stay on this rank between steps."""
    from mindspeed.te.quantized_weight import stored

    (chunk,) = model.chunks
    groups = getattr(getattr(chunk, "param_and_grad_buffer", None), "parameter_groups", None)
    if groups is None:
        weights = sum(one.nbytes for p in chunk.parameters() for one in stored(p))
        gradients = sum(buffer.grad_data.nbytes for buffer in chunk.buffers)
    else:
        weights = sum(group.model_weight_buffer.data.nbytes for group in groups)
        gradients = sum(group.main_grad_buffer.data.nbytes for group in groups)
    optimizers = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
    states = (state for o in optimizers for state in o.optimizer.state.values())
    moments = (getattr(t, "_local_tensor", t) for s in states for t in s.values())
    kept = sum(t.nbytes for t in moments if isinstance(t, torch.Tensor) and t.numel() > 1)
    return {"parameters": weights, "gradients": gradients, "optimizer": kept}
