"""What a layout needs at least: bytes and seconds that no prediction can be below.

bytes    weights, gradients and optimizer states of the fullest pipeline rank; no activations, norms
         or biases
seconds  matrix products of the slowest pipeline rank at the device's best rate, and the forward and
         backward of one micro-batch in the stages before it, which nothing can hide

They cost microseconds, and a search skips a layout whose bounds are worse than what it has.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from mindspeed.planner.cluster import Cluster
from mindspeed.planner.layout import V_SHAPES, Layout
from mindspeed.training.flops import attention_weights, layer_kinds, mlp_weights
from mindspeed.training.optimizer_size import state_bytes

_ON_HOST = ("swap-optimizer",)


@dataclass(frozen=True)
class Bound:
    """Attributes: seconds of a step and bytes of the fullest rank, at least."""

    seconds: float = 0.0
    nbytes: float = 0.0


class Bounds:
    """Bounds of the layouts of one job.

    Args:
        args: final values of the job, in any layout.
        cluster: the devices.
    """

    def __init__(self, args: argparse.Namespace, cluster: Cluster) -> None:
        dense, sparse = layer_kinds(args)
        self._layers = dense + sparse
        self._equal = not (dense and sparse) and dense + sparse == args.num_layers
        attention = attention_weights(args)
        shared = mlp_weights(args, args.moe_shared_expert_intermediate_size or 0) if sparse else 0
        plain = mlp_weights(args, args.ffn_hidden_size) if dense else 0
        expert = mlp_weights(args, args.moe_ffn_hidden_size) if sparse else 0
        count = max(1, dense + sparse)
        self._dense = (dense * (attention + plain) + sparse * (attention + shared)) / count
        self._expert = sparse * (args.num_experts or 0) * expert / count
        self._edge = args.padded_vocab_size * args.hidden_size
        self._tied = not args.untie_embeddings_and_output_weights

        heads = args.num_attention_heads * 2 * (args.kv_channels or 0)
        seen = args.seq_length / 2 if self._is_causal(args) else 0.0
        active = sparse * args.moe_router_topk * expert / count if sparse else 0.0
        per_token = self._dense + active
        self._layer_flops, self._head_flops = 2 * (per_token + heads * seen), 2 * self._edge
        self._tokens = args.seq_length
        device = cluster.device
        dtype = "fp8" if args.fp8 else "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
        part = max(device.efficiency(dtype), device.attention_efficiency)
        self._rate = device.peak(dtype) * (1.0 if device.products else part)

        narrow = args.fp16 or args.bf16
        self._trained = not args.lora_target_modules
        self._weight = 1 if args.fp8 else 2 if narrow else 4
        self._gradient = 2 if narrow else 4
        offloaded = args.swap_optimizer or args.virtual_optimizer or args.optimizer_cpu_offload
        self._state = 0.0 if offloaded else state_bytes(args)
        self._distributed = bool(args.use_distributed_optimizer or args.use_megatron_fsdp)
        self._stage = 3 if args.data_parallel_sharding_strategy == "optim_grads_params" else 2
        self._stage *= bool(args.use_megatron_fsdp)

    @staticmethod
    def _is_causal(args: argparse.Namespace) -> bool:
        """Every query sees half of the keys on average; else their number is not bounded here."""
        windowed = args.window_size is not None or args.multi_latent_attention
        other_mask = getattr(args, "attention_mask_type", None) not in (None, "causal")
        return not (windowed or other_mask or args.reset_attention_mask)

    def of(self, layout: Layout) -> Bound:
        """The bounds of a layout."""
        return Bound(self._seconds(layout), self._bytes(layout))

    def _ranks(self, layout: Layout) -> list[float]:
        """Layers of each pipeline rank; the mean where layers differ."""
        pp = layout.pp
        if layout.stage_layers is None or not self._equal:
            return [self._layers / pp] * pp
        return [float(sum(layout.stage_layers[rank::pp])) for rank in range(pp)]

    def _bytes(self, layout: Layout) -> float:
        dense, edge = self._dense / layout.tp, self._edge / layout.tp
        expert = self._expert / (layout.ep * layout.expert_tp)
        layers = self._ranks(layout)
        v_shape = layout.schedule in V_SHAPES
        most = 0.0
        for rank in {0, len(layers) // 2, len(layers) - 1}:
            ends = (rank == 0) + (rank == (0 if v_shape else len(layers) - 1))
            ends = min(ends, 1) if self._tied else ends
            here = layers[rank] * dense + ends * edge
            most = max(most, self._of_parameters(layout, here, layers[rank] * expert))
        return most

    def _of_parameters(self, layout: Layout, dense: float, expert: float) -> float:
        distributed, stage, state = self._distributed, self._stage, self._state
        if layout.optimizer is not None:
            distributed = layout.optimizer != "replicated"
            stage = {"zero2": 2, "zero3": 3}.get(layout.optimizer, 0)
        for name in layout.memory or ():
            if name in _ON_HOST:
                state = 0.0
            if name == "reuse-fp32-param":
                state = max(0.0, state - 2)
        total = 0.0
        for number, shards in ((dense, layout.dp * layout.cp), (expert, layout.expert_dp)):
            weights = self._weight / (shards if stage == 3 else 1)
            gradients = self._gradient / (shards if stage >= 2 else 1)
            states = state / (shards if distributed else 1)
            total += number * (weights + self._trained * (gradients + states))
        return total

    def _seconds(self, layout: Layout) -> float:
        tokens = layout.mbs * self._tokens / (layout.cp * layout.tp)
        backward = 2.0 if self._trained else 1.0
        share = 0.0
        if layout.recompute is not None and layout.recompute.layers:
            chunk = max(self._ranks(layout)) / layout.vpp
            share = 1.0 if layout.recompute.layers < 0 else layout.recompute.layers / chunk
        forward, layers = tokens * self._layer_flops, self._ranks(layout)
        one = forward * (1 + backward + min(share, 1.0))
        head = tokens * self._head_flops * (1 + backward)
        v_shape = layout.schedule in V_SHAPES
        ahead = most = 0.0
        for rank, count in enumerate(layers):
            last = rank == (0 if v_shape else layout.pp - 1)
            most = max(most, layout.micro_batches * (count * one + last * head) + ahead)
            if not v_shape:  # forwards and gradients of inputs of one micro-batch, chunk 0
                first = layout.stage_layers[rank] if layout.stage_layers else count / layout.vpp
                ahead += first * forward * (1 + (backward if layout.schedule is None else 1))
        return most / self._rate
