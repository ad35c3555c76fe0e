"""Context parallelism by the original's flags: ``--context-parallel-algo`` and what refines it.

    ulysses_cp_algo          all-to-all, sequence <-> head (default)
    megatron_cp_algo         ring; --cp-window-size w: double ring, windows of w ranks
    hybrid_cp_algo           all-to-all among --ulysses-degree-in-cp ranks, ring between them
    kvallgather_cp_algo      every rank gets all keys and values, in --kvallgather-head-groups parts
    adaptive_cp_algo         a layout made for the mask, only keys that somebody sees travel
    hybrid_adaptive_cp_algo  all-to-all among --ulysses-degree-in-cp ranks, adaptive between them

Megatron's ``--cp-comm-type`` wins where it is given, also per layer. Losses are those of one rank,
at any tensor and pipeline parallel size. Which one to choose: docs/context-parallel.md.

kv and dkv are always sent while attention is computed; on NVIDIA and Ascend devices
``--use-cp-send-recv-overlap`` sends dkv in a separate process group, so that they do not wait for
kv. What the original has more flags for is always on here: partial outputs are merged in
place in fp32 (``--use-fused-ring-attention-update``), tensors are taken in the order that they have
(``--megatron-cp-in-bnsd``), every mask has its own plan (``--adaptive-cp-dynamic-attn-mask``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from mindspeed import device
from mindspeed.adaptor.printing import print_rank_0
from mindspeed.features._context_parallel_checks import indivisible as indivisible
from mindspeed.features._context_parallel_checks import problems, uneven_heads
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import RANKS, SIZE, Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.attention.strategy import Strategy


class ContextParallel(Feature, level=2, seams=("kernels", "parallel_groups")):
    """Long sequences over several ranks: ring, Ulysses, hybrid, all-gather, adaptive."""

    context_parallel_algo: Literal[
        "ulysses_cp_algo",
        "megatron_cp_algo",
        "hybrid_cp_algo",
        "kvallgather_cp_algo",
        "adaptive_cp_algo",
        "hybrid_adaptive_cp_algo",
    ] = flag("ulysses_cp_algo", "how ranks attend over a sequence; --cp-comm-type wins over it")
    ulysses_degree_in_cp: int | None = flag(
        None, "ranks of an all-to-all (sequence <-> head), of the hybrid algorithms", range=RANKS
    )
    cp_window_size: int = flag(
        1, "ranks in a window of the inner ring of a double ring; 1: one ring", range=RANKS
    )
    use_cp_send_recv_overlap: bool = flag(
        False, "dkv have a separate process group (NVIDIA, Ascend; else no effect)"
    )
    use_fused_ring_attention_update: bool = flag(
        False, "partial outputs are merged by one operator, npu_ring_attention_update"
    )
    megatron_cp_in_bnsd: bool = flag(
        False, "no effect: kernels take tensors in the layout that they have"
    )
    context_parallel_kv_cache_policy: Literal["full", "half"] | None = flag(
        None, "keep received keys and values (half: keys) until the backward pass"
    )
    context_parallel_cache_interval: int = flag(
        0, "number of layers without that cache after each layer with it", range=Range(0, 100_000)
    )
    use_ulysses_allgather_kv: bool = flag(
        False, "Ulysses with one key head per tensor rank: every rank gets it from all"
    )
    kvallgather_head_groups: int = flag(
        1,
        "KV all-gather: gather key heads in N parts, one after the other; less memory",
        range=SIZE,
    )
    adaptive_cp_granularity: int = flag(
        128, "adaptive: smallest number of tokens that is moved", range=SIZE
    )
    adaptive_cp_overlap_degree: int = flag(
        2,
        "adaptive: number of steps; kv of a step are sent during the attention of the one before",
        range=SIZE,
    )
    adaptive_cp_without_coarse: bool = flag(False, "adaptive: granularity of one token")
    adaptive_cp_dynamic_attn_mask: bool = flag(False, "no effect: every mask has its own plan")
    adaptive_cp_only_reschedule: bool = flag(
        False, "adaptive: ranks keep the tokens of Megatron's batches"
    )
    adaptive_cp_manually_set_mask_list: bool = flag(
        False, "adaptive: the mask of mindspeed.core.context_parallel.utils, in tiles"
    )

    def enabled(self, megatron: Megatron) -> bool:
        needs_ranks = (
            self.cp_window_size != 1
            or self.ulysses_degree_in_cp is not None
            or self.context_parallel_kv_cache_policy is not None
            or self.context_parallel_cache_interval != 0
            or self.use_ulysses_allgather_kv
        )
        return _ranks(megatron) > 1 or needs_ranks

    def strategy_of(self, comm_type: str | None = None, ulysses_degree: int = 1) -> Strategy:
        """What the flags say.

        Args:
            comm_type: Megatron's word for the layer, where it decides.
            ulysses_degree: Ranks of an all-to-all, of ``a2a+p2p``.
        """
        from mindspeed.attention.strategy import Strategy

        if comm_type is None:
            name, _ = _ALGORITHMS[self.context_parallel_algo]
            hybrid = name.startswith("hybrid")
            chosen = Strategy(name, self.ulysses_degree_in_cp or 1 if hybrid else 1)  # type: ignore[arg-type]
        else:
            chosen = Strategy.from_comm_type(comm_type, ulysses_degree)
        return replace(
            chosen,
            ring_window=self.cp_window_size if chosen.algorithm in ("ring", "hybrid") else 1,
            granularity=1 if self.adaptive_cp_without_coarse else self.adaptive_cp_granularity,
            overlap=self.adaptive_cp_overlap_degree,
            reshard=not self.adaptive_cp_only_reschedule,
            cache=self.context_parallel_kv_cache_policy,
            cache_interval=self.context_parallel_cache_interval,
            head_groups=self.kvallgather_head_groups,
            fused_merge=self.use_fused_ring_attention_update,
        )

    def problems(self, megatron: Megatron) -> list[Problem]:
        return list(problems(self, megatron, comm_types(megatron)))

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        """``cp_comm_type`` of the algorithm; options that a sharded sequence excludes."""
        values: dict[str, Any] = {}
        if comm_types(megatron) is None:
            name, words = _ALGORITHMS[self.context_parallel_algo]
            values["cp_comm_type"] = words
            if name.startswith("hybrid"):
                degree = self.ulysses_degree_in_cp or 1
                values["hierarchical_context_parallel_sizes"] = [degree, _ranks(megatron) // degree]
        if megatron.get("attention_mask_type") != "general":
            # Of the causal mask nothing but the name is read.
            values["create_attention_mask_in_dataloader"] = False
        modules = megatron.get("recompute_modules")
        modules = ["core_attn"] if modules is None else modules
        if megatron.get("recompute_granularity") == "selective" and "core_attn" in modules:
            _say("core_attn is not recomputed: no scores are kept, only communication would repeat")
            rest = [module for module in modules if module != "core_attn"]
            values |= {
                "recompute_modules": rest,
                "recompute_granularity": "selective" if rest else None,
            }
        return values

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        given = comm_types(megatron)

        def context_strategy(comm_type: str | None, ulysses_degree: int) -> Strategy:
            if given is None:
                return self.strategy_of()
            return self.strategy_of(comm_type or "p2p", ulysses_degree)

        seams.use_kernels(owner=self.name, context_strategy=context_strategy)
        if self.use_cp_send_recv_overlap and not device.current().on_host:
            from mindspeed.adaptor.overlap_groups import OverlapGroups

            overlap = OverlapGroups()
            seams.parallel_groups.add(overlap.make, owner=self.name)
            seams.use_kernels(owner=self.name, overlap_group=overlap.of)
            seams.journal.call_on_undo(overlap.destroy)
        if self.adaptive_cp_manually_set_mask_list:
            from mindspeed.attention.grid_mask import mask_by_user
            from mindspeed.attention.shared_mask import set_attention_mask

            set_attention_mask(mask_by_user(megatron["seq_length"], _ranks(megatron)))
            seams.journal.call_on_undo(lambda: set_attention_mask(None))
        chosen = (
            self.context_parallel_algo if given is None else f"--cp-comm-type {' '.join(given)}"
        )
        _say(f"{_ranks(megatron)} ranks, {chosen}")
        for text in uneven_heads(self, megatron, given):
            _say(text)


# A tuple: words of ours, which nobody gave; parsers and callers give a list or a word. Its type
# survives copies, pickles and checkpoints of the arguments, and Megatron reads it like a list.
COMM_TYPE_NOT_GIVEN = ("p2p",)
"""Default of ``--cp-comm-type`` in the parsers."""
_RING, _ULYSSES, _HYBRID, _GATHER = ("p2p",), ("a2a",), ("a2a+p2p",), ("all_gather",)

_ALGORITHMS: dict[str, tuple[str, tuple[str]]] = {
    "ulysses_cp_algo": ("ulysses", _ULYSSES),
    "megatron_cp_algo": ("ring", _RING),
    "hybrid_cp_algo": ("hybrid", _HYBRID),
    "kvallgather_cp_algo": ("all_gather", _GATHER),
    "adaptive_cp_algo": ("adaptive", _RING),
    "hybrid_adaptive_cp_algo": ("hybrid_adaptive", _HYBRID),
}
"""Name of the strategy, and of what Megatron calls the groups that it needs."""


def comm_types(megatron: Megatron) -> list[str] | None:
    """``--cp-comm-type`` where the user gave it."""
    value = megatron.get("cp_comm_type")
    if value is None or isinstance(value, tuple):
        return None
    return [value] if isinstance(value, str) else list(value)


def _ranks(megatron: Megatron) -> int:
    return megatron.get("context_parallel_size") or 1


def _say(text: str) -> None:
    print_rank_0(f"context parallel: {text}")
