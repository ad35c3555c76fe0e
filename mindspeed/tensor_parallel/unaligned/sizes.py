"""Part of n units that a rank has: the first ``n % p`` of p ranks have one more than the others.

    25 query groups on 4 ranks: 7, 6, 6, 6          1026 rows on 4 ranks: 257, 257, 256, 256

Attention is sharded by whole query groups (heads, their key and their value), a gated MLP by
channels: a rank has the same channels of gate and up projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


def part(n: int, ranks: int, rank: int) -> int:
    """Number of ``n`` units that a rank has."""
    return n // ranks + (rank < n % ranks)


def offset(n: int, ranks: int, rank: int) -> int:
    """Number of ``n`` units on the ranks before this one."""
    return rank * (n // ranks) + min(rank, n % ranks)


def parts(n: int, ranks: int) -> tuple[int, ...]:
    """Number of ``n`` units on each rank."""
    return tuple(part(n, ranks, rank) for rank in range(ranks))


def imbalance(n: int, ranks: int) -> float:
    """Largest part over mean part: 1.12 for 25 units on 4 ranks."""
    return part(n, ranks, 0) * ranks / n


class UnevenCount(int):
    """An integer that passes checks for divisibility by the number of ranks.

    ``TransformerConfig`` raises unless ``num_attention_heads % tensor_model_parallel_size`` is 0.
    Results of arithmetic, copies and pickles are ordinary integers.
    """

    ranks: int

    def __new__(cls, value: int, ranks: int) -> UnevenCount:
        """``value``, which ``ranks`` ranks share unevenly."""
        count = super().__new__(cls, value)
        count.ranks = ranks
        return count

    def __mod__(self, other: int) -> int:
        """The remainder; 0 for the number of ranks."""
        return 0 if other == self.ranks else int(self) % other

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """An ordinary integer."""
        return int, (int(self),)


@dataclass(frozen=True)
class Share:
    """A rank's part of ``count`` units, in a dimension of a weight.

    Attributes:
        count: units of the whole model: query groups, or channels of the MLP.
        ranks: tensor-parallel size.
        rank: this rank.
    """

    count: int
    ranks: int
    rank: int

    @property
    def divisible(self) -> int:
        """The count of a model whose even part would be this rank's part."""
        return part(self.count, self.ranks, self.rank) * self.ranks

    def total(self, divisible_size: int) -> int:
        """A size of the whole model, from that of the model with :attr:`divisible` units."""
        return divisible_size // self.divisible * self.count

    def blocks(self, divisible_size: int, stride: int) -> list[tuple[int, int]]:
        """Blocks of this rank in a dimension of the whole weight, as (start, length).

        Args:
            divisible_size: as in :meth:`total`.
            stride: blocks of the dimension that are sharded one by one: 2 for ``[gate | up]``.
        """
        unit = divisible_size // self.divisible // stride
        start = offset(self.count, self.ranks, self.rank) * unit
        length = part(self.count, self.ranks, self.rank) * unit
        return [(block * self.count * unit + start, length) for block in range(stride)]


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model that tensor parallelism shards.

    Attributes:
        num_attention_heads: of a layer.
        num_query_groups: of a layer; the number of heads without grouped queries.
        ffn_hidden_size: width of the MLP; of one of its halves, if it is gated.
        seq_length: where sequence parallelism shards it; else None.
    """

    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    seq_length: int | None = None

    def uneven_attention(self, ranks: int) -> bool:
        """Whether Megatron cannot shard the heads: it divides groups, or repeats them."""
        groups, heads = self.num_query_groups, self.num_attention_heads
        return bool(groups % ranks) and bool(ranks % groups or heads % ranks)

    def uneven_mlp(self, ranks: int) -> bool:
        """Whether the width of the MLP is not divisible."""
        return bool(self.ffn_hidden_size % ranks)

    def uneven_rows(self, ranks: int) -> bool:
        """Whether sequence parallelism shards a sequence length that is not divisible."""
        return self.seq_length is not None and bool(self.seq_length % ranks)

    def counts(self, ranks: int) -> dict[str, UnevenCount]:
        """Heads and groups as a config accepts them, if it would not."""
        if not self.uneven_attention(ranks):
            return {}
        counts = {"num_attention_heads": UnevenCount(self.num_attention_heads, ranks)}
        if self.num_query_groups != self.num_attention_heads:
            counts["num_query_groups"] = UnevenCount(self.num_query_groups, ranks)
        return counts

    def of_rank(self, ranks: int, rank: int) -> dict[str, int]:
        """Values of a config from which Megatron's divisions compute the sizes of one rank."""
        values: dict[str, int] = {}
        if self.uneven_attention(ranks):
            values |= self._attention(Share(self.num_query_groups, ranks, rank).divisible)
        if self.uneven_mlp(ranks):
            values["ffn_hidden_size"] = Share(self.ffn_hidden_size, ranks, rank).divisible
        return values

    def _attention(self, groups: int) -> dict[str, int]:
        heads = self.num_attention_heads // self.num_query_groups * groups
        return {"num_attention_heads": heads, "num_query_groups": groups}

    def report(self, ranks: int) -> Iterator[str]:
        """Report the parts of indivisible sizes per rank, and the load imbalance."""
        shown = (
            ("query groups", self.uneven_attention(ranks), self.num_query_groups),
            ("MLP channels", self.uneven_mlp(ranks), self.ffn_hidden_size),
            ("sequence rows", self.uneven_rows(ranks), self.seq_length or 0),
        )
        for name, uneven, count in shown:
            if uneven:
                each = ", ".join(map(str, parts(count, ranks)))
                yield f"{name} {each} (largest / mean {imbalance(count, ranks):.2f})"


def sizes_of(arguments: Mapping[str, Any]) -> ModelSizes | None:
    """The sizes that are sharded; None where a framework gives them to the model only."""
    heads, ffn = arguments.get("num_attention_heads"), arguments.get("ffn_hidden_size")
    if not heads or not ffn:
        return None
    grouped = arguments.get("group_query_attention") and arguments.get("num_query_groups")
    length = arguments.get("seq_length") if arguments.get("sequence_parallel") else None
    return ModelSizes(heads, grouped or heads, ffn, length)
