"""Process groups and seeds: everything that must exist before the model."""

from __future__ import annotations

import argparse
import os
import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from mindspeed import device
from mindspeed.adaptor.versions.trainer import known_options


def initialize(args: argparse.Namespace) -> None:
    """Join the job, create Megatron's parallel groups and seed all generators."""
    join_job(args.distributed_backend, args.distributed_timeout_minutes)
    parallel_groups(args)
    seed_everything(args)


def join_job(backend: str = "auto", timeout_minutes: int = 10) -> None:
    """Initialise torch.distributed from torchrun's environment; alone without one."""
    here = device.current()
    if here.count() > 1:
        here.set_index(int(os.environ.get("LOCAL_RANK", "0")) % here.count())
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    chosen = "gloo" if backend == "gloo" else here.backend
    dist.init_process_group(chosen, timeout=timedelta(minutes=timeout_minutes))


def leave_job() -> None:
    """Destroy all process groups. Collective; forked processes must have ended before.

    With gloo the ranks go one after the other, the last one first: where both ends of a connection
    close in the same instant, gloo may find an event of a closed connection and abort the process
    (of 2 ranks in about 1 % of all runs; 3 % where forked processes hold its sockets too).
    Rank 0 is last because it may be the one that holds the store.
    """
    dist.barrier()
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(device.current().torch_device())
    in_turn = backend.name() == "gloo"  # an emulated device calls the group otherwise
    store = dist.distributed_c10d._get_default_store()
    if in_turn and rank < last:
        store.wait([f"mindspeed/left/{rank + 1}"])
    dist.destroy_process_group()
    if in_turn and rank > 0:
        store.set(f"mindspeed/left/{rank}", "")


def parallel_groups(args: argparse.Namespace) -> None:
    """Create Megatron's groups; features add theirs right after (seam ``parallel_groups``)."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        pipeline_model_parallel_comm_backend=args.pipeline_model_parallel_comm_backend,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=args.expert_model_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        nccl_communicator_config_path=args.nccl_communicator_config_path,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=args.enable_gloo_process_groups,
        **known_options(
            parallel_state.initialize_model_parallel,
            create_all_gather_group=args.create_all_gather_group,
        ),
    )


def seed_everything(args: argparse.Namespace) -> None:
    """Seed host and device generators, differently on each pipeline stage.

    With ``--data-parallel-random-init`` also differently on each data-parallel rank.
    """
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    if args.data_parallel_random_init:
        seed += 10 * parallel_state.get_data_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(
        seed, args.te_rng_tracker, args.inference_rng_tracker, args.cuda_graph_impl != "none"
    )
