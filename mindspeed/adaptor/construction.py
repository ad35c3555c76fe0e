"""The seams around whatever builds a model chunk, and around whatever builds the whole optimizer.

    model_arguments -> layer_spec -> GPTModel.__init__ -> chunk
    optimizer_args -> get_megatron_optimizer -> optimizer

One patch serves the three seams of the model, so their order does not depend on which feature
attached first: ``layer_spec`` sees the config and the process groups that ``model_arguments``
chose, and ``chunk`` gets the finished modules.

Megatron's Muon is built by another function than ``get_megatron_optimizer``, which calls that one
for the parameters that are no matrices and takes the result apart: a feature would change half of
the arguments, and its wrapper would be dropped. Our trainer therefore builds Muon with
:meth:`OptimizerConstruction.build`; where Megatron-LM builds it, features with these seams are
refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.seam import SeamTable, owner_of
from mindspeed.adaptor.signatures import bind
from mindspeed.errors import ConfigError

_MODEL = owner_of("model_construction")


def build_patch(seams: SeamTable) -> Patch:
    """The patch of ``GPTModel.__init__`` that calls the three seams."""

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            given = dict(bind(original, (self, *args), kwargs))
            given.pop("self")
            given = seams.model_arguments.pipe(given)
            if seams.layer_spec.functions:
                given["transformer_layer_spec"] = seams.layer_spec.pipe(*_block_of(given))
            original(self, **given)
            seams.chunk.run_all(self, given["config"], given.get("vp_stage"))

        return __init__

    return Patch(
        "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        make,
        _MODEL,
        "features change a model chunk's arguments, layer spec and built modules",
        expects="(self, config, transformer_layer_spec, vocab_size, max_sequence_length, ...)",
    )


def checkpoint_patch() -> Patch:
    """The patch that gives layers with an attribute ``stored_as`` that number in checkpoints."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def sharded_state_dict(
            self: Any, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> Any:
            state = original(self, prefix, sharded_offsets, metadata)
            _rename_stored_layers(state, f"{prefix}layers.", self.layers)
            return state

        return sharded_state_dict

    return Patch(
        "megatron.core.transformer.transformer_block:TransformerBlock.sharded_state_dict",
        make,
        _MODEL,
        "features choose the number of a layer in checkpoints",
        expects="(self, prefix, sharded_offsets, metadata)",
    )


def _rename_stored_layers(state: Mapping[str, Any], prefix: str, layers: Any) -> None:
    """Give the entries of layers with an attribute ``stored_as`` that number, from 0."""
    numbers = {
        str(layer.layer_number - 1): layer.stored_as
        for layer in layers
        if hasattr(layer, "stored_as")
    }
    for entry in state.values():
        number, _, rest = entry.key.removeprefix(prefix).partition(".")
        if entry.key.startswith(prefix) and number in numbers:
            entry.key = f"{prefix}{numbers[number]}.{rest}"


def _block_of(given: Mapping[str, Any]) -> tuple[Any, Any, int]:
    """The specs of the layers in this model chunk, the config, and the chunk's first layer."""
    from megatron.core.transformer.transformer_block import _get_block_submodules
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
    from megatron.core.utils import get_pg_rank

    config, vp_stage, groups = given["config"], given.get("vp_stage"), given.get("pg_collection")
    pp_rank = None if groups is None else get_pg_rank(groups.pp)
    block = _get_block_submodules(config, given["transformer_layer_spec"], vp_stage, pp_rank)
    return block, config, get_transformer_layer_offset(config, vp_stage, pp_rank)


_OPTIMIZER = owner_of("optimizer")
_MUON = "megatron.core.optimizer.muon"


class OptimizerConstruction:
    """The two seams of one session, and the patch that they share."""

    def __init__(self, seams: SeamTable) -> None:
        self._seams, self._building = seams, False
        self.patch = Patch(
            "megatron.core.optimizer:get_megatron_optimizer",
            self._replaced,
            _OPTIMIZER,
            "features choose the optimizer's configuration, wrap or replace it",
            expects="(config, model_chunks, ...)",
        )

    def build(self, builder: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``builder``; arguments and result go through the seams, once.

        What it builds in turn, as Muon does with its Adam, goes through none.
        """
        given = self._seams.optimizer_args.pipe(bind(builder, args, kwargs))
        self._building = True
        try:
            optimizer = builder(**given)
        finally:
            self._building = False
        return self._seams.optimizer.pipe(optimizer)

    def _replaced(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
            if self._building:
                return original(*args, **kwargs)
            if sys._getframe(2).f_globals.get("__name__") == _MUON:  # 1 is the dispatcher
                self._refuse()
            return self.build(original, *args, **kwargs)

        return get_megatron_optimizer

    def _refuse(self) -> None:
        both = (self._seams.optimizer_args, self._seams.optimizer)
        owners = dict.fromkeys(owner for seam in both for owner, _ in seam.functions)
        raise ConfigError(
            f"--optimizer muon: {', '.join(owners)} would change only the Adam next to Muon, for "
            "parameters that are no matrices; use --optimizer adam or sgd, train with `mindspeed "
            "pretrain`, which gives features the whole, or leave them out"
        )
