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

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from mindspeed import device
from mindspeed.adaptor.printing import print_rank_0
from mindspeed.features.feature import Feature, Megatron, Option, Problem
from mindspeed.flags import flag
from mindspeed.ranges import RANKS, SIZE, Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.attention.strategy import Strategy


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

_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
_CP_SIZE = "--context-parallel-size"


class ContextParallel(
    Feature,
    level=2,
    seams=("kernels", "parallel_groups"),
    options=tuple(
        Option("cp_algorithm", name, {"context_parallel_algo": f"{algorithm}_cp_algo"})
        for name, algorithm in (
            *(("ulysses", "ulysses"), ("ring", "megatron"), ("hybrid", "hybrid")),
            ("kv-allgather", "kvallgather"),
        )
    ),
):
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
        """Return the strategy that the flags choose.

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

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        given, ranks = comm_types(megatron), _ranks(megatron)
        if ranks == 1:
            yield Problem(
                _CP_SIZE,
                "--cp-window-size, --ulysses-degree-in-cp, --context-parallel-kv-cache-policy, "
                "--context-parallel-cache-interval and --use-ulysses-allgather-kv need more than "
                "one rank",
                f"give {_CP_SIZE} a number > 1 or remove them",
            )
            return
        if given is not None:
            yield from _of_comm_types(given, megatron)
        names = self._algorithms(given)
        yield from _length(names, megatron, ranks)
        yield from self._degree(given, megatron, ranks)
        yield from self._window(names, ranks)
        yield from self._heads(given, megatron, ranks)
        yield from self._cache(names, megatron, ranks)
        yield from self._adaptive(names, megatron)
        if megatron.get("use_fusion_attn_v2") and megatron.get("attention_dropout"):
            yield Problem(
                "--attention-dropout",
                "dropout with --use-fusion-attn-v2 and context parallelism is not supported",
                "set it to 0",
            )

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        """Set ``cp_comm_type``, and reset options that a sharded sequence excludes."""
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

    def uneven_layers(self, megatron: Megatron) -> str:
        return "--context-parallel-cache-interval" if self.context_parallel_cache_interval else ""

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
            from mindspeed.attention.user_mask import set_attention_mask

            set_attention_mask(mask_by_user(megatron["seq_length"], _ranks(megatron)))
            seams.journal.call_on_undo(lambda: set_attention_mask(None))
        chosen = (
            self.context_parallel_algo if given is None else f"--cp-comm-type {' '.join(given)}"
        )
        _say(f"{_ranks(megatron)} ranks, {chosen}")
        for text in self.uneven_heads(megatron, given):
            _say(text)

    def uneven_heads(self, megatron: Megatron, given: list[str] | None) -> Iterator[str]:
        """Warn if an all-to-all gives some ranks more heads than others."""
        heads, _ = _heads_of_rank(megatron)
        for kind, ranks in self._all_to_alls(given, megatron):
            if not heads % ranks:
                continue
            balance = heads / (ranks * -(-heads // ranks))
            text = (
                f"{kind}: {heads} query heads per TP rank over CP={ranks}: uneven split, "
                f"balance {balance:.3f}"
            )
            rest = kind == "ulysses" and balance < 0.95
            yield f"{text}; a ring attends to {heads % ranks} of them instead" if rest else text

    def _algorithms(self, given: list[str] | None) -> set[str]:
        """Strategies of all layers, as values of ``--cp-comm-type``, or ``adaptive``."""
        if given is not None:
            return set(given)
        words = {
            "ulysses_cp_algo": {"a2a"},
            "megatron_cp_algo": {"p2p"},
            "hybrid_cp_algo": {"a2a+p2p"},
            "kvallgather_cp_algo": {"all_gather"},
            "adaptive_cp_algo": {"adaptive"},
            "hybrid_adaptive_cp_algo": {"adaptive"},
        }
        return words[self.context_parallel_algo]

    def _degree(self, given: list[str] | None, megatron: Megatron, ranks: int) -> Iterator[Problem]:
        degree, algorithm = self.ulysses_degree_in_cp, self.context_parallel_algo
        hybrid = given is None and algorithm.startswith("hybrid")
        if not hybrid:
            if degree is not None:
                yield Problem(
                    f"--ulysses-degree-in-cp {degree}",
                    f"{algorithm if given is None else '--cp-comm-type'} has no such degree",
                    "add --context-parallel-algo hybrid_cp_algo or remove it",
                )
            return
        if degree is None or degree <= 1 or ranks % degree or ranks // degree <= 1:
            yield Problem(
                "hybrid",
                f"--ulysses-degree-in-cp {degree} must be > 1 and divide {_CP_SIZE} {ranks} with "
                "quotient > 1",
            )
        elif megatron.get("hybrid_context_parallel"):
            yield Problem(
                "--hybrid-context-parallel",
                f"its groups, which change with every batch, do not go with {algorithm}",
                "use another --context-parallel-algo",
            )

    def _window(self, names: set[str], ranks: int) -> Iterator[Problem]:
        window = self.cp_window_size
        if window == 1:
            return
        ring = ranks // (self.ulysses_degree_in_cp or 1)
        if not names & {"p2p", "a2a+p2p"}:
            yield Problem(
                f"--cp-window-size {window}",
                "is for a ring, there is none",
                "use --context-parallel-algo megatron_cp_algo or hybrid_cp_algo, or remove it",
            )
        elif window < 1 or window >= ring or ring % window:
            yield Problem(f"--cp-window-size {window}", f"must be in [1, {ring}) and divide {ring}")

    def _all_to_alls(
        self, given: list[str] | None, megatron: Megatron
    ) -> Iterator[tuple[str, int]]:
        """All-to-alls (sequence <-> head): name of the algorithm, number of ranks."""
        names = self._algorithms(given)
        if "a2a" in names:
            yield "ulysses", _ranks(megatron)
        if given is None and self.context_parallel_algo.startswith("hybrid"):
            yield "hybrid", self.ulysses_degree_in_cp or 1
        elif "a2a+p2p" in names and megatron.get("hierarchical_context_parallel_sizes"):
            yield "hybrid", megatron["hierarchical_context_parallel_sizes"][0]

    def _heads(self, given: list[str] | None, megatron: Megatron, ranks: int) -> Iterator[Problem]:
        heads, groups = _heads_of_rank(megatron)
        for kind, sharing in self._all_to_alls(given, megatron):
            if kind == "hybrid" and heads and heads < sharing:
                tensor = megatron.get("tensor_model_parallel_size") or 1
                yield Problem(
                    kind,
                    f"{megatron['num_attention_heads']} heads / (TP {tensor} * {sharing} ranks "
                    "that exchange heads) is less than one",
                    "use --context-parallel-algo megatron_cp_algo, or hybrid_cp_algo with a "
                    "smaller --ulysses-degree-in-cp",
                )
        if self.use_ulysses_allgather_kv:
            shares = "a2a" in self._algorithms(given)
            if not shares or not megatron.get("group_query_attention") or groups > 1:
                yield Problem(
                    "--use-ulysses-allgather-kv",
                    f"{groups} key heads per tensor rank over CP={ranks}; it is for Ulysses with "
                    "grouped queries and one key head per tensor rank",
                    "remove it",
                )

    def _cache(self, names: set[str], megatron: Megatron, ranks: int) -> Iterator[Problem]:
        policy, interval = (
            self.context_parallel_kv_cache_policy,
            self.context_parallel_cache_interval,
        )
        layers = megatron.get("num_layers") or interval + 1
        if interval and (policy is None or not 0 <= interval < layers):
            yield Problem(
                "kv cache",
                f"--context-parallel-cache-interval {interval} needs "
                "--context-parallel-kv-cache-policy and must be in [0, num_layers)",
            )
        heads, groups = _heads_of_rank(megatron)
        if policy is not None and names == {"a2a"} and heads and groups >= ranks:
            yield Problem(
                f"--context-parallel-kv-cache-policy {policy}",
                f"Ulysses with {groups} key heads per tensor rank over CP={ranks} sends none "
                "twice, so there is nothing to save",
                "remove it",
            )

    def _adaptive(self, names: set[str], megatron: Megatron) -> Iterator[Problem]:
        by_user = "--adaptive-cp-manually-set-mask-list"
        if self.adaptive_cp_manually_set_mask_list:
            if "adaptive" not in names:
                yield Problem(
                    by_user, "is for adaptive_cp_algo and hybrid_adaptive_cp_algo", "use one"
                )
            if megatron.get("attention_mask_type") != "general":
                yield Problem(
                    by_user, "the mask is not the causal one", "add --attention-mask-type general"
                )


def comm_types(megatron: Megatron) -> list[str] | None:
    """Values of ``--cp-comm-type``, one or one for each layer; None if nobody gave it."""
    value = megatron.get("cp_comm_type")
    if value is None or isinstance(value, tuple):
        return None
    return [value] if isinstance(value, str) else list(value)


def _ranks(megatron: Megatron) -> int:
    return megatron.get("context_parallel_size") or 1


def _say(text: str) -> None:
    print_rank_0(f"context parallel: {text}")


def _of_comm_types(given: list[str], megatron: Megatron) -> Iterator[Problem]:
    for name in dict.fromkeys(given):
        if name not in _COMM_TYPES:
            yield Problem("--cp-comm-type", f"{name!r} is not one of {', '.join(_COMM_TYPES)}")
    layers = megatron.get("num_layers")
    if layers and len(given) not in (1, layers):
        yield Problem(
            "--cp-comm-type",
            f"{len(given)} values for {layers} layers",
            "give one, or one for each layer",
        )
    if "a2a+p2p" in given and len(megatron.get("hierarchical_context_parallel_sizes") or ()) != 2:
        yield Problem(
            "--cp-comm-type a2a+p2p",
            "needs two numbers, ranks of an all-to-all and ranks of a ring",
            "add --hierarchical-context-parallel-sizes",
        )


def _length(names: set[str], megatron: Megatron, ranks: int) -> Iterator[Problem]:
    length = megatron.get("seq_length")
    packed = megatron.get("reset_attention_mask") or megatron.get("reset_position_ids")
    if not length:
        return
    if "adaptive" not in names and not packed:
        if length % (2 * ranks):
            from mindspeed.attention.sequence_sharding import indivisible

            yield Problem("context parallel", *indivisible(length, ranks).split("; "))
    elif length % ranks:
        yield Problem(
            "context parallel",
            f"sequence length S={length} must be divisible by CP={ranks}: ranks have equally many "
            "tokens",
            "change --seq-length",
        )


def _heads_of_rank(megatron: Megatron) -> tuple[int, int]:
    """Query and key heads of a tensor-parallel rank; 0 where they are unknown."""
    heads, tensor = megatron.get("num_attention_heads"), megatron.get("tensor_model_parallel_size")
    if not heads:
        return 0, 0
    groups = megatron.get("num_query_groups") if megatron.get("group_query_attention") else None
    return heads // (tensor or 1), max(1, (groups or heads) // (tensor or 1))
