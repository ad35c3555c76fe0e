"""``mindspeed profile --modelled``: the earlier name of ``mindspeed explain --timeline``.

Takes the same flags; without ``--cluster`` rates are those of the preset ``generic``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mindspeed.cli import explain
from mindspeed.errors import ConfigError

HELP = "the earlier name of explain --timeline"
PASS_THROUGH = True

_RATES = (
    *("--tflops", "--link-bandwidth", "--link-latency"),
    *("--network-bandwidth", "--network-latency", "--node-size"),
)


def run(argv: Sequence[str]) -> int:
    """Run ``mindspeed explain --timeline``."""
    flags = {word.partition("=")[0] for word in argv}
    if not flags & {"--modelled", "--help", "-h"}:
        raise ConfigError(
            "give --modelled, or call mindspeed explain --timeline: it models a step; real steps "
            "are traced by `mindspeed pretrain --profile`"
        )
    if given := [name for name in _RATES if name in flags]:
        raise ConfigError(
            f"{', '.join(given)}: rates are those of --cluster: a preset (generic, a100, h100, "
            "...) or FILE.json"
        )
    print("mindspeed profile --modelled is now mindspeed explain --timeline", file=sys.stderr)
    default = [] if "--cluster" in flags else ["--cluster", "generic"]
    words = [word for word in argv if word != "--modelled"]
    return explain.run(["--timeline", *default, *words])
