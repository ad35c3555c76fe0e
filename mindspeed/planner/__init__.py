"""The planner: will a job fit, how fast will it be, which layout is best, without a device.

from mindspeed.planner import plan

found = plan(["--model", "llama3-70b", "--bf16", "--global-batch-size", "1024"], "h100",
             devices=1024)
found.best.layout, found.best.flags
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed.planner.search.plan import plan

__all__ = ["plan"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import mindspeed.megatron_adaptor  # noqa: F401 - before megatron.core
    from mindspeed.planner.search.plan import plan

    return plan
