"""The arguments seam: our flags in Megatron-LM's parser, our choice after Megatron's own checks.

``add_megatron_arguments`` builds the parser; our flag groups are added behind Megatron's.
``validate_args`` is where Megatron's values become final, and it runs before any process group or
module exists: there the session decides which features are on and attaches them.

Megatron demands ``CUDA_DEVICE_MAX_CONNECTIONS=1`` with tensor or context parallelism and forbids it
with FSDP. It limits the hardware queues of an NVIDIA GPU, so on other devices Megatron's checks see
the value they demand, whatever the environment says.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from mindspeed import device
from mindspeed.adaptor.patch import Patch
from mindspeed.features import registry
from mindspeed.features.context_parallel import COMM_TYPE_NOT_GIVEN
from mindspeed.session.config_file import read_config_file

OWNER = "arguments"


def argument_patches(configure: Callable[[Any], None]) -> tuple[Patch, ...]:
    """The two patches of Megatron-LM's argument handling.

    Args:
        configure: called with the validated ``argparse.Namespace``.
    """

    def add_flags(original: Callable[..., Any]) -> Callable[..., Any]:
        def add_megatron_arguments(parser: Any) -> Any:
            parser = registry.add_arguments(original(parser), read_config_file())
            parser.set_defaults(cp_comm_type=COMM_TYPE_NOT_GIVEN)
            return parser

        return add_megatron_arguments

    def configure_after(original: Callable[..., Any]) -> Callable[..., Any]:
        def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
            given = {name: getattr(args, name) for name in registry.own_flags() if name in args}
            with _demanded_connections(args):
                result = original(args, *rest, **kwargs)
            vars(args).update(given)  # Megatron sets a few of these names, too
            configure(args)
            return result

        return validate_args

    module = "megatron.training.arguments"
    return (
        Patch(
            f"{module}:add_megatron_arguments",
            add_flags,
            OWNER,
            "flags of our features",
            expects="(parser)",
        ),
        Patch(
            f"{module}:validate_args",
            configure_after,
            OWNER,
            "features attach once Megatron's values are final",
            expects="(args, defaults)",
        ),
    )


@contextlib.contextmanager
def _demanded_connections(args: Any) -> Iterator[None]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if device.current().name == "cuda":
        yield
        return
    given = os.environ.pop(name, None)
    fsdp = getattr(args, "use_torch_fsdp2", False) or getattr(args, "use_megatron_fsdp", False)
    if not fsdp:
        os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if given is not None:
            os.environ[name] = given
