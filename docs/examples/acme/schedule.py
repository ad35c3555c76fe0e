"""``--acme-gpipe``: all forward passes of a step, then all backward passes (GPipe, 2019)."""

import contextlib
from dataclasses import dataclass

from mindspeed.features.feature import Feature
from mindspeed.features.flags import flag


@dataclass(frozen=True)
class Options:
    acme_gpipe: bool = flag(False, "all forward passes, then all backward passes")


def gpipe(plain):
    """``plain``: the schedule that Megatron chose, which evaluation keeps."""
    import torch
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.utils import get_model_config, get_model_type

    def schedule(**given):
        if given.get("forward_only"):
            return plain(**given)
        stage, reader = _only(given["model"]), _only(given["data_iterator"])
        count, forward_step_func = given["num_microbatches"], given["forward_step_func"]
        config, group = get_model_config(stage), ps.get_pipeline_model_parallel_group()
        links = P2PCommunicator(group, config)
        first, last = group.rank() == 0, group.rank() == group.size() - 1
        sequence = given["seq_length"] // config.context_parallel_size
        if config.sequence_parallel:
            sequence //= config.tensor_model_parallel_size
        shape = (sequence, given["micro_batch_size"], config.hidden_size)
        losses, passes, total = [], [], torch.zeros([], dtype=torch.int, device="cuda")
        with config.no_sync_func() if config.no_sync_func else contextlib.nullcontext():
            for index in range(count):
                received = links.recv_forward([shape], first)
                sent, tokens = schedules.forward_step(
                    forward_step_func, reader, stage, count, received, losses, config,
                    config.context_parallel_size, current_microbatch=index, is_last_stage=last,
                )  # fmt: skip
                links.send_forward(sent, last)
                schedules.deallocate_output_tensor(sent[0], config.deallocate_pipeline_outputs)
                passes.append((received, sent))
                total += tokens
            for received, sent in passes:
                gradient = links.recv_backward([shape], last)
                gradient = schedules.backward_step(
                    received, sent, gradient, get_model_type(stage), config
                )
                links.send_backward(gradient, first)
        if config.finalize_model_grads_func is not None:
            per_token = config.calculate_per_token_loss
            config.finalize_model_grads_func([stage], total if per_token else None)
        return losses

    return schedule


def _only(value):
    return value[0] if isinstance(value, list) else value


FEATURE = Feature(
    name="acme-gpipe",
    summary="the pipeline schedule GPipe",
    level=2,
    options=Options,
    enabled=lambda options, megatron: options.acme_gpipe,
    attach=lambda seams, *_: seams.schedule.add(gpipe, owner="acme-gpipe"),
    seams=("schedule",),
)
