"""The loads of Megatron's routers, watched in a training.

    watch = LoadWatch(Settings(...))
    watch.chunk(model, config, vp_stage)     # a hook on each router
    watch.counted_for_bias(sums)             # seam expert_counts
    with watch.reduced(...):                 # seam balance_losses
    watch.text(iteration); watch.figures(iteration)

A router's hook adds the rows of its micro-batches on the device. The sum over ranks costs no
collective: the update of expert biases sums the same numbers, and where there is none but a
balancing loss is reported, they travel at the end of that message. Otherwise they are those of
the expert group, whose ranks tell each other what they send where a program of ours runs the layer,
else of one rank's tokens, and the log says so. Every pipeline stage has its own layers.

What is logged of a layer (:func:`figures`):

=================== ============================================================
max over mean       rows of the fullest expert, rank and node over their mean; ranks wait for the
                    fullest one
entropy             of the shares of experts, over ln E: 1 where all are equal, 0 where one has all
dropped             share of the choices of tokens that no expert has computed
=================== ============================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from mindspeed.files import make_dirs, secure_open
from mindspeed.moe.host_copy import HostCopy
from mindspeed.moe.layer.megatron import ProgramForward
from mindspeed.moe.load.hook import on_routing


@dataclass(frozen=True)
class LoadFigures:
    """Figures of one layer; see the module's documentation."""

    experts: float
    ranks: float
    nodes: float
    entropy: float
    dropped: float


def max_over_mean(loads: Sequence[float]) -> float:
    """The largest load over the mean; 1 without any."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def entropy(loads: Sequence[float]) -> float:
    """Entropy of the shares of experts over that of equal ones; 1 without any."""
    total = sum(loads)
    if not total or len(loads) < 2:
        return 1.0
    shares = [load / total for load in loads if load]
    return -sum(share * math.log(share) for share in shares) / math.log(len(loads))


def figures(
    tokens: Sequence[float],
    chosen: float,
    ranks: int = 1,
    node: int | None = None,
    place: Sequence[int] | None = None,
) -> LoadFigures:
    """Figures of a layer.

    Args:
        tokens: rows of each expert.
        chosen: choices of all tokens: their number times the experts of a token.
        ranks: ranks that share the experts.
        node: ranks of a node; None: all are in one.
        place: the rank of each expert; None: consecutive ones.
    """
    local = len(tokens) // ranks
    by_rank = [0.0] * ranks
    for expert, rows in enumerate(tokens):
        by_rank[expert // local if place is None else place[expert]] += rows
    of_node = node or ranks
    by_node = [sum(by_rank[first : first + of_node]) for first in range(0, ranks, of_node)]
    return LoadFigures(
        max_over_mean(tokens),
        max_over_mean(by_rank),
        max_over_mean(by_node),
        entropy(tokens),
        1 - sum(tokens) / chosen if chosen else 0.0,
    )


ALL, GROUP, OWN = "all ranks", "one expert group", "one rank's tokens"
"""Over which ranks a figure is summed."""


class LayerLosses(Protocol):
    """Losses by layer that are about to be summed (:mod:`mindspeed.adaptor.moe`)."""

    values: torch.Tensor

    def divided_by(self) -> int:
        """What the sum over all ranks has been divided by."""
        ...


@dataclass(frozen=True)
class LoadSettings:
    """What is known before groups exist.

    Attributes:
        folder: gets a file of each stage.
        interval: iterations between two reports.
        experts: of a layer.
        topk: experts of a token.
        slices: expert tensor parallel size.
        node: ranks of a node.
        drops: tokens may be dropped.
    """

    folder: Path
    interval: int
    experts: int
    topk: int
    slices: int = 1
    node: int = 8
    drops: bool = False


@dataclass
class _Layer:
    """One router and what it has counted since the last report."""

    router: Any
    own: torch.Tensor  # int64 [experts]
    chosen: int = 0  # choices of this rank's tokens
    group: torch.Tensor | None = None  # [experts] on the host, over the expert group
    summed: torch.Tensor | None = None  # [experts], over all ranks
    bias: torch.Tensor | None = None  # at the last report

    @property
    def number(self) -> int:
        """Number of the layer, from 1."""
        return int(self.router.layer_number or 0)


class LoadWatch:
    """Watches all layers of this rank; see the module's documentation."""

    def __init__(self, settings: LoadSettings, parallel: Callable[[], RankPlace]) -> None:
        self._settings = settings
        self._parallel = parallel
        self._layers: list[_Layer] = []
        self._copy: HostCopy | None = None
        self._over = OWN
        self._found: dict[int, dict[str, float]] = {}
        self._iteration = 0  # that has run last

    def chunk(self, model: torch.nn.Module, config: Any, vp_stage: int | None) -> None:
        """Watch the routers of a model chunk."""
        from megatron.core.transformer.moe.moe_layer import MoELayer

        for module in model.modules():
            if isinstance(module, MoELayer):
                rows = torch.zeros(self._settings.experts, dtype=torch.int64)
                layer = _Layer(module.router, rows.to(module.router.weight.device))
                self._layers.append(layer)
                on_routing(module.router, self._counter(layer))
                forward = vars(module).get("forward")
                if isinstance(forward, ProgramForward):
                    forward.request = replace(forward.request, watch=_group_counter(layer))

    def _counter(self, layer: _Layer) -> Callable[[torch.Tensor], None]:
        def count(routing_map: torch.Tensor) -> None:
            layer.own += routing_map.sum(0)
            layer.chosen += routing_map.shape[0] * self._settings.topk

        return count

    def counted_for_bias(self, sums: torch.Tensor) -> None:
        """Take what the update of expert biases has summed over all ranks in a step.

        Args:
            sums: ``[layers, experts]`` of this rank's layers with a bias, in their order.
        """
        with_bias = [layer for layer in self._layers if _bias(layer) is not None]
        for layer, rows in zip(with_bias, sums, strict=True):
            self._add(layer, rows)

    @contextmanager
    def reduced(self, balance: LayerLosses) -> Iterator[None]:
        """Let the message of a balancing loss carry the counts of all layers.

        Args:
            balance: the losses by layer that this block sums over ranks.
        """
        if any(_bias(layer) is not None for layer in self._layers):
            yield
            return
        values = balance.values
        rows = values.new_zeros(values.numel(), self._settings.experts)
        for layer in self._layers:
            rows[layer.number - 1] = layer.own
        balance.values = torch.cat([values, rows.view(-1)])
        yield
        both = balance.values
        balance.values = both[: values.numel()]
        rows = both[values.numel() :].view(rows.shape) * balance.divided_by()
        for layer in self._layers:
            self._add(layer, rows[layer.number - 1])
            layer.own.zero_()
        self._start()

    def _add(self, layer: _Layer, rows: torch.Tensor) -> None:
        layer.summed = rows.clone() if layer.summed is None else layer.summed + rows

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Start the copy to the host after the step that is reported."""
        yield
        self._iteration = iteration
        self._start()

    def _start(self) -> None:
        if self._iteration % self._settings.interval:
            return
        rows = []
        for layer in self._layers:
            counts = layer.own if layer.summed is None else layer.summed
            bias = _bias(layer)
            change = counts.new_zeros(2, dtype=torch.float64)
            if bias is not None:
                before = torch.zeros_like(bias) if layer.bias is None else layer.bias
                change = torch.stack([bias.abs().max(), (bias - before).abs().max()])
            rows.append(torch.cat([counts.double(), change.double()]))
        if rows:
            self._copy = HostCopy()
            self._copy.start(torch.stack(rows))

    def text(self, iteration: int) -> str:
        """The figures of the fullest layer, for the log line; writes this stage's file."""
        found = self.figures(iteration)
        if not found:
            return ""
        layer = int(found["expert_layer"])
        words = [
            f"experts: fullest {found['expert_load']:.2f}x mean (layer {layer})",
            f"ranks {found['expert_rank_load']:.2f}x",
        ]
        if "expert_node_load" in found:
            words.append(f"nodes {found['expert_node_load']:.2f}x")
        words.append(f"entropy {found['expert_entropy']:.3f}")
        if "expert_dropped" in found:
            words.append(f"dropped {found['expert_dropped']:.2%}")
        if "expert_bias" in found:
            words.append(f"bias {found['expert_bias']:.3g}")
            words.append(f"its change {found['expert_bias_change']:.3g}")
        return ", ".join([*words, f"of {self._over}"])

    def figures(self, iteration: int) -> Mapping[str, float]:
        """The worst figures of this rank's layers since the last report, by name."""
        if iteration not in self._found:
            self._found = {iteration: self._take(iteration)}
        return self._found[iteration]

    def _take(self, iteration: int) -> dict[str, float]:
        if self._copy is None:
            return {}
        parallel, settings = self._parallel(), self._settings
        counts = self._copy.get().tolist()
        self._copy = None
        every = all(layer.summed is not None for layer in self._layers)
        group = all(layer.group is not None for layer in self._layers)
        self._over = ALL if every or parallel.copies == 1 else GROUP if group else OWN
        found: list[tuple[_Layer, LoadFigures, list[float]]] = []
        for layer, row in zip(self._layers, counts, strict=True):
            copies = parallel.copies if self._over == ALL else 1
            if self._over == GROUP:
                assert layer.group is not None
                row[:-2] = layer.group.sum(0).tolist()
                copies = layer.group.shape[0]
            rows, chosen = row[:-2], layer.chosen * copies
            node = max(1, settings.node // settings.slices)
            found.append((layer, figures(rows, chosen, parallel.experts, node), row))
        if parallel.writes:
            self._write(iteration, found)
        for layer in self._layers:
            layer.own.zero_()
            bias = _bias(layer)
            layer.chosen, layer.summed, layer.group = 0, None, None
            layer.bias = None if bias is None else bias.clone()
        return self._worst(found, parallel)

    def _worst(
        self, found: Sequence[tuple[_Layer, LoadFigures, list[float]]], parallel: RankPlace
    ) -> dict[str, float]:
        fullest = max(found, key=lambda one: one[1].experts)
        worst = {
            "expert_load": fullest[1].experts,
            "expert_layer": float(fullest[0].number),
            "expert_rank_load": max(one.ranks for _, one, _ in found),
            "expert_entropy": min(one.entropy for _, one, _ in found),
        }
        if parallel.experts * self._settings.slices > self._settings.node:
            worst["expert_node_load"] = max(one.nodes for _, one, _ in found)
        if self._settings.drops:
            worst["expert_dropped"] = max(one.dropped for _, one, _ in found)
        if any(_bias(layer) is not None for layer, _, _ in found):
            worst["expert_bias"] = max(row[-2] for _, _, row in found)
            worst["expert_bias_change"] = max(row[-1] for _, _, row in found)
        return worst

    def _write(
        self, iteration: int, found: Sequence[tuple[_Layer, LoadFigures, list[float]]]
    ) -> None:
        make_dirs(self._settings.folder)
        path = self._settings.folder / f"stage-{self._parallel().stage}.jsonl"
        record = {
            "iteration": iteration,
            "over": self._over,
            "layers": [
                {
                    "layer": layer.number,
                    "tokens": [int(rows) for rows in row[:-2]],
                    **asdict(one),
                    **({} if _bias(layer) is None else {"bias": row[-2], "change": row[-1]}),
                }
                for layer, one, row in found
            ],
        }
        with secure_open(path, "a") as file:
            file.write(json.dumps(record) + "\n")


@dataclass(frozen=True)
class RankPlace:
    """Place of this rank in the job.

    Attributes:
        experts: ranks with different experts.
        copies: ranks with other tokens and the same layers.
        stage: of the pipeline.
        writes: this rank writes the stage's file.
    """

    experts: int
    copies: int
    stage: int
    writes: bool

    @classmethod
    def here(cls) -> RankPlace:
        from megatron.core import parallel_state as state

        group = state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return cls(
            state.get_expert_model_parallel_world_size(),
            group.size(),
            state.get_pipeline_model_parallel_rank(),
            group.rank() == 0,
        )


def _group_counter(layer: _Layer) -> Callable[[torch.Tensor], None]:
    def count(rows: torch.Tensor) -> None:
        layer.group = rows.clone() if layer.group is None else layer.group + rows

    return count


def _bias(layer: _Layer) -> torch.Tensor | None:
    found: torch.Tensor | None = getattr(layer.router, "expert_bias", None)
    return found
