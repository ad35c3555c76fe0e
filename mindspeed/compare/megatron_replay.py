"""Calls one module of one rank again, without the job, and compares its results with A's.

    mindspeed compare A B --replay DIR        both recorded with --record-level full and
                                              --record-operators MODULE (--bisect does it)
    python DIR/replay.py --device cpu

DIR holds B's module (its class and everything in it), and of A the weights, the arguments, the
gradient of the output, what the module returned and every operator inside. Process groups are those
of the rank, without other ranks: a collective returns what it returned in A.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed.compare import operator_walk
from mindspeed.compare.names import Name
from mindspeed.compare.noise import amplitude
from mindspeed.compare.operators import ModuleCall, OperatorRecorder, results_of
from mindspeed.compare.page import operator_lines
from mindspeed.compare.rank_files import read_tensors
from mindspeed.compare.saved_module import Builder
from mindspeed.errors import ConfigError, DataError
from mindspeed.files import atomic_write_bytes, atomic_write_text, make_dirs
from mindspeed.instruments.instrument import in_backward
from mindspeed.parsing import decode_json

SCRIPT = '''\
"""{name} of rank {rank}: as B has it, with A's weights and arguments.

    python replay.py [--device cpu]      exit status 1 if a result differs from A's

Needs the job's packages (mindspeed, megatron.core) and the files beside this one.
"""

import argparse
import sys
from pathlib import Path

import mindspeed.megatron_adaptor as adaptor  # before anything of Megatron

import torch
from mindspeed.compare.megatron_replay import Replay

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cpu")
device = parser.parse_args().device

replay = Replay(Path(__file__).resolve().parent, device)
adaptor.repatch(replay.job)
with replay.ranks():  # rank {rank} of {ranks}
    module = replay.module()
    args, kwargs = replay.arguments()
    with replay.recorded(module):
        output = module(*args, **kwargs)
        torch.autograd.backward(*replay.gradients(output))
equal, lines = replay.compared(output)
print("\\n".join(lines))
sys.exit(0 if equal else 1)
'''


def write(a: Path, b: Path, step: int, module: str, folder: Path, rank: int = 0) -> str:
    """Write a module's files and script.

    Args:
        a: Recording of the trusted run.
        b: The other one.
        step: Number of the step.
        module: Name of the module.
        folder: For the files.
        rank: Whose module.

    Returns:
        What to type.

    Raises:
        ConfigError: The recordings have no such module, or it cannot be called alone.
    """
    from safetensors.torch import save

    here, there = _saved(a, step, module, rank), _saved(b, step, module, rank)
    ours, theirs = _read(here), _read(there)
    _refuse(theirs)
    tensors, changed = read_tensors(here), read_tensors(there)
    for name, value in sorted(changed.items()):
        if name in tensors and tensors[name].shape != value.shape:
            raise ConfigError(
                f"--replay: {name} is {list(tensors[name].shape)} in A and {list(value.shape)} in "
                "B: record both in one layout"
            )
        if name.startswith("module.") and not (name in tensors and name in theirs["weights"]):
            tensors[name] = value  # B's, but for the weights
    make_dirs(folder)
    atomic_write_bytes(folder / "a.safetensors", save(tensors))
    atomic_write_text(folder / "b.json", json.dumps({**theirs, "arguments": ours["arguments"]}))
    operators = make_dirs(folder / "a" / here.parent.name)
    for suffix in (".jsonl", ".safetensors"):
        name = f"operators-{rank:05d}{suffix}"
        atomic_write_bytes(operators / name, (here.parent / name).read_bytes())
    script = SCRIPT.format(**{k: theirs[k] for k in ("name", "rank", "ranks")})
    atomic_write_text(folder / "replay.py", script)
    return f"{module} of rank {rank}, without the job: python {folder / 'replay.py'} --device cpu"


def _saved(run: Path, step: int, module: str, rank: int) -> Path:
    for path in sorted((run / f"step-{step:06d}").glob(f"module-{rank:05d}-*.json")):
        if _read(path)["name"] == module:
            return path
    raise ConfigError(
        f"--replay: {run} has not saved {module} of rank {rank}: record with --record-level full "
        f"--record-operators {module}, or let --bisect do it"
    )


def _read(path: Path) -> dict[str, Any]:
    found = decode_json(path.read_text("utf-8"))
    if not isinstance(found, dict):
        raise DataError(f"{path}: damaged, record again")
    return found


def _refuse(saved: Mapping[str, Any]) -> None:
    """Refuse a module that cannot be called alone.

    Raises:
        ConfigError: The reason.
    """
    for path, what in saved["absent"].items():
        if path.rpartition(".")[2] in ("forward", "__call__"):
            raise ConfigError(
                f"--replay: {path} is replaced by {what}, which has no import path: make it a "
                "function or class of a file"
            )
    rates = ("hidden_dropout", "attention_dropout")
    if saved["training"] and (name := next((r for r in rates if saved["job"].get(r)), "")):
        raise ConfigError(f"--replay: {name} draws other numbers: record with --{_flag(name)} 0")


def _flag(name: str) -> str:
    return name.replace("_", "-")


class Replay:
    """A saved module, and the call of it.

    Args:
        folder: With the files that :func:`write` has written.
        device: On which it runs.
    """

    def __init__(self, folder: Path, device: str) -> None:
        from safetensors.torch import load

        self._folder, self._device = folder, device
        self._saved = _read(folder / "b.json")
        self._tensors = load((folder / "a.safetensors").read_bytes())
        self._builder = Builder(self._tensors, device, _group)
        job = self._saved["job"]
        self.job = {k: v for k, v in job.items() if not k.startswith("record")}
        """Arguments of the job, without those that record."""
        call = self._saved
        self._call = ModuleCall(call["micro_batch"], call["name"], 0)
        self._recorder = OperatorRecorder(call["step"])

    @contextlib.contextmanager
    def ranks(self) -> Iterator[None]:
        """The process groups of the rank, without the other ranks."""
        from megatron.core import parallel_state, tensor_parallel
        from torch.testing._internal.distributed.fake_pg import FakeStore

        rank, ranks = self._saved["rank"], self._saved["ranks"]
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            parallel_state.initialize_model_parallel(
                self.job["tensor_model_parallel_size"],
                self.job["pipeline_model_parallel_size"],
                context_parallel_size=self.job.get("context_parallel_size", 1),
                expert_model_parallel_size=self.job.get("expert_model_parallel_size", 1),
                expert_tensor_parallel_size=self.job.get("expert_tensor_parallel_size"),
                create_gloo_process_groups=False,
            )
            tensor_parallel.model_parallel_cuda_manual_seed(self.job.get("seed", 1234))
            yield
        except DataError as error:
            print(f"this module cannot be called alone: {error}", file=sys.stderr)
            sys.exit(2)
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    def module(self) -> Any:
        """B's module with A's weights."""
        return self._builder.build(self._saved["module"])

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """A's arguments."""
        args, kwargs = Builder(self._tensors, self._device, _group).build(self._saved["arguments"])
        return args, kwargs

    @contextlib.contextmanager
    def recorded(self, module: Any) -> Iterator[None]:
        """Record the operators; collectives return what they returned in A."""
        inputs: list[Any] = []

        def begin(module: Any, args: Any, kwargs: Any) -> None:
            inputs.append((args, kwargs))
            self._recorder.enter(self._call, inputs[-1], recomputed=False)

        def end(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            self._recorder.leave(inputs.pop(), output)

        handles = [
            module.register_forward_pre_hook(begin, with_kwargs=True),
            module.register_forward_hook(end, with_kwargs=True),
        ]
        try:
            with _Collectives(self._tensors), self._recorder:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def gradients(self, output: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Results of the module that have a gradient, and A's gradients of these: ``[...]``."""
        pairs = [
            (leaf, self._tensors[f"grad_output/{number}"].to(leaf.device))
            for number, leaf in enumerate(_tensors(output))
            if leaf.requires_grad and f"grad_output/{number}" in self._tensors
        ]
        return [one for one, _ in pairs], [one for _, one in pairs]

    def compared(self, output: Any) -> tuple[bool, list[str]]:
        """Whether all results are A's, and the page."""
        lines, equal = (
            [f"{self._saved['name']} of rank {self._saved['rank']} on {self._device}"],
            True,
        )
        for number, leaf in enumerate(_tensors(output)):
            error, scale, limit = _distance(self._tensors[f"output/{number}"], leaf.detach().cpu())
            differs = not error <= limit
            equal = equal and not differs
            lines.append(
                f"output {number}: relative error {error:.2g}, ||B||/||A|| {scale:.6g}; "
                f"{'DIFFERS' if differs else 'rounding explains it'}"
            )
        self._recorder.write(self._folder / "replayed", self._saved["rank"])
        runs = (operator_walk.read(self._folder / name) for name in ("a", "replayed"))
        here, there = runs
        for when in ("forward", "backward") if equal else ("forward",):
            at = Name(self._saved["step"], self._call.micro_batch, when, self._call.name, "")
            own = {k: v for k, v in here.items() if k.module == self._call.name}
            found = operator_walk.first_difference(own, there, at, 0.0)
            if found is not None:
                equal = False
                lines += ["", *operator_lines(found)]
        return equal, lines


class _Collectives(TorchDispatchMode):
    """Lets collectives return what they returned in a recording."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._count = {"forward": 0, "backward": 0}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operator."""
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            when = "backward" if in_backward() else "forward"
            number = self._count[when]
            self._count[when] += 1
            for index, own in enumerate(results_of(func, args, result)):
                value = self._tensors.get(f"collective/{when}/{number}/{index}")
                if value is not None and value.shape == own.shape:
                    own.copy_(value)
        return result


def _distance(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, float]:
    """Relative error, ratio of the norms, and what rounding explains."""
    wide, other = a.double(), b.double()
    norm = float(wide.norm()) + 1e-300
    dtype = str(a.dtype).removeprefix("torch.")
    limit = 6 * amplitude(dtype, a.shape[-1] if a.dim() else 1) * 4
    return float((wide - other).norm()) / norm, float(other.norm()) / norm, limit


def _tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _group(ranks: list[int]) -> Any:
    return dist.new_group(ranks)
