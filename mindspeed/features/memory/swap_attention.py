"""``--swap-attention``: what attention and the norms save waits in host memory until backward.

Saved tensors are copied to the host on a stream of their own while the next layers compute, and
come back while the backward of the layer after them runs (:mod:`mindspeed.memory.offload`). No
operator runs twice. The last layer of the last pipeline stage stays: its backward begins at once.

With ``--recompute-num-layers N``, without a granularity, the MLP of the first N layers of every
pipeline stage is computed again, so that little but the MLP of the other layers stays.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.errors import ConfigError
from mindspeed.features.feature import Feature, Megatron, Option, Problem, conflict
from mindspeed.features.memory.activation_memory import EXCLUDES, attach_plan
from mindspeed.flags import flag
from mindspeed.ranges import MAX_COUNT, Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.memory.layer_rules import ChunkLayers
    from mindspeed.memory.plan import ChunkPlan

MODULES = ("input_norm", "self_attention", "post_attention_norm")
SITES = {"input_norm": "input_layernorm", "post_attention_norm": "pre_mlp_layernorm"}
"""Names of modules that Megatron Core calls otherwise."""


class SwapAttention(
    Feature,
    level=2,
    seams=("chunk",),
    excludes=EXCLUDES,
    planning=("changes layers", "needs steps"),
    options=(
        Option(
            "memory",
            "swap-attention",
            {"swap_attention": True},
            "inputs of attention layers wait on the host",
        ),
    ),
):
    """Activations of attention and norms wait in host memory until backward."""

    swap_attention: bool = flag(
        False, "activations of attention and norms wait in host memory until backward"
    )
    swap_modules: tuple[str, ...] = flag(
        MODULES, "modules of a layer whose activations are swapped"
    )
    swap_min_bytes: int = flag(
        1 << 20, "smaller tensors stay on the device", range=Range(0, MAX_COUNT, shown=False)
    )

    def enabled(self, megatron: Megatron) -> bool:
        return bool(self._wanted())

    def _wanted(self) -> list[str]:
        """The flags that are given."""
        default = SwapAttention()
        return [
            "--" + name.replace("_", "-")
            for name in ("swap_attention", "swap_modules", "swap_min_bytes")
            if getattr(self, name) != getattr(default, name)
        ]

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        name = "--swap-attention"
        if not self.swap_attention:
            yield from [
                Problem(other, f"has no effect without {name}", f"add {name}, or remove it")
                for other in self._wanted()
            ]
            return
        yield from self._other_plans(megatron)
        if not self.swap_modules:
            yield Problem("--swap-modules", "names no module", "name one, or remove it")
        yield from self._size_problems(megatron)

    def _other_plans(self, megatron: Megatron) -> Iterator[Problem]:
        name = "--swap-attention"
        granularity = megatron.get("recompute_granularity")
        if granularity == "full":
            yield conflict(
                name,
                "--recompute-granularity full",
                "layers that are computed again keep nothing to swap",
                "give --recompute-num-layers without a granularity to recompute MLPs only",
            )
        if granularity == "selective":
            for module in megatron.get("recompute_modules") or ():
                if module in _FREES_STORAGES:
                    yield conflict(
                        name,
                        f"--recompute-modules {module}",
                        "it frees tensors while they are copied",
                        "use --recompute-norm or --recompute-activation-function, or remove it",
                    )
        if megatron.get("recompute_norm"):
            for module in self.swap_modules:
                if SITES.get(module, module) in SITES.values():
                    yield Problem(
                        "--swap-modules",
                        f"{module} is recomputed by --recompute-norm already",
                        "give --swap-modules self_attention, or remove --recompute-norm",
                    )

    def _size_problems(self, megatron: Megatron) -> Iterator[Problem]:
        layers, stages = (
            megatron.get("num_layers"),
            megatron.get("pipeline_model_parallel_size") or 1,
        )
        if layers == 1:
            yield Problem(
                "--swap-attention", "has no effect: the last layer of a model stays", "remove it"
            )
        number, most = megatron.get("recompute_num_layers"), -(-(layers or 0) // stages)
        if number and layers and number > most:
            yield Problem(
                "--recompute-num-layers",
                f"{number} of {most} layers of a pipeline stage",
                "give fewer",
            )
        largest = _largest_tensor(megatron)
        if largest is not None and largest < self.swap_min_bytes:
            yield Problem(
                "--swap-attention",
                f"has no effect: the largest tensor of attention has {largest:,} bytes, and "
                f"--swap-min-bytes is {self.swap_min_bytes:,}",
                "lower --swap-min-bytes, or remove it",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.memory.host_pool import HostLimit, ranks_of_host
        from mindspeed.memory.offload import Offload

        in_flight = _CallsInFlight(megatron)
        limit = HostLimit("--swap-attention", in_flight, ranks_of_host())
        offload = Offload(min_bytes=self.swap_min_bytes, check=limit.check)

        def plan(sites: dict[str, dict[str, Any]], layers: ChunkLayers) -> ChunkPlan:
            from mindspeed.memory.layer_rules import swap_plan

            chosen = [SITES.get(module, module) for module in self.swap_modules]
            known = {site for of_layer in sites.values() for site in of_layer}
            for module, site in zip(self.swap_modules, chosen, strict=True):
                if known and site not in known:
                    near = difflib.get_close_matches(module, [*MODULES, *sorted(known)], cutoff=0.4)
                    raise ConfigError(
                        f"--swap-modules: no layer has {module!r}; there are "
                        f"{', '.join(near or [*MODULES, *sorted(known)])}"
                    )
            return swap_plan(sites, layers, chosen)

        attach_plan(seams, self.name, "--swap-attention", megatron, plan, offload=offload)
        seams.chunk.add(in_flight.count_layers, owner=self.name)


_FREES_STORAGES = ("layernorm", "moe_act", "mla_up_proj")
"""Megatron frees the outputs of these modules under whoever holds them."""


def _largest_tensor(megatron: Megatron) -> int | None:
    """Bytes of queries or of a norm's input, whichever is larger; None where sizes are missing."""
    names = ("seq_length", "micro_batch_size", "hidden_size", "num_attention_heads")
    if not all(megatron.get(name) for name in names):
        return None
    s, b, h, heads = (megatron[name] for name in names)
    tensor_parallel = megatron.get("tensor_model_parallel_size") or 1
    shards = tensor_parallel if megatron.get("sequence_parallel") else 1
    head_size = megatron.get("kv_channels") or h // heads
    width = max(h // shards, heads * head_size // tensor_parallel)
    element = 2 if megatron.get("bf16") or megatron.get("fp16") else 4
    return s * b * width * element // (megatron.get("context_parallel_size") or 1)


class _CallsInFlight:
    """Number of layer calls of this rank that have copies on the host at once."""

    def __init__(self, megatron: Megatron) -> None:
        self._megatron = megatron
        self._layers: dict[int, int] = {}
        self._config: Any = None

    def count_layers(self, model: Any, config: Any, vp_stage: int | None) -> None:
        """A model chunk is built."""
        from mindspeed.memory import megatron as engine

        runtime = engine.runtime_of(model)
        self._layers[vp_stage or 0] = len(runtime.plan.offloading_layers()) if runtime else 0
        self._config = config

    def __call__(self) -> int:
        from mindspeed.memory.megatron_in_flight import layer_calls_in_flight

        samples = self._megatron.get("global_batch_size"), self._megatron.get("micro_batch_size")
        return layer_calls_in_flight(self._layers, samples, self._config)
