"""Experts of Megatron's layers in other slots, and their exchange between ranks in a run.

    states = ExpertStates(optimizer)
    states.exchange(layer, before, after)        # slots of its experts; collective
    placed = PlacedExperts(layer, slots, journal)
    placed.slots = others                        # once the experts have been exchanged

Weights, main weights and optimizer states are exchanged. One parameter after the other: the ranks
that share its states put them together, and the rank of its old slot sends it to that of the new
one. Every rank then keeps the part that its optimizer holds. Bytes that an expert costs are those
of its weight and states.

Checkpoints hold experts by number, with their optimizer states: loading one under another placement
is an exchange of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.errors import ConfigError
from mindspeed.journal import Journal, replace_method
from mindspeed.moe.layer.megatron import change
from mindspeed.moe.load.hook import on_routing
from mindspeed.moe.load.placement import PlacementTask, loads, search
from mindspeed.moe.load.slots import inverse, nearest


class PlacedExperts:
    """The experts of one layer in slots.

    Args:
        layer: Megatron's ``MoELayer``.
        slots: slot of each expert.
        journal: a feature's; undoing it restores the layer.
    """

    def __init__(self, layer: Any, slots: Sequence[int], journal: Journal) -> None:
        self.layer, self._journal = layer, journal
        self.slots = slots
        replace_method(layer.experts, "sharded_state_dict", self._by_number, journal)

    @property
    def slots(self) -> tuple[int, ...]:
        """Slot of each expert."""
        return self._slots

    @slots.setter
    def slots(self, slots: Sequence[int]) -> None:
        self._slots = tuple(slots)
        change(self.layer, self._journal, slots=self._slots)

    def _by_number(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def sharded_state_dict(*args: Any, **options: Any) -> Any:
            found, numbers = before(*args, **options), inverse(self._slots)
            return {name: _renumbered(one, numbers) for name, one in found.items()}

        return sharded_state_dict


def _renumbered(entry: Any, numbers: Sequence[int]) -> Any:
    """An entry of a sharded state dict, with the number of its expert in place of the slot."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

    if isinstance(entry, ShardedTensorFactory):
        build = entry.build_fn

        def build_by_number(*args: Any) -> Any:
            return [_renumbered(one, numbers) for one in build(*args)]

        return replace(entry, build_fn=build_by_number)
    if isinstance(entry, ShardedTensor):
        axis = entry.prepend_axis_num - 1
        whole = entry.axis_fragmentations
    elif isinstance(entry, ShardedObject):
        axis = len(entry.global_shape) - 1
        whole = entry.global_shape
    else:
        return entry
    if axis < 0 or whole[axis] != len(numbers):
        raise ConfigError(
            "--moe-expert-placement: this checkpoint format has a name for each expert in place "
            "of a number; give --ckpt-format torch_dist"
        )
    offset = list(entry.global_offset)
    offset[axis] = numbers[offset[axis]]
    return replace(entry, global_offset=tuple(offset))


WEIGHT = "weight"
LEAST = 0.02
"""Part of the fullest rank's rows that an exchange must save."""


class Exchanger:
    """Exchanges experts every so many iterations, by the rows of these iterations.

    Args:
        slots: slot of each expert of a layer, by its number, at the start.
        experts: of a layer.
        interval: iterations between two looks; 0: never.
        journal: a feature's.
    """

    def __init__(
        self,
        slots: Callable[[int], Sequence[int]],
        experts: int,
        interval: int,
        journal: Journal,
    ) -> None:
        self._slots, self._experts, self._interval = slots, experts, interval
        self._journal = journal
        self._layers: list[tuple[PlacedExperts, torch.Tensor]] = []
        self._optimizer: Any = None
        self._text = ""

    def chunk(self, model: torch.nn.Module, config: Any, vp_stage: int | None) -> None:
        """Place the experts of a model chunk."""
        from megatron.core.transformer.moe.moe_layer import MoELayer

        for layer in (one for one in model.modules() if isinstance(one, MoELayer)):
            placed = PlacedExperts(layer, self._slots(layer.layer_number), self._journal)
            where = layer.router.weight.device
            rows = torch.zeros(self._experts, dtype=torch.int64, device=where)
            self._layers.append((placed, rows))
            if self._interval:
                on_routing(layer.router, _counter(rows))

    def optimizer(self, optimizer: Any) -> Any:
        """Note the optimizer whose states move with the experts."""
        self._optimizer = optimizer
        return optimizer

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Look after a step. Collective: one all-reduce of E numbers a layer, and what moves."""
        yield
        if not self._interval or iteration % self._interval or not self._layers:
            return
        from megatron.core import parallel_state

        rows = torch.stack([rows for _, rows in self._layers])
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(rows, group=group)
        states, moved, saved = ExpertStates(self._optimizer), 0, 0
        for (placed, own), counts in zip(self._layers, rows.tolist(), strict=True):
            own.zero_()
            ranks = placed.layer.token_dispatcher.ep_group.size()
            after = better(counts, placed.slots, ranks)
            if after is not None:
                moved += states.exchange(placed.layer, placed.slots, after)
                placed.slots = tuple(after)
                saved += 1
        if moved:
            self._text = f"{moved} experts of {saved} layers exchanged after iteration {iteration}"

    def text(self, iteration: int) -> str:
        """What has moved since the last report."""
        text, self._text = self._text, ""
        return text


def better(counts: Sequence[int], slots: Sequence[int], ranks: int) -> list[int] | None:
    """Slots by which the fullest rank has fewer rows; None where that is not worth it.

    Args:
        counts: rows of each expert.
        slots: of each expert now.
        ranks: that share the experts.
    """
    local = len(slots) // ranks
    now = max(loads([slot // local for slot in slots], counts, ranks))
    found = search(PlacementTask(counts, ranks))
    return nearest(found.place, slots, ranks) if found.value[0] < now * (1 - LEAST) else None


def _counter(rows: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def count(routing_map: torch.Tensor) -> None:
        rows.add_(routing_map.sum(0))

    return count


class ExpertStates:
    """States of the experts' parameters, wherever Megatron's optimizer has them.

    Args:
        optimizer: Megatron's, or a chain of them.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizers = list(getattr(optimizer, "chained_optimizers", [optimizer]))

    def exchange(self, layer: Any, before: Sequence[int], after: Sequence[int]) -> int:
        """Move the experts of a layer to other slots. Collective over all ranks that have it.

        Args:
            layer: Megatron's ``MoELayer``.
            before: slot of each expert.
            after: the same, wanted.

        Returns:
            Number of experts that have changed their slot.
        """
        group = layer.token_dispatcher.ep_group
        local = len(before) // group.size()
        first = group.rank() * local
        source = [before[expert] for expert in inverse(after)]  # of each new slot
        moving = [slot for slot, old in enumerate(source) if slot != old]
        for parameters in _by_slot(layer.experts, local):
            old = {slot: self._whole(p) for slot, p in enumerate(parameters, first)}
            new: dict[int, dict[str, torch.Tensor]] = {}
            for name in sorted(old[first]):
                for slot, tensor in self._moved(old, name, source, moving, local, group).items():
                    new.setdefault(slot, {})[name] = tensor
            for slot, tensors in new.items():
                self._write(parameters[slot - first], tensors)
        return len(moving)

    def _moved(
        self,
        old: Mapping[int, Mapping[str, torch.Tensor]],
        name: str,
        source: Sequence[int],
        moving: Sequence[int],
        local: int,
        group: dist.ProcessGroup,
    ) -> dict[int, torch.Tensor]:
        """The new tensors of this rank's slots that get another expert."""
        rank, found, messages = group.rank(), {}, []
        for slot in moving:
            sender, receiver = source[slot] // local, slot // local
            if rank == sender == receiver:
                found[slot] = old[source[slot]][name]
            elif rank == sender:
                peer = dist.get_global_rank(group, receiver)
                messages.append(dist.P2POp(dist.isend, old[source[slot]][name], peer, group))
            elif rank == receiver:
                peer = dist.get_global_rank(group, sender)
                found[slot] = torch.empty_like(next(iter(old.values()))[name])
                messages.append(dist.P2POp(dist.irecv, found[slot], peer, group))
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        return found

    def _whole(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """All elements of a parameter's weight and states, flat, by name."""
        optimizer, shared = self._owner(parameter)
        where = _range(optimizer, parameter) if shared else slice(0, parameter.numel())
        own = {} if where is None else _own(optimizer, parameter, where, shared)
        if not shared:
            return {name: tensor.reshape(-1).clone() for name, tensor in own.items()}
        group = optimizer.data_parallel_group
        whole = {}
        for name, dtype in _known(own, group).items():
            flat = torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
            if where is not None:
                flat[where] = own[name].reshape(-1).to(flat.device)
            dist.all_reduce(flat, group=group)  # each element is of one rank
            whole[name] = flat
        return whole

    def _write(self, parameter: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
        optimizer, shared = self._owner(parameter)
        parameter.data.view(-1).copy_(tensors[WEIGHT])
        where = _range(optimizer, parameter) if shared else slice(0, parameter.numel())
        if where is None:
            return
        own = _own(optimizer, parameter, where, shared)
        for name, tensor in own.items():
            if name != WEIGHT:
                tensor.view(-1).copy_(tensors[name][where])

    def _owner(self, parameter: torch.nn.Parameter) -> tuple[Any, bool]:
        """The optimizer of a parameter, and whether ranks share its states."""
        for one in self._optimizers:
            if any(parameter in each.param_index_map for each in getattr(one, "buffers", ())):
                return one, True
            main = getattr(parameter, "main_param", parameter)
            if any(main is each for group in one.param_groups for each in group["params"]):
                return one, False
        raise ConfigError(
            "--moe-exchange-interval: this optimizer does not say where its states are"
        )


def _by_slot(experts: Any, local: int) -> Iterator[list[torch.nn.Parameter]]:
    """Parameters of the same kind of all local experts, in the order of their slots."""
    modules = getattr(experts, "local_experts", None)
    if modules is not None:
        yield from map(list, zip(*(module.parameters() for module in modules), strict=True))
        return
    for linear in (experts.linear_fc1, experts.linear_fc2):
        for kind in ("weight", "bias"):
            if hasattr(linear, f"{kind}0"):
                yield [getattr(linear, f"{kind}{slot}") for slot in range(local)]


def _range(optimizer: Any, parameter: torch.nn.Parameter) -> slice | None:
    """The elements whose states this rank has; None without any."""
    if parameter not in optimizer.model_param_gbuf_map:
        return None
    buffer, dtype, bucket = optimizer.model_param_gbuf_map[parameter]
    found = optimizer.gbuf_ranges[buffer][dtype][bucket]["param_map"].get(parameter)
    return None if found is None else slice(found["param"].start, found["param"].end)


def _own(
    optimizer: Any, parameter: torch.nn.Parameter, where: slice, shared: bool
) -> dict[str, torch.Tensor]:
    """Weight, main weight and states of this rank's elements."""
    found: dict[str, torch.Tensor] = {WEIGHT: parameter.data.view(-1)[where]}
    if shared:
        states = optimizer._get_main_param_and_optimizer_states(parameter)
    else:
        main = getattr(parameter, "main_param", parameter)
        states = {"param": main.data, **optimizer.optimizer.state[main]}
    for name, state in states.items():
        if name == "step" or not isinstance(state, torch.Tensor):
            continue
        if state.numel() != where.stop - where.start:
            raise ConfigError(
                f"--moe-exchange-interval: the optimizer's {name} has no number for each "
                "parameter; remove the flag that stores states otherwise, or exchange at a "
                "checkpoint with --moe-expert-placement"
            )
        found[name] = state.data
    return found


def _known(own: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> dict[str, torch.dtype]:
    """Names and dtypes of states, also on ranks that have no part of a parameter."""
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, {name: t.dtype for name, t in own.items()}, group=group)
    return {name: dtype for one in every for name, dtype in one.items()}
