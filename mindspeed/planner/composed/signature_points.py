"""The tiny runs that measure a layout: stages of a small pipeline with one or two layers.

| run                       | gives                                           |
|---                        |---                                              |
| 1. middle stage, 1 layer  | what a chunk has besides its layers             |
| 2. middle stage, 2 layers | minus run 1: a layer                            |
| 3. first stage, 1 layer   | minus run 1: the embedding                      |
| 4. last stage, 1 layer    | minus run 1: final norm, head and loss          |
| 5. first stage, 2 layers  | minus run 3: the unsplit backward of a layer    |

Zero-bubble schedules split the backward of all stages but the first. Models with several kinds of
layers (dense, expert, recomputed) have runs 1 and 2 for each. Two runs on twice as many
data-parallel ranks, and two of the same layout, both without recomputation, show what those ranks
share. Ranks with several chunks run as such. These runs are compared with their composition: a
middle stage with three layers, a last one with two, layers of two kinds on one stage, all ranks
with two chunks, and one with three. Without a pipeline the only stage replaces the middle one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mindspeed.planner.composed.tiny_run import Point
from mindspeed.planner.layout import V_SHAPES, Layout, Recompute
from mindspeed.planner.shape import DENSE, RECOMPUTED

ONE_CHUNK = {"zb-v": "zb-h1", "dualpipev": "zb-h1", "aiao": None, "interleaved": None}
"""Schedules with one chunk on a rank, for those with several that have the same actions."""

Key = tuple[str, str, int]
"""Role of a run, kind of its layers, and their number (``chunks``: the pipeline rank)."""


@dataclass(frozen=True)
class SignaturePoints:
    """The tiny runs of a layout.

    Attributes:
        layout: the layout.
        kinds: kinds of the layers of the model.
    """

    layout: Layout
    kinds: tuple[str, ...]

    def all(self, check: bool, chunks: bool) -> dict[Key, Point]:
        """All runs.

        Args:
            check: include those that are compared with their composition.
            chunks: include those of ranks with several chunks, if the layout has such ranks.
        """
        kinds, first, last = self.kinds, self.kinds[0], self.kinds[-1]
        points = {("middle", kind, n): self.point(1, kind, n) for kind in kinds for n in (1, 2)}
        if check:
            points["middle", first, 3] = self.point(1, first, 3)
            if self.pipeline:
                points["last", last, 2] = self.point(3, last, 2)
            if self.pipeline and self.layout.vpp > 2 and chunks:
                points["three", first, 1] = self._chunks(1, first, 3)
            if first != last:
                points["mixed", first, 2] = self._mixed(first, last)
        plain = self._plain()
        for n in (1, 2):
            points["plain", first, n] = plain.point(1, plain.kinds[0], n)
            points["wide", first, n] = plain.point(1, plain.kinds[0], n, data_parallel=2)
        if self.pipeline:
            points["first", first, 1] = self.point(0, first, 1)
            points["last", last, 1] = self.point(3, last, 1)
            if self._one_chunk == "zb-h1":
                points |= {("first", k, n): self.point(0, k, n) for k in kinds for n in (1, 2)}
        if self.layout.several_chunks and chunks:
            for rank in range(3 if self.layout.schedule in V_SHAPES else 4):
                points["chunks", last if rank == 3 else first, rank] = self._chunks(
                    rank, last if rank == 3 else first
                )
        return points

    def point(self, stage: int, kind: str, layers: int, data_parallel: int = 1) -> Point:
        """A stage of four, or the only one, with ``layers`` layers of one kind."""
        ranks, batches = (4, 5) if self.pipeline else (1, 2)
        layout = self._tiny(ranks, 1, batches, data_parallel, self._one_chunk)
        flags = layout.overrides() | self._flags(kind, ranks * layers)
        return Point(flags, layout.devices, stage if ranks > 1 else 0)

    @property
    def _one_chunk(self) -> str | None:
        return ONE_CHUNK.get(self.layout.schedule or "", self.layout.schedule)

    @property
    def pipeline(self) -> bool:
        """Whether the layout has a pipeline."""
        return self.layout.pp > 1

    def _plain(self) -> SignaturePoints:
        """The layout without recomputation, with micro-batches of one sample.

        Neither changes what data-parallel ranks share, so that layouts have these runs in common.
        """
        layout = replace(self.layout, mbs=1)
        if layout.recompute is not None:
            layout = replace(layout, recompute=Recompute())
        kinds = tuple(dict.fromkeys(kind.removesuffix(RECOMPUTED) for kind in self.kinds))
        if layout.recompute is None:
            kinds = self.kinds
        return replace(self, layout=layout, kinds=kinds)

    def _mixed(self, first: str, last: str) -> Point:
        """The first stage of four, or the only one, with a layer of each of two kinds."""
        layers = 2 * (4 if self.pipeline else 1)
        point = self.point(0, first, 2)
        flags = dict(point.overrides)
        if "moe_layer_freq" in flags:
            pattern = [int(not kind.startswith(DENSE)) for kind in (first, last)]
            flags["moe_layer_freq"] = str(pattern * (layers // 2)).replace(" ", "")
        if first.endswith(RECOMPUTED) and not last.endswith(RECOMPUTED):
            flags["recompute_method"] = "block"
        return Point(flags, point.devices, point.stage)

    def _chunks(self, rank: int, kind: str, count: int = 2) -> Point:
        """A rank of four with several chunks of one layer.

        In a step of fewer micro-batches, such as eight, some pairs of actions do not follow each
        other.
        """
        layout = self._tiny(4, count, 12, 1, self.layout.schedule)
        return Point(layout.overrides() | self._flags(kind, 4 * count), layout.devices, rank)

    def _tiny(
        self, pp: int, vpp: int, batches: int, data_parallel: int, schedule: str | None
    ) -> Layout:
        """The layout on twice the fewest data-parallel ranks, or on a multiple of these."""
        base = self.layout.signature()
        dp = base.devices // (base.tp * base.cp) * 2 * data_parallel
        return replace(
            base,
            devices=base.tp * base.cp * dp * pp,
            global_batch_size=base.mbs * dp * batches,
            pp=pp,
            vpp=vpp,
            schedule=schedule if pp > 1 else None,
        )

    def _flags(self, kind: str, layers: int) -> dict[str, Any]:
        """Flags of a model with layers of one kind."""
        flags: dict[str, Any] = {"num_layers": layers, "noop_layers": None}
        plain = kind.removesuffix(RECOMPUTED)
        if any(not k.startswith(DENSE) for k in self.kinds):
            flags["moe_layer_freq"] = f"[{int(plain != DENSE)}]*{layers}"
        if any(k.endswith(RECOMPUTED) for k in self.kinds):
            again = kind.endswith(RECOMPUTED)
            flags |= Recompute(layers=-1 if again else 0).overrides()
        return flags
