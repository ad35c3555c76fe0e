"""GPT models that recompute, inside rank processes: results, collectives, FLOPs, bytes, time."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from mindspeed.instruments import CommLedger, Link, VirtualClock, saved_for_backward
from tests.memory.memory_ranks import differences
from tests.support import gpt_ranks

FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
MLP = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
OFF: dict[str, Any] = {}


def flags(recompute: dict[str, Any], level: int) -> dict[str, Any]:
    """Arguments that recompute at a level."""
    return {**recompute, "optimize_recomp_communication_level": level}


@contextlib.contextmanager
def configured(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The features of some arguments attached; gives Megatron's arguments as they then are."""
    from mindspeed import session

    active = session.install()
    arguments = {**values, **active.configure(values).corrections}
    names = {*FULL, *MLP}
    try:
        yield {name: arguments[name] for name in names if arguments.get(name) is not None}
    finally:
        active.detach_features()


def _results(model: torch.nn.Module, passes: int) -> dict[str, Any]:
    """Losses, gradients, random states, and the collectives of each phase."""
    from megatron.core.tensor_parallel import random

    random.model_parallel_cuda_manual_seed(123)
    torch.manual_seed(5)
    with CommLedger() as ledger:
        tokens, positions, labels = gpt_ranks.batch()
        losses = [model(tokens, positions, None, labels=labels) for _ in range(passes)]
        for loss in losses:
            loss.sum().backward()
    grads = {name: p.grad for name, p in gpt_ranks.weights_of(model).items()}
    states = {**random.get_cuda_rng_tracker().get_states(), "default": torch.get_rng_state()}
    calls = Counter((event.phase, event.op) for event in ledger.events)
    return {"loss": torch.stack(losses).detach(), **grads, **states, "calls": calls}


def compared(
    name: str,
    spec: str,
    ways: dict[str, dict[str, Any]],
    overrides: dict[str, Any],
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What differs from a model that keeps everything, and the collectives of each phase.

    Args:
        name: Of the model's configuration.
        spec: Of its layers.
        ways: Arguments by title.
        overrides: Options of the transformer config.
        more: ``frozen``: parameters with this in their names are not trained; ``lora``: layers with
            an adapter; ``passes``: forward passes before their backward passes; ``base``: arguments
            of the model that keeps everything.
    """
    import torch.distributed as dist

    size, more = dist.get_world_size(), more or {}
    frozen, lora = more.get("frozen"), more.get("lora")
    gpt_ranks.start(size)
    found: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for title, values in {"kept": more.get("base", OFF), **ways}.items():
        with configured(values) as arguments:
            options = {"tensor_model_parallel_size": size, **overrides, **arguments}
            model = gpt_ranks.build(gpt_ranks.config(name, **options), spec)
            for path, parameter in model.named_parameters():
                parameter.requires_grad_(not frozen or frozen not in path)
            if lora:
                _adapt(model, lora)
            ours = _results(model, more.get("passes", 1))
        calls = ours.pop("calls")
        plain = plain or ours
        found[title] = {"differ": differences(ours, plain), "calls": calls}
    return found


def with_a_reader(what: str) -> dict[str, Any]:
    """A model at level 2 in which something reads the output of the MLP's last linear layer.

    Args:
        what: ``hook`` (of that layer), ``norm after the sublayer`` or ``class`` (of the layer).

    Returns:
        What differs from the model that keeps everything, and reductions of the second run.
    """
    import torch.distributed as dist
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.transformer_layer import TransformerLayer

    gpt_ranks.start(dist.get_world_size())

    class OtherLayer(TransformerLayer):
        def _forward_post_mlp(self, output_with_bias: Any, residual: Any) -> Any:
            output, bias = output_with_bias
            return super()._forward_post_mlp((output * output.sigmoid(), bias), residual)

    def scaled(training: bool, fused: bool) -> Any:
        add = get_bias_dropout_add(training, fused)

        def run(output_with_bias: Any, residual: Any, prob: float) -> Any:
            output, bias = output_with_bias
            return add(
                (output / output.square().mean(-1, keepdim=True).sqrt(), bias), residual, prob
            )

        return run

    block_spec = gpt_layer_specs.get_gpt_decoder_block_spec

    def changed_spec(*args: Any, **options: Any) -> Any:
        block = block_spec(*args, **options)
        for layer in block.layer_specs:
            if what == "class":
                layer.module = OtherLayer
            elif what != "hook":
                layer.submodules.mlp_bda = layer.submodules.self_attn_bda = scaled
        return block

    found = []
    gpt_layer_specs.get_gpt_decoder_block_spec = changed_spec
    try:
        for values in (OFF, flags(FULL, 2)):
            with configured(values) as arguments:
                options = {"tensor_model_parallel_size": dist.get_world_size(), **arguments}
                model = gpt_ranks.build(gpt_ranks.config("rmsnorm-swiglu-gqa", **options), "te")
                for module in model.modules() if what == "hook" else ():
                    if hasattr(module, "linear_fc2"):
                        module.linear_fc2.register_forward_hook(_times_sigmoid)
                found.append(_results(model, 1))
    finally:
        gpt_layer_specs.get_gpt_decoder_block_spec = block_spec
    found[0].pop("calls")
    ours = found[1].pop("calls")
    return {
        "differ": differences(found[1], found[0]),
        "reduced again": ours["recompute", "all_reduce"],
    }


def _times_sigmoid(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
    return output[0] * output[0].sigmoid(), output[1]


def _adapt(model: torch.nn.Module, targets: tuple[str, ...]) -> None:
    from mindspeed import lora

    lora.attach([model], lora.LoraConfig(targets, r=4))
    generator = torch.Generator().manual_seed(3)
    for path, parameter in model.named_parameters():
        if "lora_" in path:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


SIZES = {"s": 64, "b": 2, "h": 128, "layers": 2}
PEAK = 1e12
LINK = Link(10e9, latency=0.0)


def costs(
    spec: str, ways: dict[str, dict[str, Any]], overrides: dict[str, Any], frozen: bool = False
) -> dict[str, dict[str, Any]]:
    """Of one forward and backward pass of a decoder with two layers.

    Args:
        spec: Of its layers.
        ways: Arguments by title.
        overrides: Options of the transformer config.
        frozen: No parameter is trained.

    Returns:
        By title ``wire``: bytes that the rank sends, by phase; ``flops``: likewise; ``time`` and
        ``exposed``: seconds of the clock; ``saved``: bytes kept for backward.
    """
    import torch.distributed as dist

    gpt_ranks.start(dist.get_world_size())
    return {title: _costs(spec, values, overrides, frozen) for title, values in ways.items()}


def _costs(
    spec: str, values: dict[str, Any], overrides: dict[str, Any], frozen: bool
) -> dict[str, Any]:
    import torch.distributed as dist
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    size = dist.get_world_size()
    options = {
        "num_layers": SIZES["layers"],
        "hidden_size": SIZES["h"],
        "num_attention_heads": 16,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "tensor_model_parallel_size": size,
    }
    with configured(values) as arguments:
        cfg = TransformerConfig(**options | overrides | arguments)
        block = get_gpt_decoder_block_spec(cfg, use_transformer_engine=spec == "te")
        torch.manual_seed(1)
        model = GPTModel(cfg, block, 512, SIZES["s"], position_embedding_type="none")
        model.requires_grad_(not frozen)
        rows = SIZES["s"] // (size if cfg.sequence_parallel else 1)
        x = torch.randn(rows, SIZES["b"], SIZES["h"], requires_grad=True).neg()  # not a leaf
        with VirtualClock(PEAK, LINK) as clock, CommLedger() as ledger:
            with saved_for_backward(model) as saved:
                y = model.decoder(x, None)
                kept = saved.live_bytes
            y.sum().backward()
    wire, flops = Counter[str](), Counter[str]()
    for event in ledger.events:
        wire[event.phase] += event.wire
    for interval in clock.select("compute"):
        flops[interval.phase] += round(interval.seconds * PEAK)
    found = {"wire": dict(wire), "flops": dict(flops)}
    return {**found, "time": clock.now, "exposed": clock.exposed, "saved": kept}
