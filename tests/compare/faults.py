"""Faults planted into a Megatron job, and the tensor at which a comparison must name each.

A fault changes a built chunk of the model, or a function, on every rank or on one. What it changes
is inside a module's ``forward``, so that the hooks of a recording see what a real fault would show
them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

TP2 = "--tensor-model-parallel-size 2"
SP2 = f"{TP2} --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
VPP = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
CP2 = "--context-parallel-size 2"
DP2 = ""
ZERO = "--use-distributed-optimizer"
ANY = (SP2, TP2, PP2, VPP, CP2, ZERO)


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        plant: changes a chunk; gets the global rank.
        expected: passes, modules and kinds of the tensors one of which is named.
        layouts: flags of two ranks in which it exists.
        narrow: bf16 can show it.
    """

    plant: Callable[[Any, int], None]
    expected: tuple[tuple[str, str, str], ...]
    layouts: tuple[str, ...] = ANY
    narrow: bool = True
    flags: str = field(default="")


def at(chunk: Any, path: str) -> Any:
    """A module by its path in the whole model; None on other stages."""
    found = re.match(r"decoder\.layers\.(\d+)\.?(.*)", path)
    if found is None:
        first, _, _ = path.partition(".")
        return chunk.get_submodule(path) if hasattr(chunk, first) else None
    for layer in chunk.decoder.layers:
        if layer.layer_number - 1 == int(found[1]):
            return layer.get_submodule(found[2])
    return None


def around(path: str, change: Callable[..., Any]) -> Callable[[Any, int], None]:
    """A fault in a module: ``change(forward, rank, *args, **kwargs)`` instead of its forward."""

    def plant(chunk: Any, rank: int) -> None:
        module = at(chunk, path)
        if module is None:
            return
        forward = module.forward
        module.forward = lambda *args, **kwargs: change(forward, rank, *args, **kwargs)

    return plant


def output(path: str, change: Callable[[torch.Tensor, int], torch.Tensor]) -> Any:
    """A fault in what a module returns."""

    def changed(forward: Any, rank: int, *args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        if isinstance(result, tuple):
            return (change(result[0], rank), *result[1:])
        return change(result, rank)

    return around(path, changed)


def inside(path: str, change: Callable[[torch.Tensor, int], torch.Tensor], index: int = 0) -> Any:
    """A fault in what a module makes of an argument."""

    def changed(forward: Any, rank: int, *args: Any, **kwargs: Any) -> Any:
        args = (*args[:index], change(args[index], rank), *args[index + 1 :])
        return forward(*args, **kwargs)

    return around(path, changed)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


def gradient(path: str, factor: Callable[[int], float]) -> Any:
    """A fault in the gradient of a module's input."""
    return inside(path, lambda x, rank: _WrongGradient.apply(x, factor(rank)))


def flipped(x: torch.Tensor, rank: int) -> torch.Tensor:
    """One exponent bit of one value, on rank 1."""
    if rank != 1:
        return x
    y = x.detach().clone(memory_format=torch.contiguous_format)
    kind, bit = (torch.int32, 28) if x.element_size() == 4 else (torch.int16, 12)
    y.view(-1)[7:8].view(kind).bitwise_xor_(1 << bit)
    return x + (y - x.detach())


def on_rank_1(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda x, rank: change(x) if rank == 1 else x


def eps(chunk: Any, rank: int) -> None:
    if (module := at(chunk, "decoder.layers.1.pre_mlp_layernorm")) is not None:
        module.eps = 3e-3


def small_eps(chunk: Any, rank: int) -> None:
    if (module := at(chunk, "decoder.layers.1.pre_mlp_layernorm")) is not None:
        module.eps = 1.2e-5


def gelu(chunk: Any, rank: int) -> None:
    if (module := at(chunk, "decoder.layers.2.mlp")) is not None:
        module.config = copy.copy(module.config)
        module.config.activation_func = torch.nn.functional.gelu


def residual(chunk: Any, rank: int) -> None:
    if (module := at(chunk, "decoder.layers.2")) is None:
        return
    add = module.self_attn_bda

    def changed(*given: Any) -> Any:
        function = add(*given)
        return lambda x, kept, p: function(x, kept * 0.97, p)

    module.self_attn_bda = changed


def received(chunk: Any, rank: int) -> None:
    take = chunk.set_input_tensor

    def rolled(tensor: Any) -> Any:
        first = tensor[0] if isinstance(tensor, list) else tensor
        return take(None if first is None else first.roll(1, 0))

    if not chunk.pre_process:
        chunk.set_input_tensor = rolled


def tokens(chunk: Any, rank: int) -> None:
    def other(module: Any, args: Any) -> Any:
        if args[0] is None:
            return None
        wrong = args[0].clone()
        wrong[0, 5] += 1
        return (wrong, *args[1:])

    chunk.register_forward_pre_hook(other)


def labels(chunk: Any, rank: int) -> None:
    def other(module: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("labels") is None:
            return None
        return args, {**kwargs, "labels": kwargs["labels"].roll(1, 1)}

    chunk.register_forward_pre_hook(other, with_kwargs=True)


def parameter_gradient(path: str, change: Callable[[torch.Tensor, int, int], Any]) -> Any:
    """A fault in the gradients of weights; ``change`` gets the call's number, too."""

    def plant(chunk: Any, rank: int) -> None:
        for name, parameter in chunk.named_parameters():
            kind = name.rpartition(".")[2]
            owner = at(chunk, path) if path else None
            if path and (owner is None or getattr(owner, kind, None) is not parameter):
                continue
            count = [0]

            def hook(x: torch.Tensor, count: list[int] = count) -> Any:
                count[0] += 1
                return change(x, rank, count[0])

            parameter.register_hook(hook)

    return plant


def not_summed(chunk: Any, rank: int) -> None:
    if (module := at(chunk, "decoder.layers.1.pre_mlp_layernorm")) is not None:
        module.weight.sequence_parallel = False


def learning_rate(chunk: Any, rank: int) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler as Schedule

    right = Schedule.get_lr
    Schedule.get_lr = lambda *given: 1.01 * right(*given)


def gradient_norm(chunk: Any, rank: int) -> None:
    from megatron.core.optimizer import optimizer

    right = optimizer.get_grad_norm_fp32
    optimizer.get_grad_norm_fp32 = lambda *given, **named: 1.001 * right(*given, **named)


def little_disk(chunk: Any, rank: int) -> None:
    import shutil
    from types import SimpleNamespace

    shutil.disk_usage = lambda path: SimpleNamespace(free=1000)


F, B, E, W = "forward", "backward", "end", "begin"
ATTENTION = "decoder.layers.2.self_attention.core_attention"
QKV = "decoder.layers.2.self_attention.linear_qkv"
PROJ = "decoder.layers.1.self_attention.linear_proj"
FC1, FC2 = "decoder.layers.3.mlp.linear_fc1", "decoder.layers.2.mlp.linear_fc2"
NORM = "decoder.layers.1.pre_mlp_layernorm"

FAULTS: dict[str, Fault] = {
    "attention scale": Fault(inside(ATTENTION, lambda x, r: x * 1.03), ((F, ATTENTION, "output"),)),
    "attention scale by 1 %": Fault(
        inside(ATTENTION, lambda x, r: x * 1.01), ((F, ATTENTION, "output"),), narrow=False
    ),
    "keys of another position": Fault(
        inside(ATTENTION, lambda x, r: x.roll(1, 0), 1), ((F, ATTENTION, "output"),)
    ),
    "values exchanged on one rank": Fault(
        inside(ATTENTION, on_rank_1(lambda x: x.roll(1, 0)), 2),
        ((F, ATTENTION, "output"),),
        (TP2, SP2, CP2),
    ),
    "values of one sample": Fault(
        inside(ATTENTION, lambda x, r: torch.cat([x[:, :1], x[:, :1]], 1), 2),
        ((F, ATTENTION, "output"),),
    ),
    "rotary offset": Fault(
        output("rotary_pos_emb", lambda x, r: x.roll(1, 0)),
        ((F, "decoder.layers.0.self_attention.core_attention", "query"),
         (F, "decoder.layers.0.self_attention.core_attention", "key")),
    ),
    "rotary base": Fault(
        output("rotary_pos_emb", lambda x, r: x * 1.1),
        ((F, "decoder.layers.0.self_attention.core_attention", "query"),
         (F, "decoder.layers.0.self_attention.core_attention", "key")),
    ),
    "norm eps": Fault(eps, ((F, NORM, "output"),)),
    "norm eps, small": Fault(small_eps, ((F, NORM, "output"),), narrow=False),
    "norm plus 2 %": Fault(output(NORM, lambda x, r: x * 1.02), ((F, NORM, "output"),)),
    "missing all-reduce": Fault(
        inside(PROJ, on_rank_1(lambda x: x * 0)), ((F, PROJ, "output"),), (SP2, TP2)
    ),
    "product in bf16": Fault(
        output(FC1, lambda x, r: x.bfloat16().to(x.dtype)), ((F, FC1, "output"),), narrow=False
    ),
    "not a number": Fault(
        output(FC1, lambda x, r: torch.cat([x[:1] * float("nan"), x[1:]])), ((F, FC1, "output"),)
    ),
    "another activation": Fault(gelu, ((F, "decoder.layers.2.mlp.linear_fc2", "input"),)),
    "residual scaled": Fault(residual, ((F, "decoder.layers.2.pre_mlp_layernorm", "input"),)),
    "embedding scaled": Fault(
        output("embedding", lambda x, r: x * 1.02), ((F, "embedding", "output"),)
    ),
    "logits scaled": Fault(
        output("output_layer", lambda x, r: x * 1.05), ((F, "output_layer", "output"),)
    ),
    "logits of one rank": Fault(
        output("output_layer", on_rank_1(lambda x: x * 1.05)),
        ((F, "output_layer", "output"),),
        (TP2, SP2),
    ),
    "columns exchanged": Fault(
        output(QKV, lambda x, r: x.roll(8, -1)), ((F, QKV, "output"),)
    ),
    "one bit in fc2": Fault(output(FC2, flipped), ((F, FC2, "output"),), (TP2, SP2, CP2)),
    "one bit in attention": Fault(
        output(ATTENTION, flipped), ((F, ATTENTION, "output"),), (TP2, SP2, CP2)
    ),
    "a row lost": Fault(
        output(FC2, lambda x, r: torch.cat([x[:1] * 0, x[1:]])), ((F, FC2, "output"),)
    ),
    "stage receives other rows": Fault(
        received,
        ((F, "decoder.layers.2.input_layernorm", "output"),
         (F, "decoder.layers.1.input_layernorm", "output")),
        (PP2, VPP),
    ),
    "other tokens": Fault(tokens, ((F, "data", "tokens"),)),
    "other labels": Fault(labels, ((F, "data", "labels"),)),
    "gradient of fc1's input": Fault(
        gradient(FC1, lambda r: 0.9),
        ((B, "decoder.layers.3.pre_mlp_layernorm", "grad_output"),),
    ),
    "gradient of one rank": Fault(
        gradient(FC1, lambda r: 0.5 if r == 1 else 1.0),
        ((B, "decoder.layers.3.pre_mlp_layernorm", "grad_output"),),
        (TP2, SP2, CP2),
    ),
    "gradient of attention's keys": Fault(
        inside(ATTENTION, lambda x, r: _WrongGradient.apply(x, 0.8), 1),
        ((B, ATTENTION, "grad_key"),),
    ),
    "gradient of attention's values": Fault(
        inside(ATTENTION, lambda x, r: _WrongGradient.apply(x, 1.2), 2),
        ((B, ATTENTION, "grad_value"),),
    ),
    "gradient of the loss": Fault(
        gradient("output_layer", lambda r: 2.0),
        ((B, "decoder.final_layernorm", "grad_output"),),
    ),
    "micro-batch lost": Fault(
        parameter_gradient("", lambda x, r, n: x * 0 if n == 1 else None), ((E, "", "main_grad"),)
    ),
    "gradients doubled": Fault(
        parameter_gradient("", lambda x, r, n: x * 2), ((E, "", "main_grad"),)
    ),
    "one gradient lost": Fault(
        parameter_gradient(PROJ, lambda x, r, n: x * 0 if n == 2 else None),
        ((E, PROJ, "main_grad"),),
    ),
    "gradient of one data rank": Fault(
        parameter_gradient(PROJ, lambda x, r, n: x * 0 if r == 1 else None),
        ((E, PROJ, "main_grad"),),
        (ZERO, DP2, CP2),
    ),
    "learning rate": Fault(learning_rate, ((E, "optimizer", "learning_rate"),)),
    "gradient norm": Fault(gradient_norm, ((E, "optimizer", "grad_norm"),)),
    "norm's gradient not summed": Fault(not_summed, ((E, NORM, "main_grad"),), (SP2,)),
}  # fmt: skip

SITUATIONS = {"little disk": Fault(little_disk, ())}
"""Planted like faults, of which there is nothing to find."""
