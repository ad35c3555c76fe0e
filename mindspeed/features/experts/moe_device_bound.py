"""``--moe-device-bound C``: dropless dispatch that never waits for the host.

    C         a rank sends every other at most C times the mean number of rows
    repeat    a step with more is computed again with twice the bound (error: the training ends)
    exchange  how rows travel: all-to-all, by symmetric memory, by HybridEP

Without it every layer copies the numbers of rows to the host before it can send them. Here sizes
stay on the device: buffers of a bound are exchanged (:mod:`mindspeed.moe.row_exchange`), and
grouped products read where experts begin (:mod:`mindspeed.moe.dispatch.device_sizes`). Nothing is
dropped, and results are those with exact sizes. Costs memory of C times the mean load, and as many
bytes where blocks are equally long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.errors import ConfigError
from mindspeed.features.experts.layer_programs import (
    all_to_all_problems,
    change_paired_layers,
    expert_problems,
    layer_problems,
    rank_problems,
    sends_equally,
    whole_expert_problems,
)
from mindspeed.features.feature import Feature, Megatron, Problem, conflict
from mindspeed.features.pipeline.plans import has_pairs
from mindspeed.flags import flag
from mindspeed.ranges import Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NAME, OVERFLOW = "--moe-device-bound", "--moe-device-bound-overflow"
EXCHANGE = "--moe-device-bound-exchange"
_HOST = "it decides by numbers of rows on the host"
_SCHEDULE = "a step whose bound was too small is computed again, which its schedule cannot"


class MoeDeviceBound(
    Feature,
    level=2,
    megatron_versions=">=0.16",
    seams=("model_arguments", "chunk", "schedule", "optimizer"),
    conflicts={
        "balanced-experts": _HOST,
        "moe-adaptive-recompute": _HOST,
        "moe-alltoall-exchange": "tokens sent once are counted by rank, on the host",
        "variable-lengths": "blocks are equally long, so ranks must have equally many tokens",
    },
    excludes={
        "fp8": "quantised products pad the rows of each expert, which the host must know",
        "fp4": "quantised products pad the rows of each expert, which the host must know",
        "variable_seq_lengths": "blocks are equally long, so ranks must have equally many tokens",
        "use_megatron_fsdp": _SCHEDULE,
        "use_torch_fsdp2": _SCHEDULE,
    },
    after=(
        *("adaptive-memory", "automated-pipeline", "dualpipev", "dynamic-pipeline", "fold3d"),
        *("moe-overlap", "multiparameter-pipeline", "nanopipe", "optimized-send-recv"),
        *("pipeline-schedule", "unaligned-linear"),
    ),
):
    """Dropless dispatch whose sizes stay on the device."""

    moe_device_bound: float = flag(
        0.0,
        "sizes of the dispatch stay on the device: rows for a rank are bounded by this many times "
        "their mean; 0: sizes are copied to the host",
        range=Range(1.0, 1e6, also=(0.0,)),
    )
    moe_device_bound_overflow: Literal["error", "repeat"] = flag(
        "repeat", "a step with more rows is computed again with twice the bound, or an error"
    )
    moe_device_bound_exchange: Literal["all-to-all", "symmetric-memory", "hybridep"] = flag(
        "all-to-all",
        "how rows travel: equal blocks on every device; by torch's operator for symmetric memory, "
        "or by HybridEP, on NVIDIA GPUs",
    )

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        if not self.moe_device_bound:
            for name, value in (
                (OVERFLOW, self.moe_device_bound_overflow),
                (EXCHANGE, self.moe_device_bound_exchange),
            ):
                if value not in ("repeat", "all-to-all"):
                    fix = f"add {NAME} 1.25, or remove it"
                    yield Problem(f"{name} {value}", f"has no effect without {NAME}", fix)
            return
        yield from _torch_problems()
        yield from expert_problems(
            NAME,
            megatron,
            all_to_all_problems,
            rank_problems,
            layer_problems,
            _host_problems,
        )
        yield from self._exchange_problems(megatron)

    def _exchange_problems(self, megatron: Megatron) -> Iterator[Problem]:
        """Find what a way for rows to travel lacks here."""
        name = f"{EXCHANGE} {self.moe_device_bound_exchange}"
        if self.moe_device_bound_exchange != "all-to-all":
            why = "only blocks of a bound have the rows of some experts in one place"
            if (megatron.get("moe_experts_pipeline_degree") or 0) > 1:
                yield conflict(name, "--moe-experts-pipeline-degree", why)
            if megatron.get("use_pipe_experts"):
                yield conflict(name, "--use-pipe-experts", why)
        if self.moe_device_bound_exchange == "symmetric-memory":
            from mindspeed.moe import symmetric_memory

            ranks = megatron.get("expert_model_parallel_size") or 1
            yield from (Problem(name, *found) for found in symmetric_memory.problems(ranks))
        if self.moe_device_bound_exchange == "hybridep":
            from mindspeed.moe.dispatch import megatron_hybrid_ep

            yield from (Problem(name, *found) for found in megatron_hybrid_ep.problems())
            yield from whole_expert_problems(name, megatron)
            if megatron.get("moe_zero_memory") not in (None, "disable"):
                yield conflict(name, "--moe-zero-memory", "its kernels send no rows a second time")
            if (megatron.get("ampipe_degree") or 1) > 1:
                yield conflict(name, "--ampipe-degree", "nothing can hide its kernels")
            if has_pairs(megatron):
                yield conflict(name, "--moe-fb-overlap", "its kernels are one for several parts")
            if megatron.get("moe_fp8_dispatch") not in (None, "disable"):
                yield conflict(name, "--moe-fp8-dispatch", "Megatron's binding sends 16 bits")

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.guard.megatron_bounded_steps import BoundedSteps
        from mindspeed.moe.device_bound import DeviceBound

        if not self.moe_device_bound:
            return

        def check(arguments: dict[str, Any]) -> dict[str, Any]:
            """Check a framework's own configuration."""
            config = arguments["config"]
            if config.num_moe_experts and not config.moe_grouped_gemm:
                raise ConfigError(f"{NAME}: the model needs moe_grouped_gemm=True")
            return arguments

        bound = DeviceBound(self.moe_device_bound)
        repeats = self.moe_device_bound_overflow == "repeat"
        steps = BoundedSteps(bound, repeats, NAME)
        seams.model_arguments.add(check, owner=self.name)
        seams.schedule.add(steps.with_schedule, owner=self.name)
        if not _looked_at(megatron):
            seams.optimizer.add(steps.with_optimizer, owner=self.name)
        change_paired_layers(seams, self.name, megatron, bound=bound, **self._exchange())

    def _exchange(self) -> dict[str, Any]:
        """How rows travel, as layers get it."""
        if self.moe_device_bound_exchange == "hybridep":
            return {"exchange": "hybridep"}
        if self.moe_device_bound_exchange == "all-to-all":
            return {"exchange": "device"}
        from mindspeed.moe.symmetric_memory import SymmetricMemory

        return {"exchange": "device", "row_exchange": SymmetricMemory()}


def _host_problems(name: str, megatron: Megatron) -> Iterator[Problem]:
    """Find sizes that are needed on the host, or not counted."""
    if sends_equally(megatron):
        yield Problem(name, "--moe-model-type deepspeed_moe counts no tokens", "remove one")
    if megatron.get("moe_grouped_gemm") is False:
        yield Problem(name, "experts one by one have sizes on the host", "add --moe-grouped-gemm")
    if megatron.get("add_bias_linear"):
        yield Problem(name, "biases are added by sizes on the host", "add --disable-bias-linear")


def _looked_at(megatron: Megatron) -> bool:
    """Whether a pass must be final before the gradient norm: it is recorded, or judged.

    Of Muon Megatron-LM's script hands only a part to the optimizer's seam.
    """
    muon = "muon" in (megatron.get("optimizer") or "")
    return bool(megatron.get("record") or megatron.get("guard") or muon)


def _torch_problems() -> Iterator[Problem]:
    import torch

    if not hasattr(torch.nn.functional, "grouped_mm"):
        yield Problem(
            NAME, f"torch {torch.__version__} has no grouped_mm", "install torch 2.10 or newer"
        )
