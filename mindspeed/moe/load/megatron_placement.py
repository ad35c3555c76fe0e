"""Experts of Megatron's layers in other slots: their program, and their names in checkpoints.

    placed = PlacedExperts(layer, slots, journal)
    placed.slots = others        # once the experts have been exchanged

Checkpoints hold experts by number, with their optimizer states: loading one under another placement
is an exchange of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.journal import Journal, replace_method
from mindspeed.moe.layer.megatron import change
from mindspeed.moe.load.slots import inverse


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
