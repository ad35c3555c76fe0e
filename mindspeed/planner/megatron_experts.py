"""The experts' layer of a job, measured by every program that can run it.

    found = measure(args, watch)                    # {"megatron": 0.031, "overlap": 0.027, ...}
    write(Path("experts.json"), measured)           # mindspeed moe plan --measured experts.json

Router, experts and shared experts, forward and backward, with random weights, so with nearly even
routing. Attention is not there: programs of two micro-batches and of chunks of the sequence are not
measured.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist

from mindspeed import flags
from mindspeed.errors import ConfigError
from mindspeed.files import atomic_write_text
from mindspeed.job import Batch, Parallel, Precision
from mindspeed.journal import Journal
from mindspeed.json_fields import TEXT, Kind, MapOf, Real, Whole, check_declared
from mindspeed.models.model_config import ModelConfig
from mindspeed.moe.comparison import ENTRIES, LayerJob, compare, rates_of
from mindspeed.moe.request import LayerRequest
from mindspeed.moe.sizes import Sizes
from mindspeed.parsing import read_json
from mindspeed.planner.cluster.measured_device import Stopwatch

_NOT_COMPARED = ("node",)


@dataclass(frozen=True)
class MeasuredPrograms:
    """Seconds of a layer by program.

    Attributes:
        device: its name.
        dtype: of tokens.
        tp: tensor-parallel size of attention.
        sizes: of the layer.
        seconds: of forward and backward on the slowest rank.
    """

    device: Annotated[str, TEXT]
    dtype: Annotated[str, TEXT]
    tp: Annotated[int, Whole(1)]
    sizes: Annotated[Sizes, Kind(dict, "an object")]
    seconds: Annotated[Mapping[str, float], MapOf(Real(1e-12))]

    def check(self, sizes: Sizes, tp: int, where: str) -> None:
        """Refuse a measurement of another layer.

        Raises:
            ConfigError: names the size that differs.
        """
        for name in (one.name for one in fields(Sizes) if one.name not in _NOT_COMPARED):
            given, expected = getattr(self.sizes, name), getattr(sizes, name)
            if given != expected:
                raise ConfigError(
                    f"{where} was measured with {name} {given}, the plan has {expected}: measure "
                    "this job with mindspeed calibrate --experts"
                )
        if self.tp != tp:
            raise ConfigError(f"{where} was measured with --tp {self.tp}, the plan has {tp}")


def sizes_of(args: argparse.Namespace) -> Sizes:
    """Sizes of the layer of experts of a job with final values ``args``.

    Raises:
        ConfigError: it has none.
    """
    model = flags.read(ModelConfig, args)
    if not model.num_experts:
        raise ConfigError("--experts: the model has no experts")
    parallel = Parallel.of(args)
    tokens = model.seq_length // parallel.context * Batch.of(args).micro
    return Sizes(
        tokens=tokens // parallel.tensor,
        hidden=model.hidden_size,
        experts=model.num_experts,
        topk=model.moe_router_topk,
        ffn=model.moe_ffn_hidden_size or model.ffn_hidden_size,
        ep=parallel.expert,
        etp=parallel.expert_tensor,
        itemsize=Precision.of(args).element,
        shared=model.moe_shared_expert_intermediate_size or 0,
        gated=model.swiglu,
    )


def programs_of(sizes: Sizes, tp: int) -> list[str]:
    """Programs that one layer of these sizes can run without attention and a second micro-batch."""
    job = LayerJob(sizes, rates_of(1.0, _Nothing(), _Nothing()), tp)
    names = [
        name
        for name, entry in ENTRIES.items()
        if entry.exact and entry.order is None
        if not (entry.pair or entry.extended or entry.carrier)
    ]
    return [
        one.name for one in compare(job, names) if one.simulation and one.name != "hierarchical"
    ]


class _Nothing:
    def seconds(self, nbytes: float) -> float:
        """No time."""
        return 0.0


def measure(args: argparse.Namespace, watch: Stopwatch) -> MeasuredPrograms:
    """Time the programs of the layer on all ranks. Collective; groups of the job must exist.

    Args:
        watch: times a function on all ranks.
    """
    from mindspeed import device

    sizes, tp, dtype = sizes_of(args), Parallel.of(args).tensor, Precision.of(args).name
    here = device.current()
    seconds = {}
    for name in programs_of(sizes, tp):
        run = _step(args, name, sizes)
        slowest = torch.tensor(watch.time(run).seconds, device=here.torch_device())
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds[name] = slowest.item()
    return MeasuredPrograms(here.properties().name, dtype, tp, sizes, seconds)


def _step(args: argparse.Namespace, name: str, sizes: Sizes) -> Callable[[], object]:
    """Forward and backward of a layer by one program."""
    from mindspeed import device
    from mindspeed.moe.layer.megatron import change

    entry = ENTRIES[name]
    layer = _layer(args, entry.dispatcher)
    if entry.packed:
        hot = bool(entry.request.get("hot_experts"))  # their rows leave those that are sent
        request = LayerRequest(**entry.request, save=entry.policy, dropped=hot)
        change(layer, Journal(), **vars(request))
    where = {"device": device.current().torch_device(), "dtype": layer.config.params_dtype}
    x = torch.randn(sizes.tokens, 1, sizes.hidden, **where).requires_grad_()
    grad = torch.randn(sizes.tokens, 1, sizes.hidden, **where)

    def step() -> None:
        output, _ = layer(x)
        output.backward(grad)
        x.grad = None
        layer.zero_grad(set_to_none=True)

    return step


def _layer(args: argparse.Namespace, dispatcher: str) -> Any:
    from megatron.core.transformer.spec_utils import build_module

    from mindspeed import device
    from mindspeed.profiling.model_flops import moe_pattern
    from mindspeed.training.configs import transformer_config
    from mindspeed.training.model import layer_spec

    config = copy.copy(transformer_config(args))
    config.moe_token_dispatcher_type = dispatcher
    config.gradient_accumulation_fusion = False  # there is no main gradient
    config.num_layers, config.pipeline_model_parallel_size = len(moe_pattern(vars(args))), 1
    config.virtual_pipeline_model_parallel_size = None
    first = moe_pattern(vars(args)).index(True)
    block = layer_spec(args, config, None)
    layer = build_module(block.layer_specs[first].submodules.mlp, config=config)
    layer.set_layer_number(first + 1)
    return layer.to(device=device.current().torch_device(), dtype=config.params_dtype)


def write(out: Path, found: MeasuredPrograms) -> None:
    """Write a file that :func:`read` reads."""
    atomic_write_text(out, json.dumps(asdict(found), indent=2) + "\n")


def read(path: Path) -> MeasuredPrograms:
    """Read a measurement.

    Raises:
        ConfigError: it is none.
    """
    where = f"--measured {path}"
    values = read_json(path, where)
    if not isinstance(values, dict) or values.keys() != {x.name for x in fields(MeasuredPrograms)}:
        raise ConfigError(f"{where}: it is no file of mindspeed calibrate --experts")
    check_declared(values, MeasuredPrograms, where, ConfigError)
    names = {one.name for one in fields(Sizes)}
    if set(values["sizes"]) != names or not set(values["seconds"]) <= set(ENTRIES):
        raise ConfigError(f"{where}: it is of another release; measure again")
    return MeasuredPrograms(**{**values, "sizes": Sizes(**values["sizes"])})
