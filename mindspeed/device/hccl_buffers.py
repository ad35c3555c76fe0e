"""Sizes of HCCL's communication buffers, group by group.

Each HCCL communicator takes two buffers of ``HCCL_BUFFSIZE`` MB (200 by default), used or not, and
a rank of a large job is in a dozen groups. A group needs no more than what one call moves, with
S tokens of a context-parallel rank, b samples, hidden size h, e bytes per element, p
tensor-parallel ranks, in MB of 2^20 bytes rounded up:

    =========================  =========================================================
    tp                         S b h e with sequence parallelism; 2 S b h e (all-reduce)
    pp                         S b h e, / p with sequence parallelism
    cp                         ring: 2 S b k e / p (k: size of all key heads);
                               Ulysses: S b h e / p; others: the larger one
    ep                         factor S b h e topk / p
    ep_tp                      factor S b h e ep (all-gather dispatcher)
    mp, tp_ep_mp, tp_cp        10: norms and flags
    dp and all others          as HCCL chooses
    =========================  =========================================================

``factor`` is how much more than the mean a rank may receive from a router out of balance.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil

DEFAULT_MB = 200
BUFFERS = 2
"""Buffers of a communicator: one to send, one to receive."""
SMALL_MB = 10

# Megatron's description of a group -> its name in the flags.
_NAMES = {
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "DATA_PARALLEL_GROUP_WITH_CP_AG": "dp_cp",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "MODEL_PARALLEL_GROUP": "mp",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "EMBEDDING_GROUP": "embd",
    "POSITION_EMBEDDING_GROUP": "pos_embd",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "ep_tp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep_mp",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "EXPERT_DATA_PARALLEL_GROUP": "ep_dp",
    "HIERARCHICAL_CONTEXT_PARALLEL_GROUP": "hcp",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP": "intra_ep_dp",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt_instance",
    "CONTEXT_PARALLEL_OVERLAP": "cp2",
}
ALIASES = {"exp": "ep", "tp_exp": "ep_tp", "mp_exp": "tp_ep_mp", "dp_modulo_exp": "ep_dp"}
"""Names of the original library."""
NAMES = tuple(dict.fromkeys([*_NAMES.values(), "inter_ep_dp"]))


@dataclass(frozen=True)
class LargestCalls:
    """The sizes that determine the largest call of each group.

    Attributes:
        tokens: S, of one sample on a context-parallel rank.
        samples: b, of a micro-batch.
        hidden_size: h.
        key_size: k, of the keys of all heads of a token.
        element: e, bytes.
        tensor_parallel: p.
        sequence_parallel: activations between layers are sharded along S.
        ring: context parallelism sends keys and values around a ring.
        ulysses: it exchanges the sequence for heads.
        expert_parallel: ranks that share the experts.
        expert_factor: most tokens of a rank, relative to the mean; None: ep as HCCL chooses.
    """

    tokens: int
    samples: int
    hidden_size: int
    key_size: int
    element: int
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    ring: bool = False
    ulysses: bool = False
    expert_parallel: int = 1
    topk: int = 1
    expert_factor: float | None = None


def adaptive_buffers(traffic: LargestCalls) -> dict[str, int]:
    """MB of one buffer of each group whose traffic is known (table above)."""
    t, p = traffic, traffic.tensor_parallel
    token = t.tokens * t.samples * t.element
    activation = token * t.hidden_size
    buffers = dict.fromkeys(("mp", "tp_ep_mp", "tp_cp"), SMALL_MB)
    buffers["tp"] = megabytes(activation * (1 if t.sequence_parallel else 2))
    buffers["pp"] = megabytes(activation / (p if t.sequence_parallel else 1))
    context = [2 * token * t.key_size / p] * t.ring + [activation / p] * t.ulysses
    if context:
        buffers["cp"] = megabytes(max(context))
    if t.expert_factor is not None:
        buffers["ep"] = megabytes(t.expert_factor * activation * t.topk / p)
        buffers["ep_tp"] = megabytes(t.expert_factor * activation * t.expert_parallel)
    return buffers


def megabytes(nbytes: float) -> int:
    """Buffer for a call of ``nbytes``: at least 1."""
    return max(1, ceil(nbytes / 2**20))


def parse(flag: str, text: str) -> dict[str, int]:
    """``"dp:200;tp:300"`` by name of the group; empty text is empty.

    Raises:
        ValueError: an entry is not ``NAME:NUMBER`` with a known name and a positive number.
    """
    found: dict[str, int] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, separator, number = (part.strip() for part in entry.partition(":"))
        name = ALIASES.get(name, name)
        if not separator or not re.fullmatch(r"[1-9]\d{0,8}", number):
            raise ValueError(
                f"{flag}: {entry!r} is not NAME:NUMBER with a positive whole number, such as tp:300"
            )
        if name not in NAMES:
            raise ValueError(f"{flag}: unknown group {name!r}; known are {', '.join(NAMES)}")
        if name in found:
            raise ValueError(f"{flag}: {name} is given twice")
        found[name] = int(number)
    return found


def name_of(description: str | None) -> str | None:
    """The name of a group that Megatron describes so; None for others."""
    if description is None:
        return None
    plain, _, level = description.partition("_L")
    if plain == "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP" and level == "1":
        return "inter_ep_dp"
    return _NAMES.get(description) or _NAMES.get(plain)


def device_megabytes(groups: Iterable[str | None], buffers: Mapping[str, int]) -> int:
    """MB that the buffers of a rank's groups take on its device."""
    return sum(BUFFERS * buffers.get(name or "", DEFAULT_MB) for name in groups)
