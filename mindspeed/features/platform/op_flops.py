"""Log the FLOPs that operators really execute: ``--op-cal-tflops``.

Adds to each log line the throughput of one device without and with recomputation (numerators of
MFU and HFU), and the throughput by Megatron's formula for comparison. Steps are counted when their
shape is new; the others cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


class OpFlops(
    Feature, level=0, page="features/op-cal-tflops.md", seams=("step", "log", "computing_layers")
):
    """Executed and model TFLOP/s per device in the log."""

    op_cal_tflops: bool = flag(False, "log executed TFLOP/s with and without recomputation")

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        graphs = megatron.get("cuda_graph_impl")
        if graphs not in (None, "none"):
            yield Problem(
                "--op-cal-tflops",
                f"cannot see operators inside replayed CUDA graphs (--cuda-graph-impl {graphs})",
                "use --cuda-graph-impl none while counting",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.profiling.model_flops import ModelShape
        from mindspeed.profiling.throughput import ThroughputMeter, describe

        meter = ThroughputMeter(_signature_of(megatron))

        def text(iteration: int) -> str:
            if iteration % (megatron.get("log_interval") or 1):
                return ""
            shape = ModelShape.from_megatron(megatron, seams.computing_layers.pipe)
            return describe(meter.read(), shape)

        seams.step.add(lambda iteration: meter.step(_global_batch_size()), owner=self.name)
        seams.log.add(text, owner=self.name)


def _signature_of(megatron: Megatron) -> Callable[[], Hashable]:
    """Key of the values on which the FLOPs of a step depend, if they can change in a run.

    Routing of an MoE moves work between ranks but doesn't change the mean, unless tokens are
    dropped; sequences of varying length change it in every step. Such steps are all counted.
    """
    drops_tokens = megatron.get("moe_expert_capacity_factor") is not None and not megatron.get(
        "moe_pad_expert_input_to_capacity"
    )
    if drops_tokens or megatron.get("variable_seq_lengths") or megatron.get("sft"):
        return lambda: None
    return _global_batch_size


def _global_batch_size() -> int:
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size

    return get_current_global_batch_size()
