"""Pipeline stages of each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property


@dataclass(frozen=True)
class Placement:
    """The stages of every rank.

    Attributes:
        stages: for each rank its stages; the position of a stage in this tuple is the number of
            the model chunk that computes it.
    """

    stages: tuple[tuple[int, ...], ...]

    @classmethod
    @cache
    def loop(cls, ranks: int, chunks: int = 1) -> Placement:
        """Stage s is on rank s mod p, as in Megatron."""
        return cls(tuple(tuple(range(rank, ranks * chunks, ranks)) for rank in range(ranks)))

    @classmethod
    def v_shape(cls, ranks: int) -> Placement:
        """Two chunks, down and up again: the first and the last stage are on rank 0."""
        return cls.snake(ranks, 2)

    @classmethod
    @cache
    def snake(cls, ranks: int, chunks: int) -> Placement:
        """Down and up in turn: stage s is on rank s mod p, in odd chunks counted from the end.

        With two chunks it is the V-shape; more make the waves of Hanayo.
        """
        turns = range(0, ranks * chunks, ranks)
        return cls(
            tuple(
                tuple(
                    start + (ranks - 1 - rank if number % 2 else rank)
                    for number, start in enumerate(turns)
                )
                for rank in range(ranks)
            )
        )

    @property
    def ranks(self) -> int:
        """p."""
        return len(self.stages)

    @property
    def chunks(self) -> int:
        """v, of the rank that has most."""
        return max(map(len, self.stages))

    @cached_property
    def num_stages(self) -> int:
        """S."""
        return sum(map(len, self.stages))

    @cached_property
    def loops(self) -> bool:
        """Whether the stages stand as Megatron places them."""
        return self == Placement.loop(self.ranks, self.chunks)

    @cached_property
    def ends(self) -> tuple[int, int]:
        """The rank of the first and that of the last stage."""
        return self.rank(0), self.rank(self.num_stages - 1)

    def place(self, stage: int) -> int:
        """The place of ``stage`` among those of its chunk, in the order of a micro-batch.

        In a loop it is the rank. The first stage has place 0 in the first chunk, the last one p - 1
        in the last chunk, and no other stage has these.
        """
        chunk = self.chunk(stage)
        return sorted(stages[chunk] for stages in self.stages).index(stage)

    @cached_property
    def _where(self) -> dict[int, tuple[int, int]]:
        return {
            stage: (rank, chunk)
            for rank, stages in enumerate(self.stages)
            for chunk, stage in enumerate(stages)
        }

    def rank(self, stage: int) -> int:
        """The rank that computes ``stage``."""
        return self._where[stage][0]

    def chunk(self, stage: int) -> int:
        """The model chunk of its rank that computes ``stage``."""
        return self._where[stage][1]
