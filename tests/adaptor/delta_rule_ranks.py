"""Megatron's own gated delta net on this rank, with this library's operators and without."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.attention.sequence_sharding import zigzag


class Seen(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def built(ranks: int) -> Any:
    """The layer, which has the same weights on all context-parallel ranks."""
    from megatron.core import parallel_state
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, normalization="RMSNorm",
        add_bias_linear=False, activation_func=torch.nn.functional.silu, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6,
        linear_conv_kernel_dim=4, linear_attention_freq=1, use_cpu_initialization=True,
        experimental_attention_variant="gated_delta_net", gradient_accumulation_fusion=False,
        context_parallel_size=ranks,
    )  # fmt: skip
    parts = gated_delta_net.GatedDeltaNetSubmodules(
        in_proj=te.TELayerNormColumnParallelLinear,
        out_norm=te.TENorm,
        out_proj=te.TERowParallelLinear,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return gated_delta_net.GatedDeltaNet(config, parts, layer_number=1, pg_collection=groups)


def ours_and_formula() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Output and gradients: with the operators, and in deterministic mode with Megatron's code."""
    net = built(1)
    hidden = torch.randn(70, 2, 32, generator=torch.Generator().manual_seed(1))
    found = []
    for deterministic in (False, True):
        net.config.deterministic_mode = deterministic
        if deterministic and hasattr(net, "gated_delta_rule"):  # chosen when it is built, from 0.18
            module = sys.modules[type(net).__module__]
            net.gated_delta_rule = module.torch_chunk_gated_delta_rule
        x = hidden.clone().requires_grad_()
        with Seen() as seen:
            out, _ = net(x, None)
        assert ("mindspeed::gated_delta_rule" in seen.names) is not deterministic
        names, weights = zip(*net.named_parameters(), strict=True)
        grads = torch.autograd.grad(out.sin().sum(), (x, *weights))
        found.append({"out": out.detach(), **dict(zip(("x", *names), grads, strict=True))})
    return found[0], found[1]


def shared() -> dict[str, torch.Tensor]:
    """Output and gradients, of all ranks together, each of which has a part of the sequence."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    net = built(ranks)
    hidden = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1))
    rows = zigzag(16, ranks).positions(rank)
    x = hidden[rows].requires_grad_()
    out, _ = net(x, None)
    names, weights = zip(*net.named_parameters(), strict=True)
    dx, *grads = torch.autograd.grad(out.sin().sum(), (x, *weights))
    found = dict(zip(names, grads, strict=True))
    for name, part in (("out", out.detach()), ("x", dx)):
        found[name] = torch.zeros(16, 2, 32)
        found[name][rows] = part
    for value in found.values():
        dist.all_reduce(value)
    return found
