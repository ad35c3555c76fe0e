"""Mixture-of-experts layers of Megatron: features replace their forward, or see their sums.

A forward is replaced on the instances:

    def attach(seams, options, megatron):
        def replace(model, config, vp_stage):
            for layer in moe_layers(model):
                replace_forward(layer, lambda forward: overlapped(forward, options), seams.journal)

        seams.chunk.add(replace, owner=self.name)

The seam ``chunk`` gets the finished modules, so both layer specs and multi-token prediction are
reached, no class is patched, and detaching the feature restores the layers that are still alive.
``--overlap-moe-expert-parallel-comm`` does not call ``forward``: its schedule runs router,
dispatcher and experts of a layer one by one.

Two seams are sums over ranks that Megatron makes of the tokens of experts. ``expert_counts``: the
update of expert biases sums the tokens of each expert over all ranks with other tokens.
``balance_losses``: a balancing loss is summed for the log; a function may lengthen its message, so
that further numbers cost no collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.seam import SeamTable, owner_of
from mindspeed.journal import replace_method

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from mindspeed.journal import Journal


def moe_layers(model: torch.nn.Module) -> Iterator[MoELayer]:
    """The mixture-of-experts layers of a model chunk, multi-token prediction's included."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return (module for module in model.modules() if isinstance(module, MoELayer))


def replace_forward(
    module: torch.nn.Module,
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    journal: Journal,
) -> None:
    """Replace ``forward`` of one module until ``journal`` is undone. Replacements stack.

    The journal does not keep the module alive.

    Args:
        module: Any module; hooks and recomputation call its ``forward`` as before.
        make: Gets the ``forward`` that there is, returns the new one.
        journal: A feature's ``seams.journal``.
    """
    replace_method(module, "forward", make, journal)


class BalanceLoss:
    """Losses of one kind by layer that are about to be summed over ranks.

    Args:
        entry: of Megatron's tracker: a dictionary, since 0.18 an object.
    """

    def __init__(self, entry: Any) -> None:
        self._entry = entry if isinstance(entry, dict) else vars(entry)

    @property
    def values(self) -> torch.Tensor:
        """``[layers]``, or lengthened; fp32."""
        found: torch.Tensor = self._entry["values"]
        return found

    @values.setter
    def values(self, values: torch.Tensor) -> None:
        self._entry["values"] = values

    def divided_by(self) -> int:
        """What the sum over all ranks has been divided by: the data-parallel ranks, or 1."""
        from megatron.core import parallel_state

        entry = self._entry
        whole = entry.get("reduce_group_has_dp") or not entry.get("needs_dp_avg", True)
        return 1 if whole else int(parallel_state.get_data_parallel_world_size())


def expert_counts(seams: SeamTable) -> tuple[Patch, ...]:
    """Patch of the update of expert biases."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_updated_expert_bias(
            tokens_per_expert: torch.Tensor, *rest: Any, **options: Any
        ) -> Any:
            updated = original(tokens_per_expert, *rest, **options)  # sums in place
            seams.expert_counts.run_all(tokens_per_expert)
            return updated

        return get_updated_expert_bias

    return (
        Patch(
            "megatron.core.transformer.moe.moe_utils:get_updated_expert_bias",
            make,
            owner_of("expert_counts"),
            "features read the sums that expert biases follow",
            expects="(tokens_per_expert, expert_bias, expert_bias_update_rate, ...)",
        ),
    )


def balance_losses(seams: SeamTable) -> tuple[Patch, ...]:
    """Patches of the sum of balancing losses over ranks."""

    def of_functions(original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce_aux_losses_tracker_across_ranks(
            track_names: list[str] | None = None, *rest: Any, **options: Any
        ) -> None:
            from megatron.core.transformer.moe import moe_utils

            tracker = moe_utils.get_moe_layer_wise_logging_tracker()
            with _lengthened(seams, tracker, list(tracker) if track_names is None else track_names):
                original(track_names, *rest, **options)

        return reduce_aux_losses_tracker_across_ranks

    def of_tracker(original: Callable[..., Any]) -> Callable[..., Any]:
        def _sync_metrics(self: Any, metric_names: list[str], *rest: Any, **options: Any) -> None:
            with _lengthened(seams, self.metrics, metric_names):
                original(self, metric_names, *rest, **options)

        return _sync_metrics

    owner, why = owner_of("balance_losses"), "features lengthen the message of balancing losses"
    return (
        Patch(
            "megatron.core.transformer.moe.moe_utils:reduce_aux_losses_tracker_across_ranks",
            of_functions,
            owner,
            why,
            expects="(track_names, ...)",
            versions=">=0.16,<0.18",
        ),
        Patch(
            "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker._sync_metrics",
            of_tracker,
            owner,
            why,
            expects="(self, metric_names, ...)",
            versions=">=0.18",
        ),
    )


@contextmanager
def _lengthened(seams: SeamTable, tracker: Any, names: list[str]) -> Iterator[None]:
    """Around the sum of all losses: the first balancing loss goes to the seam."""
    with ExitStack() as stack:
        first = next((one for one in names if one.endswith("load_balancing_loss")), None)
        if first is not None and first in tracker:
            stack.enter_context(seams.balance_losses.around(BalanceLoss(tracker[first])))
        yield
