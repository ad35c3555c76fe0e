"""Trains a small GPT model with Megatron's optimizers, inside rank processes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support import gpt_ranks
from tests.support.trainer_job import command

PART = 2**10  # small parameters are decoded in parts, too


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        flags: of our features, and those of Megatron-LM that they look at.
        distributed: with the distributed optimizer.
        dtype: of the parameters.
        wide_gradients: accumulate gradients in fp32.
        options: more fields of Megatron's OptimizerConfig.
        model: name of the model's configuration.
        overflows: steps with a gradient that is infinite.
        bucket: parameters of a bucket of gradients; None: all of the model.
        model_options: more fields of the model's configuration.
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    distributed: bool = False
    dtype: torch.dtype = torch.bfloat16
    wide_gradients: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = "rmsnorm-swiglu-gqa"
    overflows: tuple[int, ...] = ()
    bucket: int | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a run did: per step, and in the end.

    Attributes:
        losses: and ``norms``, of each step.
        updated: whether each step updated.
        digests: of this rank's parameters, after each step.
        state_bytes: of the optimizer, master weights included, in the end.
        numel: parameters of the model.
        peaks: bytes that each step of the optimizer allocated at most.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    updated: list[bool] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    state_bytes: int = 0
    numel: int = 0


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operators return, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[StorageWeakRef, int] = {}
        self.known: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        given = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self.live[StorageWeakRef(storage)] = storage.nbytes()
        self.live = {ref: size for ref, size in self.live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.live.values()))
        return result


class Job:
    """One model with its optimizer."""

    def __init__(self, case: Case) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        self.case = case
        half = {
            "bf16": case.dtype == torch.bfloat16,
            "fp16": case.dtype == torch.float16,
            "params_dtype": case.dtype,
        }
        options = {"gradient_accumulation_fusion": False, **half, **case.model_options}
        config = gpt_ranks.config(case.model, **options)
        inner = Float16Module(config, gpt_ranks.build(config, "te"))
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=case.distributed,
            grad_reduce_in_fp32=case.wide_gradients,
            overlap_grad_reduce=case.bucket is not None,
            bucket_size=case.bucket,
        )
        self.model = DistributedDataParallel(config, ddp, inner)
        options = {"optimizer": "adam", "lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0}
        if case.dtype == torch.float16:
            options |= {"initial_loss_scale": 2.0**10, "loss_scale_window": 4, "hysteresis": 1}
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                use_distributed_optimizer=case.distributed, **half, **(options | case.options)
            ),
            [self.model],
        )

    def step(self, number: int, outcome: Outcome, measure: bool = False) -> None:
        """Train on batch ``number``."""
        from megatron.core import parallel_state

        rank = parallel_state.get_data_parallel_rank()
        shape = (gpt_ranks.BATCH, gpt_ranks.SEQUENCE + 1)
        samples = [
            torch.randint(
                gpt_ranks.VOCABULARY, shape, generator=torch.Generator().manual_seed(2 * number + i)
            )
            for i in range(2)
        ]
        ranks = parallel_state.get_data_parallel_world_size()
        tokens = torch.cat(samples).chunk(ranks)[rank]
        positions = torch.arange(gpt_ranks.SEQUENCE)[None].expand(len(tokens), -1)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).float().mean()
        self.optimizer.scale_loss(loss).sum().backward()
        self.model.finish_grad_sync()
        if number in self.case.overflows:
            next(self.model.parameters()).main_grad.fill_(float("inf"))
        with Allocations() if measure else contextlib.nullcontext() as allocations:
            updated, norm, _ = self.optimizer.step()
        outcome.losses.append(loss.item())
        outcome.updated.append(updated)
        outcome.norms.append(0.0 if norm is None else float(norm))
        outcome.digests.append(self.digest())
        if measure:
            outcome.peaks.append(allocations.peak)

    def digest(self) -> str:
        """Hash of this rank's parameters, bit for bit."""
        total = hashlib.sha256()
        for parameter in self.model.parameters():
            total.update(parameter.detach().contiguous().view(torch.int16).numpy().tobytes())
        return total.hexdigest()

    def inner(self) -> list[Any]:
        """The optimizers of torch in Megatron's."""
        return [part.optimizer for part in self.optimizer.chained_optimizers]

    def state_bytes(self) -> int:
        """Bytes that the optimizer keeps per rank, fp32 parameters of its own included."""
        total = 0
        for inner in self.inner():
            own = [p for group in inner.param_groups for p in group["params"]]
            total += inner.state_bytes() + sum(p.nbytes for p in own if p.dtype == torch.float32)
        return total

    def sharded(self, loading: bool, sharding: str) -> dict[str, Any]:
        """What a checkpoint in the format torch_dist holds."""
        from megatron.core import parallel_state

        metadata = {
            "distrib_optim_sharding_type": sharding,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model = self.model.module.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path, format_: str) -> None:
        """Write model and optimizer: Megatron's format ``torch``, or a sharding of torch_dist."""
        from megatron.core import dist_checkpointing

        if torch.distributed.get_rank() == 0:
            folder.mkdir()
        torch.distributed.barrier()
        if format_ != "torch":
            dist_checkpointing.save(self.sharded(False, format_), str(folder))
            return
        if torch.distributed.get_rank() == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, folder / "model_optim_rng.pt")
        if self.case.distributed:
            self.optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))

    def load(self, folder: Path, format_: str) -> None:
        """Read model and optimizer."""
        from megatron.core import dist_checkpointing

        if format_ != "torch":
            state = dist_checkpointing.load(self.sharded(True, format_), str(folder))
            self.model.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            return
        state = torch.load(folder / "model_optim_rng.pt", weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.case.distributed:
            self.optimizer.load_parameter_state(str(folder / "distrib_optim.pt"))


@contextlib.contextmanager
def job(case: Case) -> Iterator[Job]:
    """A job with its features on."""
    from megatron.core import parallel_state

    from mindspeed import session
    from mindspeed.te import stored_states

    stored_states.PART = PART
    current = session.install()
    current.detach_features()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    current.configure(dict(case.flags))
    gpt_ranks.start(expert=case.model_options.get("expert_model_parallel_size", 1))
    try:
        yield Job(case)
    finally:
        current.detach_features()


def train(case: Case, steps: int) -> Outcome:
    """Train from the beginning."""
    outcome = Outcome()
    with job(case) as one:
        for number in range(steps):
            one.step(number, outcome, measure=number == steps - 1)
        outcome.state_bytes = one.state_bytes()
        outcome.numel = sum(p.numel() for p in one.model.parameters())
    return outcome


def train_all(cases: Mapping[str, Case], steps: int) -> dict[str, Outcome]:
    """Train each."""
    return {name: train(case, steps) for name, case in cases.items()}


def save_all(cases: Mapping[str, Case], folder: str, format_: str) -> None:
    """Train each for two steps and save it."""
    for name, case in cases.items():
        with job(case) as one:
            for number in range(2):
                one.step(number, Outcome())
            one.save(Path(folder) / name, format_)


def resume_all(
    cases: Mapping[tuple[str, str], Case], folder: str, format_: str
) -> dict[tuple[str, str], Outcome]:
    """For each ``(name of the checkpoint, name of the run)``: load and train two more steps."""
    outcomes = {}
    for (checkpoint, name), case in cases.items():
        outcome = outcomes[checkpoint, name] = Outcome()
        with job(case) as one:
            one.load(Path(folder) / checkpoint, format_)
            for number in (2, 3):
                one.step(number, outcome)
    return outcomes


def replace_all(cases: Mapping[str, Case]) -> dict[str, list[torch.Tensor]]:
    """Train each for two steps, halve the weights, reload them, and train for one more step.

    Returns:
        of each, the weights in the end.
    """
    weights = {}
    for name, case in cases.items():
        with job(case) as one:
            for number in range(2):
                one.step(number, Outcome())
            with torch.no_grad():
                for parameter in one.model.parameters():
                    parameter.mul_(0.5)
            one.optimizer.reload_model_params()
            one.step(2, Outcome())
            weights[name] = [p.detach().float().clone() for p in one.model.parameters()]
    return weights


def main_params_from(cases: Mapping[str, Case], chunks: int) -> dict[str, list[torch.Tensor]]:
    """Take the main parameters of each from a state dict in fp32, and train for one step.

    Returns:
        of each, the weights in the end.
    """
    weights = {}
    for name, case in cases.items():
        with job(case) as one:
            from megatron.core.optimizer import get_megatron_optimizer  # patched by the features

            models = [one.model, *(Job(case).model for _ in range(1, chunks))]
            if chunks > 1:
                one.optimizer = get_megatron_optimizer(one.optimizer.config, models)
            wide = [_with_more_digits(model, seed) for seed, model in enumerate(models)]
            states = [model.state_dict() | wide[i] for i, model in enumerate(models)]
            keys = [f"model{i}" for i in range(chunks)] if chunks > 1 else ["model"]
            one.optimizer.reload_model_params(state_dict=dict(zip(keys, states, strict=True)))
            for part in one.optimizer.chained_optimizers:
                for model, values in zip(models, wide, strict=True):
                    _check_main_params(part, model, values)
            one.step(0, Outcome())
            weights[name] = [p.detach().float().clone() for p in one.model.parameters()]
    return weights


def _with_more_digits(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """The parameters of a model in fp32, by name: each rounds to the weight that is there."""
    noise = torch.Generator().manual_seed(seed)
    return {
        name.removeprefix("module.module."): parameter.detach().float()
        * (1 + 2**-10 * torch.rand(parameter.shape, generator=noise))
        for name, parameter in model.named_parameters()
    }


def _check_main_params(part: Any, model: torch.nn.Module, values: Mapping[str, Any]) -> None:
    """See that the main parameters of one optimizer are these values, bit for bit."""
    for name, parameter in model.named_parameters():
        if parameter in part.model_param_group_index_map:
            where = part._get_model_param_range_map(parameter)["param"]
            value = values[name.removeprefix("module.module.")].view(-1)[where.start : where.end]
            held = part._get_main_param_and_optimizer_states(parameter)["param"]
            assert torch.equal(held.view(-1), value), name


def continued(cases: Mapping[str, Case], folder: str, format_: str) -> dict[str, list[Outcome]]:
    """Train each for four steps, at once and saved and loaded after two: the last two of each."""
    outcomes = {}
    for name, case in cases.items():
        runs = outcomes[name] = [Outcome(), Outcome()]
        with job(case) as one:
            for number in range(2):
                one.step(number, Outcome())
            one.save(Path(folder) / name, format_)
            for number in (2, 3):
                one.step(number, runs[0])
        with job(case) as one:
            one.load(Path(folder) / name, format_)
            for number in (2, 3):
                one.step(number, runs[1])
    return outcomes


def load_errors(
    saved: Mapping[str, Case], loaded: Mapping[tuple[str, str], Case], folder: str, format_: str
) -> dict[tuple[str, str], str]:
    """What each run says to a checkpoint of another, by both names; nothing if it trains on."""
    from mindspeed.errors import CheckpointError

    save_all(saved, folder, format_)
    errors = {}
    for (checkpoint, name), case in loaded.items():
        with job(case) as one:
            try:
                one.load(Path(folder) / checkpoint, format_)
            except CheckpointError as error:
                errors[checkpoint, name] = str(error)
                continue
            one.step(2, Outcome())
            errors[checkpoint, name] = ""
    return errors


def schedule(optimizer: Any, **flags: bool) -> Any:
    """A constant schedule of the optimizer's own learning rate, as Megatron-LM builds it."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optimizer.config.lr,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=10,
        lr_decay_style="constant",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=10,
        wd_incr_style="constant",
        **{"use_checkpoint_opt_param_scheduler": False, **flags},
    )


def resumed_rates(
    saved: Case, loaded: Case, folder: str, format_: str, flag: str
) -> tuple[list[float], list[float]]:
    """Learning rates of the param groups of a run, and those after it has loaded a checkpoint."""
    with job(saved) as one:
        kept = schedule(one.optimizer)
        one.step(0, Outcome())
        kept.step(1)
        one.save(Path(folder) / "saved", format_)
    with job(loaded) as one:
        own = schedule(one.optimizer, **{flag: True} if flag else {})
        built = [group["lr"] for group in one.optimizer.param_groups]
        one.load(Path(folder) / "saved", format_)
        own.load_state_dict(kept.state_dict())
        return built, [group["lr"] for group in one.optimizer.param_groups]


def resumed_decay() -> tuple[float, float]:
    """Weight decays right after a schedule is loaded whose decay is not that of the flags.

    Returns:
        That of the checkpoint, and that of the param group.
    """
    from types import SimpleNamespace

    def optimizer() -> Any:
        return SimpleNamespace(config=SimpleNamespace(lr=1.0), param_groups=[{"params": []}])

    from mindspeed import session

    session.current().configure({"override_opt_param_scheduler": True})
    saved = schedule(optimizer())
    saved.start_wd = saved.end_wd = 0.3
    loaded = optimizer()
    schedule(loaded, use_checkpoint_opt_param_scheduler=True).load_state_dict(saved.state_dict())
    return saved.end_wd, loaded.param_groups[0]["weight_decay"]


def moved_parameters(flags: Sequence[str]) -> dict[str, bool]:
    """Train; for every parameter: did it change?"""
    from mindspeed.cli.pretrain import _prepare
    from mindspeed.training.model import gpt_model
    from mindspeed.training.pretrain import pretrain

    before, models = {}, []

    def provider(*given: Any) -> Any:
        models.append(gpt_model(*given))
        before.update((name, p.detach().clone()) for name, p in models[-1].named_parameters())
        return models[-1]

    pretrain(_prepare(command(flags), 1), provider)
    return {name: not torch.equal(before[name], p) for name, p in models[0].named_parameters()}
