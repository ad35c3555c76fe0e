"""Plans on GPT models, run inside rank processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mindspeed.instruments import saved_for_backward
from mindspeed.journal import Journal
from mindspeed.memory import segment
from mindspeed.memory.megatron import install, layers_of, sites_of
from mindspeed.memory.plan import LAYER, ChunkPlan, SiteAction
from tests.support import gpt_ranks


def _step(model: torch.nn.Module) -> dict[str, Any]:
    """Loss, gradients, and the random states afterwards."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    get_moe_layer_wise_logging_tracker().clear()
    random.model_parallel_cuda_manual_seed(123)
    torch.manual_seed(5)
    with saved_for_backward(model) as saved:
        tokens, positions, labels = gpt_ranks.batch()
        loss = model(tokens, positions, None, labels=labels)
        kept, host, dropped = saved.live_bytes, saved.live_host_bytes, saved.dropped_bytes
    loss.sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    losses = {
        name: entry["values"].clone()
        for name, entry in get_moe_layer_wise_logging_tracker().items()
    }
    states = {**random.get_cuda_rng_tracker().get_states(), "default": torch.get_rng_state()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {
        "results": {"loss": loss.detach(), **grads, **losses, **states, **buffers},
        "bytes": (kept, host, dropped, saved.live_bytes, saved.live_host_bytes),
    }


@contextlib.contextmanager
def alive_after_second_runs(model: torch.nn.Module) -> Iterator[list[tuple[int, ...]]]:
    """Fill a list with the shapes of what second runs computed in the block and outlives it."""
    captured: list[Any] = []
    call = segment._Capture.__call__
    exist = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}

    def watched(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in exist:
            captured.append((StorageWeakRef(storage), tuple(tensor.shape)))
        return call(self, tensor)

    alive: list[tuple[int, ...]] = []
    segment._Capture.__call__ = watched
    try:
        yield alive
    finally:
        segment._Capture.__call__ = call
    end = time.monotonic() + 10  # a thread of gloo that gets no core holds a tensor for longer
    while not all(reference.expired() for reference, _ in captured) and time.monotonic() < end:
        time.sleep(0.01)
    alive += [shape for reference, shape in captured if not reference.expired()]


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is not equal bit for bit."""
    if one.keys() != other.keys():
        return [f"keys {sorted(one.keys() ^ other.keys())}"]
    return [
        name
        for name, value in one.items()
        if (value is None) != (other[name] is None)
        or (value is not None and not torch.equal(value, other[name]))
    ]


def under_plans(
    name: str, spec: str, plans: dict[str, dict[str, str]], overrides: dict[str, Any]
) -> dict[str, Any]:
    """Bytes of each plan (the same sites in all layers), and what differs from no plan."""
    import torch.distributed as dist

    size = dist.get_world_size()
    gpt_ranks.start(size)
    cfg = gpt_ranks.config(name, tensor_model_parallel_size=size, **overrides)
    model = gpt_ranks.build(cfg, spec)
    plain = _step(model)
    found: dict[str, Any] = {"no plan": plain["bytes"]}
    for title, sites in plans.items():
        journal = Journal()
        actions = {site: SiteAction(action) for site, action in sites.items()}
        layers = layers_of(model)
        plan = ChunkPlan(
            {
                path: {site: act for site, act in actions.items() if site in sites_of(layer)}
                for path, layer in layers.items()
            }
        )
        runtime = install(model, plan, journal, min_bytes=0)
        with alive_after_second_runs(model) as alive:
            ours = _step(model)
        figures = runtime.figures.total()
        journal.undo()
        found[title] = {
            "differ": differences(ours["results"], plain["results"]),
            "bytes": ours["bytes"],
            "figures": figures,
            "alive": alive,
            "planned": sum(len(sites) for sites in plan.layers.values()),
        }
    found["again"] = differences(_step(model)["results"], plain["results"])
    return found


def under_random_plans(
    name: str, spec: str, overrides: dict[str, Any], number: int, seed: int
) -> dict[str, list[str] | str]:
    """What differs from no plan under plans of random sites and actions: plan -> names or error."""
    import random

    import torch.distributed as dist

    size = dist.get_world_size()
    gpt_ranks.start(size)
    model = gpt_ranks.build(
        gpt_ranks.config(name, tensor_model_parallel_size=size, **overrides), spec
    )
    plain = _step(model)["results"]
    draw, found = random.Random(seed), {}
    for _ in range(number):
        share, journal = draw.choice((0.1, 0.3, 0.7)), Journal()
        plan = ChunkPlan(
            {
                path: {
                    site: draw.choice(
                        [a for a in SiteAction if site != LAYER or a.value != "recompute_output"]
                    )
                    for site in sites_of(layer)
                    if draw.random() < share
                }
                for path, layer in layers_of(model).items()
            }
        )
        first, second = _halves(plan, draw)
        try:
            install(model, first, journal, min_bytes=0)
            install(model, second, journal, min_bytes=0)
            found[plan.to_json()] = differences(_step(model)["results"], plain)
        except Exception as error:  # the plan belongs to the report
            found[plan.to_json()] = f"{type(error).__name__}: {error}"
            model.zero_grad()
        journal.undo()
    return found


def _halves(plan: ChunkPlan, draw: Any) -> tuple[ChunkPlan, ChunkPlan]:
    """The plan as two flags would give it."""
    first: dict[str, dict[str, SiteAction]] = {}
    second: dict[str, dict[str, SiteAction]] = {}
    for layer, site, action in plan.actions():
        draw.choice((first, second)).setdefault(layer, {})[site] = action
    return ChunkPlan(first), ChunkPlan(second)


def trained(flags: list[str]) -> dict[str, Any]:
    """Train on this rank: what the parameters became, and what the plans did."""
    import os

    from mindspeed.cli.pretrain import _prepare
    from mindspeed.memory.megatron import runtime_of
    from mindspeed.training.model import gpt_model
    from mindspeed.training.pretrain import pretrain
    from tests.support.trainer_job import digest
    from tests.training.matrix_job import MODEL, TRAINING

    modules = []

    def provider(*given: Any) -> Any:
        modules.append(gpt_model(*given))
        return modules[-1]

    pretrain(_prepare([*MODEL, *TRAINING, *flags], int(os.environ["WORLD_SIZE"])), provider)
    runtimes = [runtime for module in modules if (runtime := runtime_of(module)) is not None]
    figures = [runtime.figures.total() for runtime in runtimes]
    return {
        "digest": digest(modules),
        "plans": [runtime.plan.to_json() for runtime in runtimes],
        "reruns": sum(figure.reruns for figure in figures),
        "host": sum(figure.host for figure in figures),
        "copied_in": sum(figure.copied_in for figure in figures),
        "live": [runtime.offload.live for runtime in runtimes],
    }


def swapped(flags: list[str]) -> dict[str, Any]:
    """Like :func:`trained`; ``copies_before`` is how many copies there were at the last slab."""
    from mindspeed.memory.host_pool import HostPool
    from mindspeed.memory.offload import Offload

    copies, copies_before = 0, 0
    save, add_slab = Offload.save, HostPool._add_slab

    def counted_save(*args: Any) -> Any:
        nonlocal copies
        copies += 1
        return save(*args)

    def noted_slab(pool: HostPool, size: int) -> None:
        nonlocal copies_before
        copies_before = copies
        add_slab(pool, size)

    journal = Journal()
    journal.set(Offload, "save", counted_save, owner="test")
    journal.set(HostPool, "_add_slab", noted_slab, owner="test")
    journal.set(HostPool.__init__, "__kwdefaults__", {"slab": 1 << 14}, owner="test")
    try:
        return {**trained(flags), "copies": copies, "copies_before": copies_before}
    finally:
        journal.undo()


def calls_in_flight(samples: int) -> dict[str, int]:
    """Of this pipeline stage: with 3 layers, and with 3 and 2 layers in two chunks."""
    from megatron.core import parallel_state

    from mindspeed.memory.megatron_in_flight import layer_calls_in_flight

    parallel_state.initialize_model_parallel(1, 2, 2)
    options = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    plain = gpt_ranks.config("rmsnorm-swiglu-gqa", **options)
    options["virtual_pipeline_model_parallel_size"] = 2
    virtual = gpt_ranks.config("rmsnorm-swiglu-gqa", num_layers=4, **options)
    return {
        "1F1B": layer_calls_in_flight({0: 3}, (samples, 1), plain),
        "interleaved": layer_calls_in_flight({0: 3, 1: 2}, (samples, 1), virtual),
        "unknown size": layer_calls_in_flight({0: 3, 1: 2}, (None, None), virtual),
    }


def refused(flags: list[str], fraction: float | None = None) -> str:
    """Train with swapping; returns the error, with ``fraction`` of the host's memory to use."""
    from mindspeed.memory import host_pool
    from tests.support.trainer_job import train

    journal = Journal()
    if fraction is not None:
        journal.set(host_pool, "FRACTION", fraction, owner="test")
    try:
        return str(train(flags)["error"])
    finally:
        journal.undo()


def saved_bytes(
    flags: dict[str, Any], spec: str, sizes: dict[str, int], overrides: dict[str, Any]
) -> dict[str, int]:
    """Bytes kept for backward by a LLaMA-like bf16 model under the flags, by place, and by layer.

    Args:
        flags: Of :func:`mindspeed.configure`.
        spec: ``te`` or ``local``.
        sizes: ``s b h F a g`` and ``L``.
        overrides: Further options of the transformer config.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    import mindspeed
    from mindspeed import session
    from mindspeed.memory.megatron import runtime_of

    mindspeed.configure(**flags)
    size = dist.get_world_size()
    if not parallel_state.model_parallel_is_initialized():
        gpt_ranks.start(size)
    options = {
        "num_layers": sizes["L"],
        "hidden_size": sizes["h"],
        "ffn_hidden_size": sizes["F"],
        "num_attention_heads": sizes["a"],
        "num_query_groups": sizes["g"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": False,
        "tensor_model_parallel_size": size,
        "sequence_parallel": size > 1,
        **overrides,
    }
    cfg = TransformerConfig(**options)
    layers = get_gpt_decoder_block_spec(cfg, use_transformer_engine=spec == "te")
    torch.manual_seed(1)
    model = GPTModel(cfg, layers, 512, sizes["s"], position_embedding_type="rope").bfloat16()
    with saved_for_backward(model) as saved:
        hidden = model.decoder(
            torch.randn(sizes["s"] // size, sizes["b"], sizes["h"], dtype=torch.bfloat16)
            .requires_grad_()
            .neg(),  # of the embedding, not a leaf
            None,
            rotary_pos_emb=model.rotary_pos_emb(sizes["s"]),
        )
        found = {"device": saved.live_bytes, "host": saved.live_host_bytes}
    runtime = runtime_of(model)
    if runtime is not None:
        total = runtime.figures.total()
        found |= {"dropped": total.dropped, "kept": total.kept}
    hidden.float().sum().backward()
    if runtime is not None:
        total = runtime.figures.total()
        found |= {"copied_in": total.copied_in, "copied_out": total.copied_out}
    session.current().detach_features()
    return found


def conflict() -> str:
    """What is said about two plans that disagree."""
    gpt_ranks.start()
    model = gpt_ranks.build(gpt_ranks.config("rmsnorm-swiglu-gqa"), "te")
    journal = Journal()
    first = ChunkPlan({"decoder.layers.0": {"mlp": SiteAction.OFFLOAD}})
    install(model, first, journal, owner="--first")
    install(model, first, journal, owner="--again")
    try:
        second = ChunkPlan({"decoder.layers.0": {"mlp": SiteAction.RECOMPUTE}})
        install(model, second, journal, owner="--second")
    except ValueError as error:
        return str(error).replace("--again", "--first")
    finally:
        journal.undo()
    return ""


def disagreement() -> str:
    """What is said about a plan file that differs between ranks."""
    import torch.distributed as dist

    from mindspeed.errors import TrainingError
    from mindspeed.memory.megatron import refuse_different_plans

    gpt_ranks.start(dist.get_world_size())
    same = ChunkPlan({"decoder.layers.0": {"mlp": SiteAction.RECOMPUTE}})
    refuse_different_plans(same, "--activation-plan")
    try:
        refuse_different_plans(same if dist.get_rank() else ChunkPlan(), "--activation-plan")
    except TrainingError as error:
        return str(error)
    return ""
