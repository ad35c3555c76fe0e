"""Records what experts get and return: each row is one token in one expert, whatever dispatcher.

    mlp.experts                input, output     the rows of all experts
    mlp.experts.linear_fc2     input             what is between their two products

Row ``expert * tokens + token`` of the whole tensor, which has no others than those that the router
chose. Which token a row is no dispatcher tells. So the numbers of tokens go the way of the tokens
first: one more exchange with one column. Experts see tokens of all data-parallel ranks that share
them, hence of one micro-batch of each; each micro-batch has a tensor of its own. Where ranks share
an expert, its output and the gradient of its input are terms of a sum.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from mindspeed.compare.digest import Elements
from mindspeed.compare.megatron_places import MicroBatchRows, RankColumns, Ranks, by_sample
from mindspeed.compare.noise import Noise
from mindspeed.compare.recorder import RunRecorder
from mindspeed.journal import Journal


def layers_of(chunk: Any) -> Iterator[tuple[str, Any]]:
    """Layers of experts with Megatron's dispatchers, by path."""
    for path, module in chunk.named_modules():
        if hasattr(module, "token_dispatcher") and hasattr(module, "experts"):
            yield path, module


@dataclass(frozen=True)
class _Rows:
    """The rows of a call of the experts of a rank."""

    batches: dict[int, tuple[torch.Tensor, torch.Tensor]]  # number -> rows here, rows of the whole
    count: int  # rows here, those of padding too
    total: int  # rows of the whole tensor
    samples: int  # whose digests are apart, in a micro-batch


class ExpertHooks:
    """Records the experts of a chunk during a step.

    Args:
        recorder: Gets the tensors.
        what: Kinds of tensors, as in ``--record-what``.
        micro_batches: Numbers of those that are recorded; empty: all.
        noise: Perturbs the tensors; None in runs that are to be trusted.
        ranks: Of this job.
        current: The number and rows of the micro-batch that runs forward; None in a backward.
        samples: Each sample of a micro-batch has digests of its own.
    """

    def __init__(
        self,
        recorder: RunRecorder,
        what: Collection[str],
        micro_batches: Collection[int],
        noise: Noise | None,
        ranks: Ranks,
        current: Callable[[], tuple[int, MicroBatchRows] | None],
        samples: bool = False,
    ) -> None:
        self._recorder, self._what, self._noise = recorder, what, noise
        self._only, self._ranks, self._current = frozenset(micro_batches), ranks, current
        self._samples = samples
        self._calls: defaultdict[str, list[_Rows]] = defaultdict(list)
        self._again: defaultdict[str, int] = defaultdict(int)
        self._running: dict[str, _Rows] = {}

    def hook(self, name: str, layer: Any, journal: Journal, handles: list[Any]) -> None:
        """Record a layer of experts.

        Args:
            name: Of the layer in the whole model.
            layer: Megatron's ``MoELayer``.
            journal: Notes what is replaced.
            handles: Gets the hooks.
        """
        dispatcher = layer.token_dispatcher
        preprocess = dispatcher.dispatch_preprocess

        @functools.wraps(preprocess)
        def run(hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> Any:
            current = self._current()
            if current is None:
                index = self._again[name]
                self._again[name] += 1
                self._running[name] = self._calls[name][index]
            else:
                rows = self._rows(layer, preprocess, current, hidden, routing_map, probs)
                self._calls[name].append(rows)
                self._running[name] = rows
            return preprocess(hidden, routing_map, probs)

        journal.set(dispatcher, "dispatch_preprocess", run, owner="compare")
        experts, own = layer.experts, f"{name}.experts"

        def before(module: Any, args: Any) -> Any:
            columns = RankColumns(args[0].shape[-1])
            self._tensor(name, own, "input", args[0], columns, 1)

        def after(module: Any, args: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            terms = layer.config.moe_ffn_hidden_size or layer.config.ffn_hidden_size
            result = self._tensor(name, own, "output", first, RankColumns(first.shape[-1]), terms)
            if result is None:
                return None
            return (result, *output[1:]) if isinstance(output, tuple) else result

        def between(module: Any, args: Any) -> Any:
            columns = self._columns(args[0].shape[-1])
            path, terms = f"{own}.linear_fc2", layer.config.hidden_size
            result = self._tensor(name, path, "input", args[0], columns, terms)
            return None if result is None else (result, *args[1:])

        handles.append(experts.register_forward_pre_hook(before))
        handles.append(experts.register_forward_hook(after))
        if hasattr(experts, "linear_fc2"):
            handles.append(experts.linear_fc2.register_forward_pre_hook(between))

    def _expert_ranks(self) -> int:
        from megatron.core import parallel_state

        return int(parallel_state.get_expert_tensor_parallel_world_size() or 1)

    def _columns(self, width: int) -> RankColumns:
        from megatron.core import parallel_state

        size = self._expert_ranks()
        rank = parallel_state.get_expert_tensor_parallel_rank() if size > 1 else 0
        return RankColumns(width * size, rank, size)

    @torch.no_grad()
    def _rows(
        self,
        layer: Any,
        preprocess: Callable[..., Any],
        current: tuple[int, MicroBatchRows],
        hidden: torch.Tensor,
        routing_map: torch.Tensor,
        probs: torch.Tensor,
    ) -> _Rows:
        """Send the numbers of this rank's tokens to the experts."""
        number, rows = current
        ranks, dispatcher = self._ranks, layer.token_dispatcher
        place = rows.place(hidden.shape[0], RankColumns(1))
        assert place is not None
        numbers = place.rows + 1 + ranks.dp * rows.total
        sent = numbers.to(hidden.device, torch.float32).view(*hidden.shape[:-1], 1)
        shared = getattr(dispatcher, "shared_experts", None)
        if shared is not None:
            dispatcher.shared_experts = None
        try:
            sent, weights = preprocess(sent, routing_map, probs.detach())
            sent, weights = dispatcher.token_dispatch(sent, weights)
            sent, counts, _ = dispatcher.dispatch_postprocess(sent, weights)
        finally:
            if shared is not None:
                dispatcher.shared_experts = shared
        arrived = sent.view(-1).cpu().round().long()
        local = torch.tensor(layer.local_expert_indices).repeat_interleave(counts.cpu().long())
        sources = (arrived - 1).div(rows.total, rounding_mode="floor")
        index = local * rows.total + (arrived - 1) % rows.total
        first = number - ranks.dp
        batches = {}
        for source in sources[arrived > 0].unique().tolist():
            here = ((sources == source) & (arrived > 0)).nonzero().view(-1)
            batches[first + source] = here, index[here]
        total = layer.config.num_moe_experts * rows.total
        return _Rows(batches, len(arrived), total, rows.samples if self._samples else 1)

    def _tensor(
        self,
        layer: str,
        name: str,
        what: str,
        x: torch.Tensor,
        columns: RankColumns,
        terms: int,
    ) -> torch.Tensor | None:
        """Record a tensor and its gradient; the perturbed tensor in a run with noise."""
        rows, step = self._running.get(layer), self._recorder.step
        if rows is None or step is None or not isinstance(x, torch.Tensor):
            return None
        if len(x) != rows.count:
            step.skipped[f"{name}/{what}"] = "it has other rows than its experts"
            return None
        first_time, shared = self._current() is not None, self._expert_ranks() > 1
        places = {
            number: (here, Elements((rows.total, columns.total), index, columns.index(), True))
            for number, (here, index) in rows.batches.items()
            if not self._only or number in self._only
        }
        result = None
        if self._noise is not None and first_time and what != "input":
            noisy = self._noise.on(x, f"{sorted(places)}/{name}/{what}", terms)
            result = x + (noisy - x.detach())
        kind = "activations" if what == "output" else "inputs"
        target = x if result is None else result
        if first_time and kind in self._what:
            self._add(
                "forward",
                name,
                what,
                target,
                rows.samples,
                places,
                terms,
                shared and what == "output",
            )
        graph = target.requires_grad and torch.is_grad_enabled()
        if "output-gradients" in self._what and graph:

            def record(value: torch.Tensor) -> None:
                partial = shared and name.endswith(".experts") and what == "input"
                self._add(
                    "backward", name, f"grad_{what}", value, rows.samples, places, terms, partial
                )

            target.register_hook(record)
        return result

    def _add(
        self,
        when: str,
        name: str,
        what: str,
        x: torch.Tensor,
        samples: int,
        places: dict[int, tuple[torch.Tensor, Elements]],
        terms: int,
        partial: bool,
    ) -> None:
        for batch, (here, place) in places.items():
            whole = replace(place, partial=partial)
            for number, (rows, own) in enumerate(by_sample(whole, samples), batch * samples):
                part = x.detach()[here[rows].to(x.device)]
                self._recorder.add(number, when, name, what, part, own, terms)
