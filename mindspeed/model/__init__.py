"""Import paths under which other code knows parts of this library.

``mindspeed.model.GPTModel`` is :class:`mindspeed.inference.gpt_model.GPTModel`, imported on first
use; :mod:`.transformer` has the attention mask that a process shares.
"""

from typing import Any

__all__ = ["GPTModel"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mindspeed.inference.gpt_model import GPTModel

    return GPTModel
