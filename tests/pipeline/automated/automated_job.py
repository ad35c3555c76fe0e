"""One rank of a training whose activations are counted."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tests.training.matrix_job import MODEL, TRAINING


def peak_bytes(flags: Sequence[str]) -> int:
    """Train; the most bytes that autograd holds on this rank at once in the last step."""
    from megatron.core.utils import unwrap_model

    from mindspeed import session
    from mindspeed.cli.pretrain import _prepare
    from mindspeed.instruments import saved_for_backward
    from mindspeed.training.pretrain import pretrain

    settings = _prepare([*MODEL, *TRAINING, *flags], int(os.environ["WORLD_SIZE"]))
    peaks = []

    def counted(function):
        def run(**options):
            model = options["model"]
            chunks = unwrap_model(model if isinstance(model, list) else [model])
            with saved_for_backward(*chunks) as saved:
                result = function(**options)
            peaks.append(saved.bytes)
            return result

        return run

    session.current().seams.schedule.add(counted, owner="test")
    pretrain(settings)
    return peaks[-1]


def recomputed(flags: Sequence[str]) -> list[tuple[str, int]]:
    """What this rank recomputes: site and number of the layer in the model."""
    from unittest import mock

    from mindspeed.cli.pretrain import _prepare
    from mindspeed.memory import megatron as engine
    from mindspeed.training import setup
    from mindspeed.training.configs import transformer_config
    from mindspeed.training.model import build_modules, gpt_model

    args = _prepare([*MODEL, *TRAINING, *flags], int(os.environ["WORLD_SIZE"])).args
    setup.initialize(args)
    found = []
    install = engine.install

    def noted(model, plan, *rest, **options):
        layers = engine.layers_of(model)
        for name, site, _ in plan.actions():
            found.append((site, layers[name].layer_number - 1))
        return install(model, plan, *rest, **options)

    with mock.patch.object(engine, "install", noted):
        build_modules(args, transformer_config(args), gpt_model)
    return found
