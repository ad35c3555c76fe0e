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
    from mindspeed.testing import saved_for_backward
    from mindspeed.training.pretrain import pretrain

    settings = _prepare([*MODEL, *TRAINING, *flags], int(os.environ["WORLD_SIZE"]))
    peaks = []

    def counted(function):
        def run(**options):
            model = options["model"]
            with saved_for_backward(
                *unwrap_model(model if isinstance(model, list) else [model])
            ) as s:
                result = function(**options)
            peaks.append(s.bytes)
            return result

        return run

    session.current().seams.schedule.add(counted, owner="test")
    pretrain(settings)
    return peaks[-1]
