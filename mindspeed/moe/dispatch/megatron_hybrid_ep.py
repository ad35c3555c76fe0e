"""Rows permuted, sent and permuted by one kernel: HybridEP, called by Megatron's binding of it.

    permute    hybrid_ep_dispatch, tokens to the rows of local experts, by expert
    unpermute  hybrid_ep_combine, the way back and the sum over the experts of a token

The stages between have nothing to do, so nothing hides the exchange. A token crosses once to each
rank. The library does not wait for the device if it is given the length of its result, which is the
bound of :mod:`mindspeed.moe.device_bound`: where no rank sends more to another than its share, all
rows fit, and what would not fit is noted before.

DeepEP's other kernels, by Megatron's binding, hand the host a list of sizes, so they are none of
the ways to keep sizes on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mindspeed import device
from mindspeed.moe.dispatch.device_sizes import DeviceDispatcher
from mindspeed.moe.interpreter import Chunk, Stages
from mindspeed.moe.split_phase import Collective
from mindspeed.te.device_groups import DeviceSizes

_PROJECT = "https://github.com/deepseek-ai/DeepEP/tree/hybrid-ep"


def problems() -> Iterator[tuple[str, str]]:
    """Why HybridEP cannot be called in this process, and what helps."""
    from megatron.core.transformer.moe import fused_a2a

    if device.current().name != "cuda":
        yield (f"needs NVIDIA GPUs, and this device is {device.current().name}", "use all-to-all")
    elif getattr(fused_a2a, "hybrid_ep_dispatch", None) is None:
        yield ("deep_ep with HybridEPBuffer is not installed", f"install {_PROJECT}")


@dataclass(frozen=True)
class HybridEpDispatcher(DeviceDispatcher):
    """The stages; see the module's documentation.

    Attributes:
        sms: multiprocessors for the kernels of either way; Megatron's ``--moe-hybridep-num-sms``.
    """

    sms: int = 16

    def stages(self) -> Stages:
        """Functions of this dispatcher by name. The kernels cannot send the rows alone again."""
        nothing = {name: _no_collective for name in ("dispatch", "gather", "scatter", "combine")}
        return Stages(
            compute={
                "permute": self.permute,
                "arrange": lambda chunk: None,
                "disarrange": lambda chunk: None,
                "unpermute": self.unpermute,
            },
            communicate={"count": self.count, **nothing},
        )

    def count(self, chunk: Chunk) -> Mapping[str, Collective]:
        """Note too many rows; the kernels count for themselves."""
        self.counted(chunk)
        return {}

    def permute(self, chunk: Chunk) -> None:
        """``hidden [n, h]`` to ``rows [R C, h]`` and ``row_probs [R C]`` by local expert."""
        from megatron.core.transformer.moe.fused_a2a import hybrid_ep_dispatch

        tensors, groups = chunk.tensors, self.groups
        length = chunk.values["length"] = groups.ep.size() * chunk.values["bound"]
        rows, probs, _, sizes, chunk.values["handle"] = hybrid_ep_dispatch(
            x=tensors["hidden"],
            routing_map=tensors["routing_map"],
            probs=tensors["probs"].float(),
            group=groups.ep,
            num_local_experts=groups.local,
            num_sms_dispatch_api=self.sms,
            num_sms_combine_api=self.sms,
            num_permuted_tokens=length,
        )
        tensors |= {"rows": rows, "row_probs": probs}
        chunk.values["tokens_per_expert"] = DeviceSizes.of(sizes.long(), length)

    def unpermute(self, chunk: Chunk) -> None:
        """``rows [R C, h]`` to ``output [n, h]``."""
        from megatron.core.transformer.moe.fused_a2a import hybrid_ep_combine

        chunk.tensors["output"] = hybrid_ep_combine(
            x=chunk.tensors["rows"],
            handle=chunk.values["handle"],
            num_permuted_tokens=chunk.values["length"],
            pad_multiple=None,
        )


def _no_collective(chunk: Chunk) -> Mapping[str, Collective]:
    return {}
