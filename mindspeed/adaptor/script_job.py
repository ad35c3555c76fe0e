"""The job of a Megatron-LM script: what it hands to ``pretrain``, and the parts of one step of it.

    job = ScriptJob.of("pretrain_gpt.py", ["--num-layers", "2", ...])
    args = job.final_args(world_size=8, rank=0)
    with job.ready(args):                   # torch.distributed is initialised
        job.parallel_groups()
        chunks, optimizer, scheduler = job.build()
        job.step(chunks, optimizer, scheduler, readers)

The script runs as it would under a launcher, up to its call of ``pretrain``. Everything after that
is Megatron-LM's own code, called here part by part: its arguments and their checks, its groups, its
model, optimizer and training step. No data are opened, nothing is loaded, saved or logged.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import logging
import math
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from mindspeed.errors import ConfigError
from mindspeed.journal import Journal

_OWNER = "script job"
# Values of Megatron-LM that a step without data, files and other ranks needs.
_WITHOUT_FILES: dict[str, Any] = {
    "load": None,
    "pretrained_checkpoint": None,
    "save": None,
    "tensorboard_dir": None,
    "wandb_project": "",
    "enable_one_logger": False,
    "log_energy": False,
    "exit_signal_handler": False,
    "adlr_autoresume": False,
    "rerun_mode": "disabled",
    "moe_use_upcycling": False,
    "ckpt_convert_format": None,
}


class _Captured(BaseException):
    """Leaves the script at its call of ``pretrain``."""


@dataclass(frozen=True)
class ScriptJob:
    """A script, its command line, and the arguments with which it calls ``pretrain``.

    Attributes:
        path: the script.
        argv: its flags.
        given: arguments of ``pretrain`` by name.
        module: the script, as it was at this call.
    """

    path: Path
    argv: tuple[str, ...]
    given: Mapping[str, Any] = field(repr=False)
    module: ModuleType = field(repr=False)

    @classmethod
    def of(cls, path: str | Path, argv: Sequence[str]) -> ScriptJob:
        """Run a script up to its call of ``pretrain``.

        Raises:
            ConfigError: there is no such script, no Megatron-LM, or it never calls ``pretrain``
                with a model provider.
        """
        path = Path(path)
        if not path.is_file():
            raise ConfigError(f"script {path} does not exist")
        found: list[Mapping[str, Any]] = []
        module = ModuleType("__main__")
        module.__file__ = str(path)
        prints = contextlib.redirect_stdout(sys.stderr)  # standard output is that of the plan
        with prints, _environment(module, argv, 1, 0), _capture(path, found):
            try:
                exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
            except _Captured:
                pass
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise ConfigError(f"{path} ended with status {error.code}") from error
        if not found:
            raise ConfigError(
                f"{path} does not call megatron.training.pretrain: planning needs its model "
                "provider and forward step"
            )
        if "model_provider" not in found[0]:
            raise ConfigError(
                f"{path} calls megatron.training.pretrain without a model_provider, as scripts of "
                "Megatron-LM 0.19 do; planning builds the model with it: take the script of an "
                "older release, or pass one"
            )
        return cls(path, tuple(argv), found[0], module)

    def parser(self) -> argparse.ArgumentParser:
        """All flags of the script: Megatron-LM's, those of features, and its own."""
        from megatron.training import arguments

        parser = argparse.ArgumentParser(self.path.name, allow_abbrev=False)
        parser = arguments.add_megatron_arguments(parser)
        provider = self.given.get("extra_args_provider")
        return parser if provider is None else provider(parser)

    def final_args(self, world_size: int | None = None, rank: int = 0) -> argparse.Namespace:
        """Megatron-LM's own values of the script's flags, checked; features are attached.

        Args:
            world_size: size of the job; default: the smallest that the flags allow.
            rank: global rank.

        Raises:
            ConfigError: Megatron-LM or a feature refuses the flags; says what they say.
        """
        from megatron.training import arguments, global_vars

        provider = self.given.get("extra_args_provider")
        with _environment(self.module, self.argv, world_size or 1, rank), _refusals(self.path):
            args = arguments.parse_args(provider, False)
            args.world_size = world_size or _smallest(args)
            arguments.validate_args(args, self.given.get("args_defaults") or {})
            if getattr(args, "padded_vocab_size", None) is None:
                global_vars.build_tokenizer(args)  # sets the size of the vocabulary
        return args

    @contextlib.contextmanager
    def ready(self, args: argparse.Namespace) -> Iterator[None]:
        """Megatron-LM's global values are those of ``args``."""
        from megatron.core import rerun_state_machine
        from megatron.training import global_vars

        for name, value in _WITHOUT_FILES.items():
            if hasattr(args, name):
                setattr(args, name, value)
        global_vars.unset_global_variables()
        try:
            with _quiet():
                global_vars.set_global_variables(args)
            rerun_state_machine.initialize_rerun_state_machine(
                mode=rerun_state_machine.RerunMode("disabled")
            )
            yield
        finally:
            rerun_state_machine.destroy_rerun_state_machine()
            global_vars.unset_global_variables()

    def parallel_groups(self) -> None:
        """Megatron-LM's process groups and seeds; torch.distributed is initialised."""
        from megatron.training import global_vars, initialize

        args = global_vars.get_args()
        with _quiet():
            initialize._initialize_distributed(
                self.given.get("get_embedding_ranks"),
                self.given.get("get_position_embedding_ranks"),
                None,
            )
            initialize._set_random_seed(
                args.seed,
                args.data_parallel_random_init,
                args.te_rng_tracker,
                args.inference_rng_tracker,
                use_cudagraphable_rng=args.cuda_graph_impl != "none",
            )

    def build(self) -> tuple[list[Any], Any, Any]:
        """The script's model chunks, their optimizer and its schedule."""
        from megatron.training import training

        with _quiet():
            chunks, optimizer, scheduler = training.setup_model_and_optimizer(
                self.given["model_provider"], self.given["model_type"]
            )
        return chunks, optimizer, scheduler

    def step(self, chunks: list[Any], optimizer: Any, scheduler: Any, readers: list[Any]) -> None:
        """One training step of Megatron-LM with the script's forward step.

        Args:
            chunks: as :meth:`build` returns them.
            optimizer: the same.
            scheduler: the same.
            readers: one iterator of batches per chunk, each batch a dict of tensors
                ([b, s] of the whole sequence) as Megatron-LM's data loader yields it.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.utils import get_model_config
        from megatron.training import training

        training.train_step(
            self.given["forward_step_func"],
            readers[0] if len(chunks) == 1 else readers,
            chunks,
            optimizer,
            scheduler,
            get_model_config(chunks[0]),
            get_forward_backward_func(),
            iteration=0,
        )

    def prepare_training(self, chunks: list[Any], optimizer: Any) -> None:
        """Connect what Megatron-LM's loop connects before its first step."""
        from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
        from megatron.core.utils import get_model_config
        from megatron.training import global_vars

        args, config = global_vars.get_args(), get_model_config(chunks[0])
        config.grad_scale_func = optimizer.scale_loss
        config.timers = global_vars.get_timers()
        config.finalize_model_grads_func = finalize_model_grads
        if isinstance(chunks[0], DistributedDataParallel) and args.overlap_grad_reduce:
            config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
            if args.align_grad_reduce:
                config.grad_sync_func = _one_or_all([c.start_grad_sync for c in chunks])
        if args.overlap_param_gather and args.align_param_gather:
            config.param_sync_func = _one_or_all([c.start_param_sync for c in chunks])
        for chunk in chunks:
            chunk.train()


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


@contextlib.contextmanager
def _capture(path: Path, found: list[Mapping[str, Any]]) -> Iterator[None]:
    """``megatron.training.pretrain`` keeps its arguments and ends the script."""
    journal = Journal()
    try:
        import megatron.training
        from megatron.training import training
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{path}: {error.name} is not found, a Megatron-LM script needs a checkout of "
            "Megatron-LM core_v0.16.1 on PYTHONPATH or next to it"
        ) from error
    signature = inspect.signature(training.pretrain)

    def pretrain(*args: Any, **kwargs: Any) -> NoReturn:
        found.append(signature.bind(*args, **kwargs).arguments)
        raise _Captured

    journal.set(training, "pretrain", pretrain, owner=_OWNER)
    journal.set(megatron.training, "pretrain", pretrain, owner=_OWNER)
    try:
        yield
    finally:
        journal.undo()


@contextlib.contextmanager
def _environment(
    module: ModuleType, argv: Sequence[str], world_size: int, rank: int
) -> Iterator[None]:
    """Set command line, import path and variables as a launcher does, and ``__main__``."""
    path = str(module.__file__)
    directory = str(Path(path).resolve().parent)
    if directory not in sys.path:  # it stays: the script's functions import later, too
        sys.path.insert(0, directory)
    names = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    variables, command, main = dict(os.environ), sys.argv, sys.modules["__main__"]
    os.environ.update({name: str(value) for name, value in names.items()})
    sys.argv, sys.modules["__main__"] = [path, *argv], module
    try:
        yield
    finally:
        sys.argv, sys.modules["__main__"] = command, main
        for name in names:
            os.environ.pop(name)
        os.environ.update({name: variables[name] for name in names if name in variables})


@contextlib.contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Raise refusals of Megatron-LM as our error."""
    said: list[str] = []

    def error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        said.append(message)
        raise ConfigError(f"{path}: {message}")

    journal = Journal()
    journal.set(argparse.ArgumentParser, "error", error, owner=_OWNER)
    try:
        with _quiet():
            yield
    except (AssertionError, ValueError, RuntimeError, NotImplementedError) as refusal:
        if isinstance(refusal, ConfigError):
            raise
        message = str(refusal) or _source_line(refusal)
        raise ConfigError(f"{path}: Megatron-LM refuses these flags: {message}") from refusal
    finally:
        journal.undo()


def _source_line(error: BaseException) -> str:
    """The line that failed: many assertions of Megatron-LM have no message."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.line} ({last.filename}:{last.lineno})"


def _smallest(args: argparse.Namespace) -> int:
    """Ranks of one replica; of several where experts are spread over them."""
    inner = args.tensor_model_parallel_size * args.context_parallel_size
    experts = (args.expert_tensor_parallel_size or args.tensor_model_parallel_size) * (
        args.expert_model_parallel_size
    )
    return math.lcm(inner, experts) * int(args.pipeline_model_parallel_size)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Megatron-LM's report of its arguments and sizes, and what it logs at each start."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
