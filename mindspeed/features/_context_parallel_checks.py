"""Checks of the flags of context parallelism, before any rank starts to work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed.features.feature import Megatron, Problem

if TYPE_CHECKING:
    from mindspeed.features.context_parallel import ContextParallel

_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
_CP_SIZE = "--context-parallel-size"


def problems(
    options: ContextParallel, megatron: Megatron, comm_types: list[str] | None
) -> Iterator[Problem]:
    """Everything that is wrong.

    Args:
        options: The flags.
        megatron: Megatron's arguments.
        comm_types: ``--cp-comm-type`` where the user gave it.
    """
    ranks = megatron.get("context_parallel_size") or 1
    if ranks == 1:
        yield Problem(
            _CP_SIZE,
            "--cp-window-size, --ulysses-degree-in-cp, --context-parallel-kv-cache-policy, "
            "--context-parallel-cache-interval and --use-ulysses-allgather-kv need more than one "
            "rank",
            f"give {_CP_SIZE} a number > 1 or remove them",
        )
        return
    if comm_types is not None:
        yield from _of_comm_types(comm_types, megatron)
    names = _algorithms(options, comm_types)
    yield from _length(names, megatron, ranks)
    yield from _degree(options, comm_types, megatron, ranks)
    yield from _window(options, names, ranks)
    yield from _heads(options, comm_types, megatron, ranks)
    yield from _cache(options, names, megatron, ranks)
    yield from _adaptive(options, names, megatron)
    if megatron.get("use_fusion_attn_v2") and megatron.get("attention_dropout"):
        yield Problem(
            "--attention-dropout",
            "dropout with --use-fusion-attn-v2 and context parallelism is not supported",
            "set it to 0",
        )


def uneven_heads(
    options: ContextParallel, megatron: Megatron, comm_types: list[str] | None
) -> Iterator[str]:
    """Warnings where an all-to-all gives some ranks more heads than others."""
    heads, _ = _heads_of_rank(megatron)
    for kind, ranks in _all_to_alls(options, comm_types, megatron):
        if not heads % ranks:
            continue
        balance = heads / (ranks * -(-heads // ranks))
        text = (
            f"{kind}: {heads} query heads per TP rank over CP={ranks}: uneven split, "
            f"balance {balance:.3f}"
        )
        rest = kind == "ulysses" and balance < 0.95
        yield f"{text}; a ring attends to {heads % ranks} of them instead" if rest else text


def _algorithms(options: ContextParallel, comm_types: list[str] | None) -> set[str]:
    """Strategies of all layers, by the words of ``--cp-comm-type``; ``adaptive`` is one more."""
    if comm_types is not None:
        return set(comm_types)
    words = {
        "ulysses_cp_algo": {"a2a"},
        "megatron_cp_algo": {"p2p"},
        "hybrid_cp_algo": {"a2a+p2p"},
        "kvallgather_cp_algo": {"all_gather"},
        "adaptive_cp_algo": {"adaptive"},
        "hybrid_adaptive_cp_algo": {"adaptive"},
    }
    return words[options.context_parallel_algo]


def _of_comm_types(comm_types: list[str], megatron: Megatron) -> Iterator[Problem]:
    for name in dict.fromkeys(comm_types):
        if name not in _COMM_TYPES:
            yield Problem("--cp-comm-type", f"{name!r} is not one of {', '.join(_COMM_TYPES)}")
    layers = megatron.get("num_layers")
    if layers and len(comm_types) not in (1, layers):
        yield Problem(
            "--cp-comm-type",
            f"{len(comm_types)} values for {layers} layers",
            "give one, or one for each layer",
        )
    if (
        "a2a+p2p" in comm_types
        and len(megatron.get("hierarchical_context_parallel_sizes") or ()) != 2
    ):
        yield Problem(
            "--cp-comm-type a2a+p2p",
            "needs two numbers, ranks of an all-to-all and ranks of a ring",
            "add --hierarchical-context-parallel-sizes",
        )


def indivisible(length: int, ranks: int) -> str:
    """Why a length cannot be sharded; the executor's error, too."""
    return str(
        Problem(
            "context parallel",
            f"sequence length S={length} must be divisible by 2*CP={2 * ranks} (Megatron slices "
            "zigzag)",
            "pack documents or use adaptive_cp_algo",
        )
    )


def _length(names: set[str], megatron: Megatron, ranks: int) -> Iterator[Problem]:
    length = megatron.get("seq_length")
    packed = megatron.get("reset_attention_mask") or megatron.get("reset_position_ids")
    if not length:
        return
    if "adaptive" not in names and not packed:
        if length % (2 * ranks):
            flag, _, text = indivisible(length, ranks).partition(": ")
            yield Problem(flag, text)
    elif length % ranks:
        yield Problem(
            "context parallel",
            f"sequence length S={length} must be divisible by CP={ranks}: ranks have equally many "
            "tokens",
            "change --seq-length",
        )


def _degree(
    options: ContextParallel, comm_types: list[str] | None, megatron: Megatron, ranks: int
) -> Iterator[Problem]:
    degree, algorithm = options.ulysses_degree_in_cp, options.context_parallel_algo
    hybrid = comm_types is None and algorithm.startswith("hybrid")
    if not hybrid:
        if degree is not None:
            yield Problem(
                f"--ulysses-degree-in-cp {degree}",
                f"{algorithm if comm_types is None else '--cp-comm-type'} has no such degree",
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


def _window(options: ContextParallel, names: set[str], ranks: int) -> Iterator[Problem]:
    window = options.cp_window_size
    if window == 1:
        return
    ring = ranks // (options.ulysses_degree_in_cp or 1)
    if not names & {"p2p", "a2a+p2p"}:
        yield Problem(
            f"--cp-window-size {window}",
            "is for a ring, there is none",
            "use --context-parallel-algo megatron_cp_algo or hybrid_cp_algo, or remove it",
        )
    elif window < 1 or window >= ring or ring % window:
        yield Problem(f"--cp-window-size {window}", f"must be in [1, {ring}) and divide {ring}")


def _heads_of_rank(megatron: Megatron) -> tuple[int, int]:
    """Query and key heads of a tensor-parallel rank; 0 where they are not known yet."""
    heads, tensor = megatron.get("num_attention_heads"), megatron.get("tensor_model_parallel_size")
    if not heads:
        return 0, 0
    groups = megatron.get("num_query_groups") if megatron.get("group_query_attention") else None
    return heads // (tensor or 1), max(1, (groups or heads) // (tensor or 1))


def _all_to_alls(
    options: ContextParallel, comm_types: list[str] | None, megatron: Megatron
) -> Iterator[tuple[str, int]]:
    """All-to-alls (sequence <-> head): name of the algorithm, number of ranks."""
    ranks = megatron.get("context_parallel_size") or 1
    names = _algorithms(options, comm_types)
    if "a2a" in names:
        yield "ulysses", ranks
    if comm_types is None and options.context_parallel_algo.startswith("hybrid"):
        yield "hybrid", options.ulysses_degree_in_cp or 1
    elif "a2a+p2p" in names and megatron.get("hierarchical_context_parallel_sizes"):
        yield "hybrid", megatron["hierarchical_context_parallel_sizes"][0]


def _heads(
    options: ContextParallel, comm_types: list[str] | None, megatron: Megatron, ranks: int
) -> Iterator[Problem]:
    heads, groups = _heads_of_rank(megatron)
    for kind, sharing in _all_to_alls(options, comm_types, megatron):
        if kind == "hybrid" and heads and heads < sharing:
            tensor = megatron.get("tensor_model_parallel_size") or 1
            yield Problem(
                kind,
                f"{megatron['num_attention_heads']} heads / (TP {tensor} * {sharing} ranks that "
                "exchange heads) is less than one",
                "use --context-parallel-algo megatron_cp_algo, or hybrid_cp_algo with a smaller "
                "--ulysses-degree-in-cp",
            )
    if options.use_ulysses_allgather_kv:
        shares = "a2a" in _algorithms(options, comm_types)
        if not shares or not megatron.get("group_query_attention") or groups > 1:
            yield Problem(
                "--use-ulysses-allgather-kv",
                f"{groups} key heads per tensor rank over CP={ranks}; it is for Ulysses with "
                "grouped queries and one key head per tensor rank",
                "remove it",
            )


def _cache(
    options: ContextParallel, names: set[str], megatron: Megatron, ranks: int
) -> Iterator[Problem]:
    policy, interval = (
        options.context_parallel_kv_cache_policy,
        options.context_parallel_cache_interval,
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
            f"Ulysses with {groups} key heads per tensor rank over CP={ranks} sends none twice, "
            "so there is nothing to save",
            "remove it",
        )


def _adaptive(options: ContextParallel, names: set[str], megatron: Megatron) -> Iterator[Problem]:
    by_user = "--adaptive-cp-manually-set-mask-list"
    if options.adaptive_cp_manually_set_mask_list:
        if "adaptive" not in names:
            yield Problem(by_user, "is for adaptive_cp_algo and hybrid_adaptive_cp_algo", "use one")
        if megatron.get("attention_mask_type") != "general":
            yield Problem(
                by_user, "the mask is not the causal one", "add --attention-mask-type general"
            )
