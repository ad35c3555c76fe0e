"""One mixture-of-experts layer on every rank: Megatron's own forward, and programs on its weights.

A job runs several variants of one layer, so a test starts ranks once.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch

HIDDEN, FFN, EXPERTS, TOKENS = 16, 24, 8, 12


@dataclass
class Result:
    """What one forward and backward gave on one rank."""

    output: torch.Tensor
    gradients: dict[str, torch.Tensor]  # "input" and parameters by name
    log: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


def layer_of(spec: str, **overrides: Any) -> Any:
    """A layer of Megatron with seeded weights; groups must exist.

    Args:
        spec: "te" or "local".
        **overrides: Of the transformer config.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    options = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2,
        "num_moe_experts": EXPERTS, "moe_ffn_hidden_size": FFN, "moe_router_topk": 2,
        "add_bias_linear": False, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": True, "bias_activation_fusion": False, "hidden_dropout": 0.0,
        **overrides,
    }  # fmt: skip
    config = TransformerConfig(**options)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=spec == "te")
    layer = build_module(block.layer_specs[0].submodules.mlp, config=config)
    layer.set_layer_number(1)
    _fill(layer)
    return layer.to(config.params_dtype)


def start(expert: int = 1, tensor: int = 1, expert_tensor: int = 1) -> None:
    """Make the groups of a layout."""
    from megatron.core import parallel_state, tensor_parallel

    from mindspeed import session

    session.install().configure({"moe_grouped_gemm": True})
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor, expert_model_parallel_size=expert, expert_tensor_parallel_size=expert_tensor
    )
    tensor_parallel.model_parallel_cuda_manual_seed(123)


def run(
    layer: Any,
    tokens: int | tuple[int, ...] = TOKENS,
    steps: int = 1,
    seed: int = 5,
    masked: bool = False,
    crowded: bool = False,
    training: bool = True,
    same: bool = False,
) -> Result:
    """Forward and backward on this rank's tokens; gradients of several steps are summed.

    Args:
        layer: The layer.
        tokens: Tokens of every rank, or of each.
        steps: Micro-batches.
        seed: Of the inputs; that of the router's noise is fixed.
        masked: Every third token is padding.
        crowded: The router's expert bias sends all tokens to the first two experts.
        training: Also a backward.
        same: All ranks have the tokens of the first.
    """
    import torch.distributed as dist

    torch.manual_seed(123)
    layer.train(training)
    if crowded:
        layer.router.expert_bias.copy_(torch.arange(EXPERTS) < 2).mul_(10)
    tokens = tokens if isinstance(tokens, int) else tokens[dist.get_rank()]
    arguments: dict[str, Any] = {}
    if masked:
        arguments["padding_mask"] = (torch.arange(tokens) % 3 == 1).view(1, -1)
    for parameter in layer.parameters():
        parameter.grad = None
    generator = torch.Generator().manual_seed(seed + (0 if same else dist.get_rank()))
    inputs = []
    width = layer.config.hidden_size
    for _ in range(steps):
        x = torch.randn(tokens, 1, width, generator=generator, dtype=torch.float32)
        inputs.append(x.to(layer.config.params_dtype).requires_grad_())
        with torch.set_grad_enabled(training):
            output, _ = layer(inputs[-1], **arguments)
        if not training:
            continue
        weight = torch.randn(output.shape, generator=generator, dtype=torch.float32)
        (output * weight.to(output.dtype)).sum().backward()
    gradients = {"input": inputs[-1].grad} if training else {}
    gradients |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return Result(output.detach(), gradients)


def parallel_of(layout: dict[str, int]) -> dict[str, Any]:
    """The fields of the transformer config for arguments of :func:`start`."""
    return {
        "expert_model_parallel_size": layout.get("expert", 1),
        "tensor_model_parallel_size": layout.get("tensor", 1),
        "expert_tensor_parallel_size": layout.get("expert_tensor", 1),
        "sequence_parallel": layout.get("tensor", 1) > 1,
    }


def compare(
    spec: str,
    layout: dict[str, int],
    overrides: dict[str, Any],
    variants: list[dict[str, Any]],
    frozen: str = "",
    **options: Any,
) -> list[Result]:
    """Megatron's own forward first, then one result for each variant.

    Args:
        spec: "te" or "local".
        layout: Arguments of :func:`start`.
        overrides: Of the transformer config.
        variants: Fields of ``LayerRequest`` each.
        frozen: Regular expression of the names of frozen parameters.
        **options: Of :func:`run`.
    """
    start(**layout)
    layer = layer_of(spec, **(parallel_of(layout) | overrides))
    return _variants(layer, variants, frozen, **options)


def compare_each(
    spec: str,
    layout: dict[str, int],
    cases: list[tuple[dict[str, Any], dict[str, Any]]],
    variants: list[dict[str, Any]],
) -> list[list[Result]]:
    """:func:`compare` for several layers of one layout.

    Args:
        spec: "te" or "local".
        layout: Arguments of :func:`start`.
        cases: Overrides of the transformer config, and options of :func:`run`, of each layer.
        variants: Fields of ``LayerRequest`` each.
    """
    start(**layout)
    layers = [layer_of(spec, **(parallel_of(layout) | overrides)) for overrides, _ in cases]
    return [
        _variants(layer, variants, **options)
        for layer, (_, options) in zip(layers, cases, strict=True)
    ]


def counted(
    layout: dict[str, int], overrides: dict[str, Any], variants: list[dict[str, Any] | None]
) -> list[Result]:
    """Runs under the ledger.

    ``extra`` has its ``calls``, ``counts`` of the router, [experts], and ``host_copies`` of a step.

    Args:
        layout: Arguments of :func:`start`.
        overrides: Of the transformer config.
        variants: Fields of ``LayerRequest`` each; None: Megatron's own forward.
    """
    from mindspeed.instruments.ledger import CommLedger
    from mindspeed.journal import Journal
    from mindspeed.moe import host_copy
    from mindspeed.moe.events import EventLog
    from mindspeed.moe.layer.megatron import change

    start(**layout)
    layer = layer_of("te", **(parallel_of(layout) | overrides))
    found = []
    layer.router.register_forward_hook(
        lambda module, args, output: found[-1].append(output[1].sum(0).tolist())
    )
    results = []
    for changes in variants:
        journal = Journal()
        log = None if changes is None else EventLog()
        if changes is not None:
            change(layer, journal, **changes)
            layer.forward.log = log
        found.append([])
        before, copies = host_copy.HostCopy.start, []
        host_copy.HostCopy.start = lambda *args: (copies.append(1), before(*args))  # noqa: B023
        with CommLedger() as ledger:
            results.append(run(layer))
        host_copy.HostCopy.start = before
        calls = [(call.op, call.phase, call.wire) for call in ledger.events]
        results[-1].log = log
        results[-1].extra = {"calls": calls, "counts": found[-1], "host_copies": len(copies)}
        journal.undo()
    return results


def with_weights(layout: dict[str, int], changes: dict[str, Any], tokens: int) -> Result:
    """One step of a program; ``extra`` has the ``weights``, ``input`` and ``output_weight``."""
    import torch.distributed as dist

    from mindspeed.journal import Journal
    from mindspeed.moe.layer.megatron import change

    start(**layout)
    layer = layer_of("te", **parallel_of(layout), moe_shared_expert_intermediate_size=20)
    change(layer, Journal(), **changes)
    result = run(layer, tokens)
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    x, weight = (torch.randn(tokens, 1, HIDDEN, generator=generator) for _ in range(2))
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    result.extra = {"weights": weights, "input": x, "output_weight": weight}
    return result


def padded_maps(maps: list[torch.Tensor], multiple: int) -> list[torch.Tensor]:
    """Routing maps, bool [n, experts], as Megatron's dispatcher pads them."""
    from megatron.core.transformer.moe.moe_utils import pad_routing_map

    return [pad_routing_map(routing_map.clone(), multiple) for routing_map in maps]


def _variants(
    layer: Any, variants: list[dict[str, Any]], frozen: str = "", **options: Any
) -> list[Result]:
    from mindspeed.journal import Journal
    from mindspeed.moe.events import EventLog
    from mindspeed.moe.layer.megatron import change

    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not frozen or re.search(frozen, name) is None)
    results = [run(layer, **options)]
    for changes in variants:
        journal = Journal()
        change(layer, journal, **changes)
        layer.forward.log = EventLog()
        results.append(run(layer, **options))
        results[-1].log = layer.forward.log
        journal.undo()
    return results


def compare_with(options: dict[str, Any], *args: Any) -> list[Result]:
    """:func:`compare` with options of :func:`run`."""
    return compare(*args, **options)


def _fill(layer: torch.nn.Module) -> None:
    """Weights by global name and expert, equal in every layout without tensor parallelism."""
    for name, parameter in layer.named_parameters():
        seed = zlib.crc32(name.encode())
        if "local_experts" in name or (".weight" in name and "experts.linear" in name):
            seed += layer.local_expert_indices[0]
        generator = torch.Generator().manual_seed(seed)
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
