"""The seams ``optimizer_args`` and ``optimizer``: around whatever builds the whole optimizer.

``get_megatron_optimizer`` is patched. Megatron's Muon is built by another function, which calls
that one for the parameters that are no matrices and takes the result apart: a feature would change
half of the arguments, and its wrapper would be dropped. Our trainer therefore builds Muon with
:meth:`OptimizerConstruction.build`; where Megatron-LM builds it, features with these seams are
refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.seam import SeamTable, owner_of
from mindspeed.adaptor.signatures import bind
from mindspeed.errors import ConfigError

OWNER = owner_of("optimizer")
_MUON = "megatron.core.optimizer.muon"


class OptimizerConstruction:
    """The two seams of one session, and the patch that they share."""

    def __init__(self, seams: SeamTable) -> None:
        self._seams, self._building = seams, False
        self.patch = Patch(
            "megatron.core.optimizer:get_megatron_optimizer",
            self._replaced,
            OWNER,
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
