"""A training job in typed values: layout, sharding, batch, precision, schedule, how far it is.

    parallel = Parallel.of(args)
    parallel.model            # ranks that hold one copy of the model
    Batch.of(args).samples_of(micro_batches)
    state = state.after_step(samples)

Megatron's classes, its features and checkpoints take a job as one namespace with Megatron-LM's
names. :mod:`mindspeed.training.resolve` writes that namespace, once; these are read from it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Parallel:
    """How the ranks of a job share the model and its data.

    Attributes:
        world: ranks of the job.
        tensor: tensor parallel size.
        pipeline: pipeline parallel size.
        context: context parallel size.
        data: data parallel size, without context parallelism.
        expert: expert parallel size.
        expert_tensor: tensor parallel size of experts.
        sequence: ranks that share the activations between layers (``--sequence-parallel``).
        placed: the user says which layers each stage has (``--pipeline-model-parallel-layout``).
        chunks: virtual pipeline stages of a rank; None without interleaving.
        pipeline_innermost: neighbouring ranks are pipeline stages (``--use-tp-pp-dp-mapping``).
    """

    world: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: int = 1
    placed: bool = False
    chunks: int | None = None
    pipeline_innermost: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> Parallel:
        """Read from final values."""
        tensor = args.tensor_model_parallel_size
        expert_tensor = args.expert_tensor_parallel_size
        return cls(
            world=args.world_size,
            tensor=tensor,
            pipeline=args.pipeline_model_parallel_size,
            context=args.context_parallel_size,
            data=args.data_parallel_size,
            expert=args.expert_model_parallel_size,
            expert_tensor=tensor if expert_tensor is None else expert_tensor,
            sequence=tensor if vars(args).get("sequence_parallel") else 1,
            placed=bool(vars(args).get("pipeline_model_parallel_layout")),
            chunks=args.virtual_pipeline_model_parallel_size,
            pipeline_innermost=args.use_tp_pp_dp_mapping,
        )

    @property
    def model(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def vp_stages(self) -> tuple[int, ...] | tuple[None]:
        """Virtual pipeline stages of a rank, one for each model chunk; ``(None,)`` without."""
        return (None,) if self.chunks is None else tuple(range(self.chunks))

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.world // (self.expert * self.expert_tensor * self.pipeline)

    def first_rank_of(self, stage: int) -> int:
        inner = self.tensor * self.context
        return stage * inner * (1 if self.pipeline_innermost else self.data)


@dataclass(frozen=True)
class Sharding:
    """What data-parallel ranks share of their copies of the model, and when they communicate.

    Attributes:
        distributed_optimizer: each updates a part of the parameters and has the states of these.
        stage: of ZeRO, by Megatron-FSDP: 2 shards gradients, 3 parameters too; 0 without it.
        overlap_gradients: gradients are reduced while backward runs.
        overlap_parameters: parameters are gathered while forward runs.
        align_gradients: all pipeline stages reduce gradients at the same time.
        align_parameters: all pipeline stages gather parameters at the same time.
        gather_in_step: parameters are gathered while the optimizer updates others.
    """

    distributed_optimizer: bool = False
    stage: int = 0
    overlap_gradients: bool = False
    overlap_parameters: bool = False
    align_gradients: bool = True
    align_parameters: bool = False
    gather_in_step: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> Sharding:
        """Read from final values, or those in a checkpoint of a release that has less to share."""
        values = vars(args)
        parameters = values.get("data_parallel_sharding_strategy") == "optim_grads_params"
        return cls(
            distributed_optimizer=bool(args.use_distributed_optimizer),
            stage=(3 if parameters else 2) if values.get("use_megatron_fsdp") else 0,
            overlap_gradients=bool(values.get("overlap_grad_reduce")),
            overlap_parameters=bool(values.get("overlap_param_gather")),
            align_gradients=values.get("align_grad_reduce", True),
            align_parameters=bool(values.get("align_param_gather")),
            gather_in_step=bool(values.get("overlap_param_gather_with_optimizer_step")),
        )

    @property
    def fsdp(self) -> bool:
        """Whether Megatron-FSDP holds the parameters."""
        return self.stage > 0


@dataclass(frozen=True)
class Batch:
    """Samples of a step.

    Attributes:
        micro: samples of a micro-batch.
        whole: samples of a step on all ranks, at its full size.
        data_parallel: ranks that share a step.
        ramp_up: start, increment and samples of batch ramp-up; None without.
    """

    micro: int
    whole: int
    data_parallel: int
    ramp_up: tuple[int, int, int] | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Batch:
        """Read from final values."""
        ramp = args.rampup_batch_size
        return cls(
            micro=args.micro_batch_size,
            whole=args.global_batch_size,
            data_parallel=args.data_parallel_size,
            ramp_up=None if ramp is None else (ramp[0], ramp[1], ramp[2]),
        )

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a full step on one data-parallel rank."""
        return self.whole // (self.micro * self.data_parallel)

    def samples_of(self, micro_batches: int) -> int:
        """Samples of a step of so many micro-batches, on all ranks."""
        return micro_batches * self.micro * self.data_parallel


@dataclass(frozen=True)
class Precision:
    """Data types of a job.

    Attributes:
        name: of parameters and activations: ``bf16``, ``fp16`` or ``fp32``.
        products: of linear layers, whose peak rate a device has: the same, or ``fp8``.
        low: format of their entries: ``fp8``, ``mxfp8``, ``nvfp4``; None: as parameters.
    """

    name: str
    products: str
    low: str | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Precision:
        """Read from the flags."""
        name, values = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32", vars(args)
        if args.fp8:
            return cls(name, "fp8", "mxfp8" if values.get("fp8_recipe") == "mxfp8" else "fp8")
        return cls(name, name, "nvfp4" if values.get("fp4") else None)

    @property
    def narrow(self) -> bool:
        """Whether parameters have 16 bits, next to fp32 copies in the optimizer."""
        return self.name != "fp32"

    @property
    def element(self) -> int:
        """Bytes of a parameter or activation."""
        return 2 if self.narrow else 4


@dataclass(frozen=True)
class MixtureOfExperts:
    """The layers of experts of a model.

    Attributes:
        count: experts of a layer, on all ranks; 0: the model has none.
        topk: experts of a token.
        groups: of equally many experts.
        group_topk: groups that contain the experts of a token.
        forced: experts get equal numbers of tokens (``--moe-router-force-load-balancing``).
        dispatcher: ``--moe-token-dispatcher-type``.
    """

    count: int
    topk: int
    groups: int
    group_topk: int
    forced: bool
    dispatcher: str

    @classmethod
    def of(cls, args: argparse.Namespace) -> MixtureOfExperts:
        """Read from final values."""
        values = vars(args)
        return cls(
            count=args.num_experts or 0,
            topk=values.get("moe_router_topk") or 0,
            groups=values.get("moe_router_num_groups") or 1,
            group_topk=values.get("moe_router_group_topk") or 1,
            forced=bool(values.get("moe_router_force_load_balancing")),
            dispatcher=values.get("moe_token_dispatcher_type") or "",
        )


@dataclass(frozen=True)
class OptimizerStates:
    """What an optimizer keeps of a parameter.

    Attributes:
        name: ``--optimizer``.
        moments: dtypes of both moments.
        quantized: moments have eight bits and scales, except those of some parameters if
            ``exempt``.
        exempt: see above.
        half_master: the fp32 copy of a 16-bit parameter takes only two bytes more.
        offloaded: in host memory.
        gradient: bytes of an entry of a gradient that is reduced.
    """

    name: str
    moments: tuple[torch.dtype, torch.dtype]
    quantized: bool
    exempt: bool
    half_master: bool
    offloaded: bool
    gradient: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> OptimizerStates:
        """Read from final values."""
        remainders = args.use_precision_aware_optimizer and args.store_param_remainders
        shared = args.reuse_fp32_param or (remainders and args.bf16)
        return cls(
            name=args.optimizer,
            moments=(args.exp_avg_dtype, args.exp_avg_sq_dtype),
            quantized=args.quant_states,
            exempt=bool(args.quant_states_exempt),
            half_master=bool(shared or args.main_params_dtype == torch.float16),
            offloaded=bool(
                args.swap_optimizer or args.virtual_optimizer or args.optimizer_cpu_offload
            ),
            gradient=4 if args.accumulate_allreduce_grads_in_fp32 else 2,
        )


@dataclass(frozen=True)
class RecomputeOptions:
    """Activations that backward computes again.

    Attributes:
        granularity: ``full`` layers, ``selective``; None: nothing.
        method: of full layers: all, in ``uniform`` units, or the first ones, a ``block``.
        layers: of a unit, or of the block.
    """

    granularity: str | None
    method: str | None
    layers: int | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> RecomputeOptions:
        """Read from final values."""
        return cls(args.recompute_granularity, args.recompute_method, args.recompute_num_layers)

    @property
    def whole_layers(self) -> bool:
        """Whether layers are computed again from their inputs."""
        return self.granularity == "full"


@dataclass(frozen=True)
class Schedule:
    """How long a job trains and how its learning rate moves; in samples where not said otherwise.

    Attributes:
        iterations: steps; derived where samples were given.
        samples: of the whole job.
        warmup: in which the learning rate grows.
        decay: after which it has its smallest value.
        last_decay: the last phase of ``--lr-decay-style WSD``; None without.
        evaluation_interval: steps between evaluations; None without.
    """

    iterations: int
    samples: int
    warmup: float
    decay: int
    last_decay: int | None
    evaluation_interval: int | None
    evaluation_steps: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> Schedule:
        """Read from final values."""
        if args.train_samples is None:
            unit, samples = args.global_batch_size, args.train_iters * args.global_batch_size
            given = args.lr_decay_iters, args.lr_warmup_iters, args.lr_wsd_decay_iters
        else:
            unit, samples = 1, args.train_samples
            given = args.lr_decay_samples, args.lr_warmup_samples, args.lr_wsd_decay_samples
        decay = given[0] * unit if given[0] else samples
        fraction = args.lr_warmup_fraction
        return cls(
            iterations=args.train_iters,
            samples=samples,
            warmup=given[1] * unit if fraction is None else fraction * decay,
            decay=decay,
            last_decay=None if given[2] is None else given[2] * unit,
            evaluation_interval=args.eval_interval,
            evaluation_steps=args.eval_iters,
        )


@dataclass(frozen=True)
class TrainState:
    """How far a run is.

    Attributes:
        iteration: steps done.
        train_samples: consumed by them.
        valid_samples: consumed by evaluations.
    """

    iteration: int = 0
    train_samples: int = 0
    valid_samples: int = 0

    @classmethod
    def of(cls, iteration: int, saved: argparse.Namespace) -> TrainState:
        """Read from the values in a checkpoint."""
        return cls(
            iteration,
            getattr(saved, "consumed_train_samples", 0),
            getattr(saved, "consumed_valid_samples", 0),
        )

    def after_step(self, samples: int) -> TrainState:
        """The state after a step of so many samples."""
        done, consumed = self.iteration + 1, self.train_samples + samples
        return replace(self, iteration=done, train_samples=consumed)

    def after_evaluation(self, samples: int) -> TrainState:
        """The state after an evaluation of so many samples."""
        return replace(self, valid_samples=self.valid_samples + samples)

    def saved(self) -> dict[str, Any]:
        """The counters, by the names that a checkpoint has for them."""
        return {
            "consumed_train_samples": self.train_samples,
            "consumed_valid_samples": self.valid_samples,
        }
