"""Rates of a published row: its device, and what its software does that a planned job does not.

    rates = rates_of(row)

Everything else is priced as ``mindspeed plan`` prices it. Not planned are:

* Attention that is not fused (Megatron in 2021 and 2022): two products of all pairs, whose scores
  are written and read, and a kernel that scales, masks and exponentiates them; with dropout one
  more. A job of ours has fused attention on every device.
* Experts that send a token once to each rank (HybridEP, as Megatron-Bridge's recipes): in a plan
  this is ``--moe-token-dispatcher-type flex``.
  The host waits for the sizes of an exchange, but not with HybridEP on GB200 and GB300.
* Precision: rows are executed in bf16 and priced in fp8 or fp4, as a plan prices ``--fp8-format``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from planner_rows import PublishedRow

from mindspeed.planner.cluster import Cluster, load_cluster
from mindspeed.planner.cluster.operations import Operation
from mindspeed.planner.cluster.rates import ALIGNED, PRECISIONS, DeviceRates, Experts, RatedJob

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a100-40gb": ("a100", {"memory_gib": 39.4, "memory_gbs": 1555}),
    "h100-500w": ("h100", {"memory_gib": 95.6, "memory_gbs": 2400}),
}
"""Devices that differ from a preset: its name, and the fields of the device."""
NETWORKS = {"bigscience": 6.25}
"""GB/s of a device out of its node, where a system has another network than the preset: Jean Zay
has four Omni-Path links of 100 Gb/s for eight devices (model card of BLOOM)."""

ATTENTION = {"fsdp": {"a100": 0.7, "h100": 0.5}}
"""Fused attention of a stack beside that of a preset, chosen on the tuning half: kernels in Triton
and FlashAttention-2, which on Hopper reach half of FlashAttention-3."""


def family(device: str) -> str:
    """The preset of a row's device."""
    return VARIANTS.get(device, (device, {}))[0]


def cluster_of(row: PublishedRow) -> Cluster:
    """The cluster of a row."""
    attention = ATTENTION.get(row.stack, {}).get(family(row.device), 1.0)
    return _cluster(row.device, NETWORKS.get(row.system), attention)


@cache
def _cluster(name: str, network: float | None, attention: float) -> Cluster:
    preset, changes = VARIANTS.get(name, (name, {}))
    cluster = load_cluster(preset)
    levels = list(cluster.levels)
    if network is not None:
        levels[-1] = replace(levels[-1], gbs=network)
    attained = attention * cluster.device.attention_efficiency
    device = replace(cluster.device, **changes, attention_efficiency=attained)
    return replace(cluster, device=device, levels=tuple(levels))


class UnfusedAttention(DeviceRates):
    """Rates of a program that writes the scores of attention to memory."""

    def seconds(self, operation: Operation) -> float:
        """Seconds of a described operator on the device."""
        if not operation.attention:
            return super().seconds(operation)
        dropout, products = 5, 4 if operation.backward else 2
        scores = 2 * operation.flops / ((10 if operation.backward else 4) * operation.head)
        dtype, device = operation.dtype, self._device
        rate = device.peak(dtype) * device.sustained * device.efficiency(dtype)
        if operation.head % ALIGNED:
            rate /= device.misaligned
        one = max(2 * scores * operation.head / rate, self._moving(2 * scores))
        softmax = self._moving((6 if operation.backward else 4) * scores)
        kernels = products + 2
        return products * one + softmax + self._moving(dropout * scores) + kernels * self._launch


def rates_of(
    row: PublishedRow, kept: frozenset[int], cluster: Cluster | None = None
) -> DeviceRates:
    """The rates of a row.

    Args:
        row: the row.
        kept: sizes of products that stay in bf16.
        cluster: instead of the one of its device.
    """
    precision = row.precision if row.precision in PRECISIONS else ""
    experts = Experts(*row.routed) if row.routed else None
    dtype = "fp16" if row.precision == "fp16" else "bf16"
    program = RatedJob(dtype, precision, kept, experts, waits=not row.device.startswith("gb"))
    kind = UnfusedAttention if row.unfused_attention else DeviceRates
    return kind(cluster or cluster_of(row), program)
