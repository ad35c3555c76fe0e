"""All weights that are read are checked to be finite.

One pass over the memory, a small part of the time that a copy of it takes (smallest and largest
value; ``nan`` wins both).
"""

from __future__ import annotations

from pathlib import Path

import torch

from mindspeed.errors import CheckpointError


def check_finite(tensor: torch.Tensor, name: str, where: str | Path) -> None:
    """Check that a tensor that was read from a file holds finite numbers only.

    Args:
        tensor: Any shape, any floating-point dtype; other dtypes are not checked.
        name: Its name, for messages.
        where: The file or directory it comes from.

    Raises:
        CheckpointError: Names the tensor, the first wrong value and its place.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return
    if torch.stack(torch.aminmax(tensor.detach())).isfinite().all():
        return
    wrong = (~tensor.isfinite()).nonzero()
    place = wrong[0].tolist()
    value = tensor[tuple(place)].item()
    raise CheckpointError(
        f"{where}: {name} has {len(wrong):,} of {tensor.numel():,} values that are not finite, the "
        f"first is {value} at {place}: the file is damaged, or the training that wrote it diverged"
    )
