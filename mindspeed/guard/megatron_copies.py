"""Copies of weights that ranks hold alike: are they the same, in bits?

    data      all weights, over the ranks with the same shards (context-parallel ranks, too)
    experts   weights of experts, over theirs
    tensor    weights that each tensor-parallel rank holds whole: norms, routers, biases
    ends      an embedding that the first and the last pipeline stage share

Each rank adds the digests of a kind to one number and tells all ranks: one all-gather of 64 bytes a
rank. Only where these differ are the digests of single weights gathered, and the ranks named that
differ from most; of two, nobody knows which. Layer outputs and the states of optimizers are not
looked at.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import device
from mindspeed.compare.digest import bits
from mindspeed.compare.megatron_modules import unwrapped
from mindspeed.compare.megatron_places import whole_parameters
from mindspeed.guard.megatron_watch import named_parameters

KINDS = ("data", "experts", "tensor", "ends")


class WeightCopies:
    """The copies of a rank's weights.

    Args:
        chunks: Of the model, as the schedule gets them.
    """

    def __init__(self, chunks: list[Any]) -> None:
        self._chunks = chunks
        self._whole = whole_parameters([unwrapped(chunk) for chunk in chunks])
        self._groups = _groups()

    def differences(self) -> list[str]:
        """What differs, the same on all ranks, in words. Collective."""
        digests = self._digests()
        own = [
            number
            for kind in KINDS
            for number in (sum(digests[kind].values()), self._groups.get(kind, -1))
        ]
        where = device.current().torch_device()
        mine = torch.tensor([_signed(one) for one in own], device=where)
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
        sums = torch.stack(found).tolist()
        if not any(_differ(sums, 2 * at) for at in range(len(KINDS))):
            return []
        details: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(details, (self._groups, {k: dict(v) for k, v in digests.items()}))
        return list(_described(details))

    def _digests(self) -> Mapping[str, dict[str, int]]:
        """Digest of each weight, by kind of copies and name."""
        names: list[tuple[str, ...]] = []
        values: list[torch.Tensor] = []
        for module, name, parameter in named_parameters(self._chunks):
            if hasattr(parameter, "_local_tensor"):
                continue  # a shard of ZeRO's, of which there is no copy
            expert = not getattr(parameter, "allreduce", True)
            kinds = ["experts" if expert else "data"]
            if parameter in self._whole and not expert:
                kinds.append("tensor")
            if getattr(parameter, "shared_embedding", False):
                kinds.append("ends")
            names.append((f"{module}.{name}", *kinds))
            values.append(bits(parameter))
        found: defaultdict[str, dict[str, int]] = defaultdict(dict)
        numbers = torch.stack(values).tolist() if values else []
        for (name, *kinds), number in zip(names, numbers, strict=True):
            for kind in kinds:
                found[kind]["the shared embedding" if kind == "ends" else name] = number
        return {kind: found[kind] for kind in KINDS}


def _groups() -> dict[str, int]:
    """The first rank of each group that holds copies, which names it."""
    from megatron.core import parallel_state as state

    groups = {
        "data": state.get_data_parallel_group(with_context_parallel=True),
        "experts": state.get_expert_data_parallel_group(check_initialized=False),
        "tensor": state.get_tensor_model_parallel_group(),
    }
    if state.is_rank_in_embedding_group(ignore_virtual=True):
        groups["ends"] = state.get_embedding_group(check_initialized=False)
    return {
        kind: min(dist.get_process_group_ranks(group))
        for kind, group in groups.items()
        if group is not None
    }


def _differ(sums: list[list[int]], at: int) -> bool:
    """Whether members of a group have different sums."""
    first: dict[int, int] = {}
    return any(
        first.setdefault(row[at + 1], row[at]) != row[at] for row in sums if row[at + 1] >= 0
    )


def _described(
    details: list[tuple[dict[str, int], dict[str, dict[str, int]]]],
) -> Iterator[str]:
    """A sentence for each set of ranks whose weights differ."""
    weights: defaultdict[str, list[str]] = defaultdict(list)
    names = dict.fromkeys(name for _, kinds in details for own in kinds.values() for name in own)
    for name in names:
        for held in _holders(details, name):
            if blamed := _odd(held):
                weights[blamed].append(name)
    for blamed, found in weights.items():
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield f"{blamed}: {found[0]}{more}"


def _holders(
    details: list[tuple[dict[str, int], dict[str, dict[str, int]]]], name: str
) -> Iterator[dict[int, int]]:
    """Digests of a weight by rank, for each set of ranks that groups of any kind connect."""
    sets: dict[tuple[str, int], set[int]] = {}
    digests: dict[int, int] = {}
    of_rank: dict[int, set[int]] = {}
    for rank, (groups, kinds) in enumerate(details):
        for kind, own in kinds.items():
            if name in own and kind in groups:
                digests[rank] = own[name]
                members = of_rank.setdefault(rank, {rank})
                others = sets.setdefault((kind, groups[kind]), members)
                if others is not members:
                    others |= members
                    sets |= {key: others for key, one in sets.items() if one is members}
                    of_rank |= dict.fromkeys(members, others)
    for ranks in {id(one): one for one in of_rank.values()}.values():
        yield {rank: digests[rank] for rank in sorted(ranks)}


def _odd(held: Mapping[int, int]) -> str:
    """Ranks that differ from most; empty if all are equal."""
    counts = Counter(held.values())
    if len(counts) < 2:
        return ""
    (value, most), (_, second) = counts.most_common(2)
    if most == second:
        return f"ranks {', '.join(map(str, held))} hold different copies, one of these is wrong"
    odd = [rank for rank, one in held.items() if one != value]
    many = "ranks" if len(odd) > 1 else "rank"
    verb = "hold other copies" if len(odd) > 1 else "holds another copy"
    return f"{many} {', '.join(map(str, odd))} {verb} than {most} ranks of the same weights"


def _signed(number: int) -> int:
    """The same 64 bits as a signed number."""
    return (number + 2**63) % 2**64 - 2**63
