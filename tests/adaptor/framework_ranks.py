"""A framework as verl and ms-swift are: Megatron's functions bound at the head of its modules.

The import line comes first, then the framework's modules, then ``repatch`` with its arguments.
"""

from __future__ import annotations

import importlib
import logging
import sys
import types
from pathlib import Path
from typing import Any

MODULES = {
    "optimizer": "from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer\n"
    "BUILDERS = {'megatron': get_megatron_optimizer}\n",
    "engine": "from megatron.core.pipeline_parallel import get_forward_backward_func\n"
    "class Engine:\n"
    "    schedule = staticmethod(get_forward_backward_func)\n",
}


def train(folder: str, options: dict[str, Any], stages: int, steps: int) -> dict[str, Any]:
    """Build a model and an optimizer with the framework's functions and train it.

    Args:
        folder: an empty directory for the framework's package, outside the script's.
        options: for ``repatch``, next to the job's.
        stages: ranks of the pipeline.
        steps: optimizer steps.

    Returns:
        What ran: class of the schedule, class and state of the optimizer, and the log.
    """
    import torch

    from mindspeed import session
    from mindspeed.megatron_adaptor import repatch

    package = Path(folder) / "rlframework"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    for name, text in MODULES.items():
        (package / f"{name}.py").write_text(text)
    sys.path.insert(0, folder)
    for name in [name for name in sys.modules if name.startswith("rlframework")]:
        del sys.modules[name]
    bound: types.ModuleType = importlib.import_module("rlframework.optimizer")
    engine = importlib.import_module("rlframework.engine").Engine

    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    messages = _Messages()
    logging.getLogger("mindspeed").addHandler(messages)
    job = {
        "num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "bf16": True,
        "pipeline_model_parallel_size": stages, "tensor_model_parallel_size": 1,
    }  # fmt: skip
    repatch({**job, **options})
    parallel_state.initialize_model_parallel(1, stages)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config, model = _model(stages)
    schedule = engine.schedule()
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(config, ddp, model)
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = bound.BUILDERS["megatron"](
        bound.OptimizerConfig(
            optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16,
            use_distributed_optimizer=True, clip_grad=0.0,
        ),
        [model],
    )  # fmt: skip
    for _ in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        batches = list(torch.arange(64).reshape(4, 2, 8) % 32)
        schedule(
            forward_step_func=_forward,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=4,
            seq_length=8,
            micro_batch_size=2,
            forward_only=False,
        )
        optimizer.step()
    inner = (
        optimizer.chained_optimizers[0] if hasattr(optimizer, "chained_optimizers") else optimizer
    )
    return {
        "schedule": type(schedule).__name__,
        "optimizer": inner.config.use_precision_aware_optimizer,
        "reached": session.current().reached.by_feature(),
        "log": messages.texts,
    }


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _model(stages: int) -> tuple[Any, Any]:
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=4, hidden_size=16, num_attention_heads=2, add_bias_linear=False, bf16=True,
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        pipeline_model_parallel_size=stages,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    return config, model.bfloat16()


def _forward(batches: Any, model: Any) -> Any:
    import torch

    tokens = next(batches)
    positions = torch.arange(8).expand(2, 8)
    output = model(tokens, positions, None, labels=tokens)
    return output, lambda losses: (losses.float().mean(), {})


def set_positions() -> dict[str, Any]:
    """As verl's ``preprocess_for_mindspeed`` does, for sequences of 3, 1 and 4 tokens."""
    import torch

    from mindspeed.core.context_parallel import get_batch_utils as batches
    from mindspeed.errors import ConfigError

    positions = torch.tensor([0, 1, 2, 0, 0, 1, 2, 3], dtype=torch.int32)[:, None].contiguous()
    refused = []

    def refuse(wrong: torch.Tensor) -> None:
        try:
            batches.set_position_ids(wrong)
        except ConfigError as error:
            refused.append(str(error))

    refuse(positions)
    batches.set_actual_seq_len(torch.tensor([0, 3, 4, 8], dtype=torch.int32))
    batches.set_position_ids(positions)
    kept, ends = batches.get_position_ids().equal(positions), batches.get_actual_seq_len()
    for wrong in (positions + 1, positions[:-1], positions.t()):
        refuse(wrong)
    batches.set_actual_seq_len(None)
    return {"kept": kept, "ends": ends, "refused": refused, "left": batches.get_position_ids()}


def refused_names(names: list[str]) -> list[str]:
    """What ``repatch`` says of a job with each of these names."""
    from mindspeed.errors import ConfigError
    from mindspeed.megatron_adaptor import repatch

    texts = []
    for name in names:
        try:
            repatch({"hidden_size": 8, name: True})
        except ConfigError as error:
            texts.append(str(error))
    return texts


def repaired_by_what_is_told() -> list[bool]:
    """Whether the repairs of multi-token prediction are on: told nothing, then arguments."""
    from mindspeed import session

    active, found = session.current(), []
    for told in (None, {}, {"mtp_num_layers": None}, {"mtp_num_layers": 1}, {"num_layers": 2}):
        if told is not None:
            active.configure(told)
        stacks = active.engine.stacks().values()
        found.append(any(patch.owner == "repair:mtp" for patches, _ in stacks for patch in patches))
    return found
