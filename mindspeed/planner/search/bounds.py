"""Lower bounds on memory and time of a layout.

bytes    weights, gradients and optimizer states of the fullest pipeline rank; no activations, norms
         or biases
seconds  matrix products of the slowest pipeline rank at the device's best rate, plus the forward
         and backward of one micro-batch in the stages before it, which nothing can hide, plus the
         time that the first rank waits for data-parallel ranks

They take microseconds; a search skips layouts whose bounds are worse than its best. With a counted
layer (:mod:`mindspeed.planner.count.layer_run`) they use all of its seconds instead of its
matrix products, and include the activations that layers keep.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mindspeed.features.registry import options
from mindspeed.flags import changed, read
from mindspeed.job import OptimizerStates, Precision, Sharding
from mindspeed.models.model_config import ModelConfig
from mindspeed.optimizer.rules import chosen
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.layout import Layout, memory_flags
from mindspeed.planner.shape import DENSE, EXPERT, FeatureFlags
from mindspeed.profiling.model_flops import attention_products, mlp_weights
from mindspeed.training.options import DataOptions, LoraOptions
from mindspeed.training.token_counts import model_shape

if TYPE_CHECKING:
    from mindspeed.planner.count.layer_run import LayerRun

Runs = Mapping[str, "LayerRun"]
NEAR = 0.1
"""Relative distance from the memory limit within which estimated bytes decide nothing."""


@dataclass(frozen=True)
class Bound:
    """Lower bounds on the seconds of a step and the bytes of the fullest rank."""

    seconds: float = 0.0
    nbytes: float = 0.0


class Bounds:
    """Bounds of the layouts of one job.

    Args:
        args: final values of the job, in any layout.
    """

    def __init__(self, args: argparse.Namespace, cluster: Cluster) -> None:
        model, given = model_shape(args), read(ModelConfig, args)
        sparse = sum(model.moe_layers)
        dense = len(model.moe_layers) - sparse
        self._layers, self._sparse = dense + sparse, sparse / max(1, dense + sparse)
        self._equal = not (dense and sparse) and dense + sparse == given.num_layers
        precision = Precision.of(args)
        self._hidden = model.hidden_size * precision.element
        attention = attention_products(model)
        shared = mlp_weights(model, model.shared_expert_size)
        plain = mlp_weights(model, model.ffn_hidden_size)
        expert = mlp_weights(model, model.moe_ffn_hidden_size)
        count = max(1, dense + sparse)
        each = attention.weights
        self._dense = (dense * (each + plain) + sparse * (each + shared)) / count
        self._expert = sparse * (given.num_experts or 0) * expert / count
        self._edge = model.vocab_size * model.hidden_size
        self._tied = not given.untie_embeddings_and_output_weights

        seen = model.seq_length / 2 if self._is_causal(args) else 0.0
        active = sparse * model.moe_topk * expert / count
        per_token = self._dense + active
        self._layer_flops = 2 * (per_token + attention.per_key * seen)
        self._head_flops = 2 * self._edge
        self._tokens = model.seq_length
        device = cluster.device
        self._device, self._rates = device, dict[str | None, float]()
        self._repeats_all = not read(FeatureFlags, args).optimize_recomp_communication_level

        self._cluster, self._known = cluster, dict[tuple[str, float, int, int], float]()
        sharding = Sharding.of(args)
        self._waits_for_gradients = not sharding.overlap_gradients
        self._waits_for_parameters = not sharding.overlap_parameters

        adapters = read(LoraOptions, args)
        self._trained = not adapters.lora_target_modules
        self._base: float = 1 if precision.products == "fp8" else precision.element
        if base := adapters.base_weights:
            self._base = 0.5 if base == "nf4" else 1
        self._gradient = precision.element
        self._args, self._states = args, dict[tuple[str, ...] | None, tuple[float, int]]()
        self._distributed = sharding.distributed_optimizer or sharding.fsdp
        self._stage = sharding.stage

    @property
    def layer_seconds(self) -> float:
        """Seconds of the products of a layer for one token, forward, at the best rate."""
        return self._layer_flops / self._rate(None)

    @property
    def head_layers(self) -> float:
        """Layers that take as long as the output layer."""
        return self._head_flops / self._layer_flops

    @staticmethod
    def _is_causal(args: argparse.Namespace) -> bool:
        """Whether every query sees half of the keys on average; other masks are not bounded."""
        model = read(ModelConfig, args)
        windowed = model.window_size is not None or model.multi_latent_attention
        other_mask = read(FeatureFlags, args).attention_mask_type not in (None, "causal")
        return not (windowed or other_mask or read(DataOptions, args).reset_attention_mask)

    def of(self, layout: Layout, runs: Runs | None = None) -> Bound:
        """Bound a layout.

        Args:
            runs: a run of each kind of layer (:mod:`mindspeed.planner.shape`), without
                recomputation if the layout says how many layers are recomputed; None: only matrix
                products count.
        """
        return Bound(self._seconds(layout, runs or {}), self._bytes(layout, runs or {}))

    def _rate(self, precision: str | None) -> float:
        """FLOP/s that no matrix product exceeds."""
        if precision not in self._rates:
            flags = {} if precision is None else options("precision")[precision].flags
            kind = Precision.of(changed(self._args, **flags)).products
            part = max(self._device.efficiency(kind), self._device.attention_efficiency)
            part = 1.0 if self._device.products else part
            self._rates[precision] = self._device.peak(kind) * part
        return self._rates[precision]

    def _weight(self, layout: Layout) -> float:
        """Bytes of a weight at least."""
        return self._base if layout.precision is None else min(self._base, 1.0)

    def _ranks(self, layout: Layout) -> list[float]:
        """Layers of each pipeline rank; the mean where layers differ."""
        return [sum(self._chunks(layout, rank)) for rank in range(layout.pp)]

    def _chunks(self, layout: Layout, rank: int) -> list[float]:
        """Layers of the chunks of a pipeline rank."""
        if layout.stage_layers is None or not self._equal:
            return [self._layers / (layout.pp * layout.vpp)] * layout.vpp
        return [float(layout.stage_layers[stage]) for stage in layout.stages_of(rank)]

    def _bytes(self, layout: Layout, runs: Runs) -> float:
        dense, edge = self._dense / layout.tp, self._edge / layout.tp
        expert = self._expert / (layout.ep * layout.expert_tp)
        layers = self._ranks(layout)
        first, last = layout.placement.ends
        most = 0.0
        for rank in {0, len(layers) // 2, len(layers) - 1}:
            ends = (rank == first) + (rank == last)
            ends = min(ends, 1) if self._tied else ends
            here = layers[rank] * dense + ends * edge
            static = self._of_parameters(layout, here, layers[rank] * expert)
            most = max(most, static + self._activations(layout, rank, runs))
        return most

    def _of_parameters(self, layout: Layout, dense: float, expert: float) -> float:
        distributed, stage = self._sharding(layout)
        state, reduced = self._held(layout.memory)
        gradient = self._gradient if stage else max(self._gradient, reduced)
        total = 0.0
        for number, shards in ((dense, layout.dp * layout.cp), (expert, layout.expert_dp)):
            weights = self._weight(layout) / (shards if stage == 3 else 1)
            gradients = gradient / (shards if stage >= 2 else 1)
            states = state / (shards if distributed else 1)
            total += number * (weights + self._trained * (gradients + states))
        return total

    def _sharding(self, layout: Layout) -> tuple[bool, int]:
        """Whether optimizer states are sharded, and the ZeRO stage."""
        if layout.optimizer is None:
            return self._distributed, self._stage
        stage = {"zero2": 2, "zero3": 3}.get(layout.optimizer, 0)
        return layout.optimizer != "replicated", stage

    def _held(self, memory: tuple[str, ...] | None) -> tuple[float, int]:
        """Bytes of the states of a parameter, and of a gradient that is reduced."""
        if memory not in self._states:
            args = changed(self._args, **({} if memory is None else memory_flags(memory)))
            states, rule = OptimizerStates.of(args), chosen(vars(args))
            nbytes = 0.0 if states.offloaded else _state_bytes(states, rule, self._gradient)
            self._states[memory] = nbytes, states.gradient
        return self._states[memory]

    def _activations(self, layout: Layout, rank: int, runs: Runs) -> float:
        """Activation bytes of a rank's layers at its peak, without inputs of chunks."""
        if not runs or not self._equal:
            return 0.0
        again = layout.recompute.layers if layout.recompute is not None else 0
        if again < 0:
            return 0.0
        kept = min(run.kept for run in runs.values())
        inputs = 2 * layout.mbs * self._tokens / layout.sequence_shards * self._hidden
        chunks = self._chunks(layout, rank)
        of_chunks = [max(0.0, max(0.0, count - again) * kept - inputs) for count in chunks]
        in_flight = _in_flight(layout, rank)
        return sum(n * kept for n, kept in zip(in_flight, of_chunks, strict=True))

    def _seconds(self, layout: Layout, runs: Runs) -> float:
        tokens = layout.mbs * self._tokens / (layout.cp * layout.tp)
        backward = 2.0 if self._trained else 1.0
        head = tokens * self._head_flops * (1 + backward) / self._rate(layout.precision)
        if layout.schedule is None or layout.placed:
            head = max((head, *(run.output for run in runs.values())))
        forward, back, behind, repeated = self._layer_seconds(layout, runs, tokens, backward)
        again = layout.recompute.layers if layout.recompute is not None else 0
        last = layout.placement.ends[1]
        ahead, found = 0.0, []
        for rank, layers in enumerate(self._ranks(layout)):
            chunks = self._chunks(layout, rank)
            more = layers if again < 0 else sum(min(count, again) for count in chunks)
            more *= again < 0 or self._equal
            busy = layers * (forward + back) + more * repeated
            busy += head * (rank == last)
            found.append(layout.micro_batches * busy + ahead)
            if not layout.placed and self._equal:  # of one micro-batch in chunk 0
                ahead += chunks[0] * (forward + behind)
        pipeline = max(found) if self._equal else sum(found) / len(found)
        return pipeline + self._end_of_step(layout)

    def _end_of_step(self, layout: Layout) -> float:
        """Seconds in which the first rank waits for data-parallel ranks; the end of the pipeline
        hides those of others, and with other schedules also its own."""
        distributed, stage = self._sharding(layout)
        if not self._trained or stage:
            return 0.0
        layers = self._ranks(layout)[0]
        hidden = layout.pp > 1 and layout.schedule is not None
        _, reduced = self._held(layout.memory)
        total, experts = 0.0, layout.ep * layout.expert_tp
        for number, step in (
            (layers * self._dense / layout.tp, layout.tp),
            (layers * self._expert / experts, experts),
        ):
            size = layout.dp * layout.cp * layout.tp // step
            if number and size > 1 and self._waits_for_gradients and not hidden:
                total += self._collective("reduce_scatter", number * reduced, size, step)
            if number and size > 1 and self._waits_for_parameters and distributed:
                total += self._collective(
                    "all_gather", number * self._weight(layout) / size, size, step
                )
        return total

    def _collective(self, op: str, payload: float, size: int, step: int) -> float:
        key = op, payload, size, step
        if key not in self._known:
            ranks = tuple(range(0, size * step, step))
            self._known[key] = self._cluster.collective_seconds(op, payload, ranks)
        return self._known[key]

    def _layer_seconds(
        self, layout: Layout, runs: Runs, tokens: float, backward: float
    ) -> tuple[float, float, float, float]:
        """Seconds of the mean layer: forward, backward, until its input gradient, recomputation."""
        forward = tokens * self._layer_flops / self._rate(layout.precision)
        if not runs or not (layout.schedule is None or layout.placed):
            back = forward * backward
            return forward, back, back if layout.schedule is None else forward, forward
        mean = self.mean(runs)
        behind = mean.backward if layout.schedule is None else 0.0
        again = mean.forward if self._repeats_all else forward
        return mean.forward, mean.backward, behind, again

    def mean(self, runs: Runs) -> LayerRun:
        """The mean of the layers of the model."""
        share = {EXPERT: self._sparse, DENSE: 1 - self._sparse} if len(runs) > 1 else {}

        def of(name: str) -> float:
            each = ((kind, getattr(run, name)) for kind, run in runs.items())
            return float(sum(share.get(kind, 1.0) * value for kind, value in each))

        first = next(iter(runs.values()))
        return replace(first, forward=of("forward"), backward=of("backward"), kept=of("kept"))


def _in_flight(layout: Layout, rank: int) -> list[int]:
    """Lower bound on the micro-batches that each chunk of a rank keeps at once."""
    if layout.schedule is not None:
        return [1] * layout.vpp
    count, ranks, chunks = layout.micro_batches, layout.pp, layout.vpp
    if chunks == 1:
        return [min(count, ranks - rank)]
    most = min(count * chunks, 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1)
    found = [0] * chunks
    for number in range(most):  # in turns of as many micro-batches as there are ranks
        found[number // ranks % chunks] += 1
    return found


def _state_bytes(states: OptimizerStates, rule: str, element: int) -> float:
    """Lower bound on the bytes of optimizer states of one parameter of ``element`` bytes."""
    moments = [dtype.itemsize for dtype in states.moments]
    if states.quantized or rule == "cadam":
        moments = [1, 1]  # without their scales
    elif rule not in ("adam", "fused_adam"):
        moments = moments[:1]
    master = (2.0 if states.half_master else 4.0) if element < 4 else 0.0
    return master + sum(moments)
