"""Final values of a job, as far as its layout is read from them."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

ONE_RANK = {
    "world_size": 1, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1, "data_parallel_size": 1, "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None, "virtual_pipeline_model_parallel_size": None,
    "use_tp_pp_dp_mapping": False, "micro_batch_size": 1, "global_batch_size": 1,
    "rampup_batch_size": None,
}  # fmt: skip


def values(**changes: Any) -> Namespace:
    """The values of one rank, with changes."""
    return Namespace(**ONE_RANK | changes)
