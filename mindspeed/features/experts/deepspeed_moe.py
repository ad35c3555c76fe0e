"""DeepSpeed's mixture of experts on Megatron's layers: ``--moe-model-type deepspeed_moe``.

    --moe-model-type deepspeed_moe --num-experts 64 --moe-router-topk 1
    --moe-train-capacity-factor 1.1 --moe-aux-loss-coeff 0.01 --expert-interval 2

A top-1 or top-2 gate with capacity takes the place of the router, and every rank sends each expert
the same number of rows, so nothing is counted. ``--moe-no-drop`` drops no token: rows are counted
and exchanged as they are, or with ``--moe-dynamic-padding`` in a room that is predicted from
earlier steps. Modules and weights stay Megatron's, so checkpoints fit both kinds of model.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.errors import ConfigError
from mindspeed.features.experts.layer_programs import (
    DEEPSPEED,
    expert_problems,
    expert_slices,
    layer_problems,
    on_layers,
    sends_equally,
)
from mindspeed.features.feature import Feature, Megatron, Problem, conflict
from mindspeed.flags import flag
from mindspeed.ranges import Range

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from mindspeed.adaptor.seams import Seams
    from mindspeed.moe.deepspeed.gate import Capacity, Window

logger = logging.getLogger("mindspeed")

NAME = "--moe-model-type deepspeed_moe"


class DeepSpeedMoe(Feature, level=2, megatron_versions=">=0.16", seams=("chunk", "step")):
    """DeepSpeed's gates with capacity, padded dispatch and dropless routing."""

    moe_model_type: Literal["megatron_moe", "deepspeed_moe"] = flag(
        "megatron_moe", "router and dispatch of mixture-of-experts layers"
    )
    expert_interval: int = flag(
        1, "every so many layers, the last of them has experts", range=Range(1)
    )
    moe_train_capacity_factor: float | None = flag(
        None, "room of an expert, in mean loads; 1.0 if not given", range=Range(0, above=True)
    )
    noisy_gate_policy: Literal["None", "Jitter", "RSample"] = flag(
        "None", "in training: jitter of the gate's input, or the last choice is drawn at random"
    )
    use_rts: bool = flag(True, "with top-1, random tokens get the room of an expert, not the first")
    moe_use_sinkhorn: bool = flag(False, "in training, experts are chosen from balanced scores")
    enable_token_rearrange_opt: bool = flag(
        False, "rows are selected instead of multiplied by one-hot matrices; always so"
    )
    moe_no_drop: bool = flag(False, "no token is dropped: rows are counted and sent as they are")
    moe_dynamic_padding: bool = flag(
        False, "with --moe-no-drop: a room predicted from earlier steps, and nothing is counted"
    )

    def enabled(self, megatron: Megatron) -> bool:
        return bool(list(self._changed()))

    def _changed(self) -> Iterator[str]:
        return (f.name for f in fields(self) if getattr(self, f.name) != f.default)

    def _is_deepspeed(self) -> bool:
        return self.moe_model_type == DEEPSPEED

    def problems(self, megatron: Megatron) -> list[Problem]:
        if not self._is_deepspeed():
            text = f"belongs to {NAME}, and the router is Megatron's"
            return [Problem(_spelling(name), text, _INSTEAD[name]) for name in self._changed()]
        model = expert_problems(NAME, megatron, _gates)
        return [*self._own(), *model, *self._others(megatron)]

    def _own(self) -> Iterator[Problem]:
        """Find flags of this feature that contradict each other."""
        if self.moe_dynamic_padding and not self.moe_no_drop:
            yield Problem(
                "--moe-dynamic-padding", "pads what --moe-no-drop sends", "add --moe-no-drop"
            )
        if self.moe_no_drop and self.moe_train_capacity_factor is not None:
            yield Problem(
                f"--moe-train-capacity-factor {self.moe_train_capacity_factor}",
                "limits the room of experts, and --moe-no-drop does not",
                "remove one",
            )
        if self.moe_use_sinkhorn and self.noisy_gate_policy == "RSample":
            yield Problem(
                "--noisy-gate-policy RSample",
                "draws experts from the gate, and --moe-use-sinkhorn takes them from balanced "
                "scores",
                "remove one",
            )

    def _others(self, megatron: Megatron) -> Iterator[Problem]:
        """Find conflicts with flags of Megatron and of other features."""
        for name, nothing in _ROUTER_ONLY.items():
            value = megatron.get(name)
            if value not in (None, False, nothing):
                text = f"{_spelling(name)} {value} concerns Megatron's router, which it replaces"
                yield Problem(NAME, text, "remove one")
        balancing = megatron.get("moe_router_load_balancing_type") or "aux_loss"
        kinds = [balancing] if isinstance(balancing, str) else list(balancing)
        if len(kinds) > 1 or kinds[0] not in ("aux_loss", "none"):
            yield Problem(
                NAME,
                f"--moe-router-load-balancing-type {' '.join(kinds)}: its gate has one loss of "
                "its own",
                "use --moe-use-sinkhorn for sinkhorn, else remove the flag",
            )
        yield from layer_problems(NAME, megatron)
        for name in ("overlap_moe_expert_parallel_comm", "moe_fb_overlap"):
            if megatron.get(name):
                why, fix = "it calls Megatron's own dispatcher", "use --moe-alltoall-overlap-comm"
                yield conflict(NAME, _spelling(name), why, fix)
        if megatron.get("moe_allgather_overlap_comm"):
            text = "--moe-allgather-overlap-comm: this model exchanges tokens by all-to-all"
            yield Problem(NAME, text, "use --moe-alltoall-overlap-comm")
        if not sends_equally(megatron):
            return
        for name in ("variable_seq_lengths", "hybrid_context_parallel"):
            if megatron.get(name):
                text = (
                    f"{_spelling(name)}: ranks with different numbers of tokens cannot send alike"
                )
                yield Problem(NAME, text, "add --moe-no-drop (without --moe-dynamic-padding)")
        if self.moe_dynamic_padding and (slices := expert_slices(megatron)) > 1:
            yield Problem(
                "--moe-dynamic-padding",
                f"ranks of expert tensor parallel size {slices} would have to "
                "agree on the room in a collective of their own",
                "use --expert-tensor-parallel-size 1, or --moe-no-drop alone",
            )

    def derives(self, megatron: Megatron) -> dict[str, Any]:
        if not self._is_deepspeed() or "num_experts" not in megatron:
            return {}
        derived: dict[str, Any] = {}
        if megatron.get("moe_token_dispatcher_type") == "allgather":  # Megatron's default
            derived["moe_token_dispatcher_type"] = "alltoall"
        if megatron.get("moe_router_topk") == 1:  # Megatron requires it, and this gate is so anyway
            derived["moe_router_pre_softmax"] = True
        if self.expert_interval > 1:
            derived["moe_layer_freq"] = _layers(self.expert_interval, megatron)
        return derived

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.moe.deepspeed.gate import Window
        from mindspeed.moe.deepspeed.megatron import GateOptions, use_gate
        from mindspeed.moe.layer.megatron import change

        if self.enable_token_rearrange_opt:
            logger.info(
                "--enable-token-rearrange-opt: rows are always selected, the flag is not needed"
            )
        windows: weakref.WeakSet[Window] = weakref.WeakSet()

        def replace(layer: MoELayer) -> None:
            _check(layer.config)
            room = self._room(layer.config)
            gate = GateOptions(
                capacity=None if self.moe_no_drop else room,
                noise=self.noisy_gate_policy,
                random_tokens=self.use_rts,
                sinkhorn=self.moe_use_sinkhorn,
            )
            use_gate(layer, gate, seams.journal)
            if room is None:
                change(layer, seams.journal)
                return
            exchange = "window" if isinstance(room, Window) else "padded"
            change(layer, seams.journal, exchange=exchange, capacity=room)
            if isinstance(room, Window):
                windows.add(room)

        @contextlib.contextmanager
        def around_step(iteration: int) -> Iterator[None]:
            yield
            for window in windows:
                window.advance()

        on_layers(seams, self.name, replace)
        if self.moe_dynamic_padding:
            seams.step.add(around_step, owner=self.name)

    def _room(self, config: Any) -> Capacity | Window | None:
        """Capacity of an expert in tokens, where they are not counted."""
        from mindspeed.moe.deepspeed.gate import Capacity, Window

        if self.moe_no_drop:
            return Window() if self.moe_dynamic_padding else None
        factor = self.moe_train_capacity_factor or 1.0
        return Capacity(factor, config.num_moe_experts, config.moe_router_topk)


_INSTEAD = {
    "expert_interval": "use --moe-layer-freq",
    "moe_train_capacity_factor": "use --moe-expert-capacity-factor",
    "noisy_gate_policy": "use --moe-input-jitter-eps",
    "use_rts": "use --moe-token-drop-policy",
    "moe_use_sinkhorn": "use --moe-router-load-balancing-type sinkhorn",
    "enable_token_rearrange_opt": "remove it: Megatron's router selects rows always",
    "moe_no_drop": "remove it: without a capacity factor Megatron's router drops nothing",
    "moe_dynamic_padding": "remove it: without a capacity factor Megatron's router drops nothing",
}
# Arguments of Megatron's router that this gate does not support, and their neutral values.
_ROUTER_ONLY = {
    "moe_router_score_function": "softmax",
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_force_load_balancing": False,
    "moe_router_fusion": False,
    "moe_router_padding_for_quantization": False,
    "moe_router_padding_for_fp8": False,
    "moe_enable_routing_replay": False,
    "moe_latent_size": None,
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False,
    "moe_input_jitter_eps": None,
}


def _spelling(name: str) -> str:
    return "--no-use-rts" if name == "use_rts" else "--" + name.replace("_", "-")


def _gates(name: str, megatron: Megatron) -> Iterator[Problem]:
    experts, topk = megatron["num_experts"], megatron.get("moe_router_topk") or 2
    if topk not in (1, 2):
        yield Problem(
            name, f"--moe-router-topk {topk}: its gates are top-1 and top-2", "use 1 or 2"
        )
    elif topk > experts:
        yield Problem(name, f"--moe-router-topk {topk} with --num-experts {experts}", "use top-k 1")


def _layers(interval: int, megatron: Megatron) -> list[int]:
    count = megatron.get("num_layers") or 0
    layers = [int((i + 1) % interval == 0) for i in range(count)]
    given = megatron.get("moe_layer_freq") or 1
    if given not in (1, layers):
        raise ConfigError(
            f"--expert-interval {interval} and --moe-layer-freq {given} both say which layers have "
            "experts; remove one"
        )
    if not any(layers):
        raise ConfigError(
            f"--expert-interval {interval}: none of the {count} layers (--num-layers) would have "
            f"experts; use 1 to {count}"
        )
    return layers


def _check(config: Any) -> None:
    """Check that a framework's own configuration has these values."""
    if config.moe_router_topk not in (1, 2) or config.moe_token_dispatcher_type != "alltoall":
        raise ConfigError(
            f"{NAME}: the model needs moe_router_topk of 1 or 2 and moe_token_dispatcher_type="
            f'"alltoall" in its configuration, which has {config.moe_router_topk} and '
            f'"{config.moe_token_dispatcher_type}"'
        )
