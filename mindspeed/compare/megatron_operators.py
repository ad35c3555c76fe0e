"""Records the operators of modules of a Megatron model, by the names that a comparison prints."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed.compare.megatron_modules import MODEL, is_fsdp, named_modules, unwrapped
from mindspeed.compare.names import Name, layer_of
from mindspeed.compare.operators import ModuleCall, OperatorRecorder, SavedCall
from mindspeed.compare.rank_files import write_tensors
from mindspeed.compare.saved_module import Describer
from mindspeed.errors import ConfigError
from mindspeed.files import atomic_write_text
from mindspeed.instruments.instrument import in_backward


def module_of(name: Name, layers: int) -> str | None:
    """The module whose operators make a tensor; None for what no module makes.

    Args:
        name: Of the tensor.
        layers: Decoder layers of the model.
    """
    module = re.sub(r"#\d+$", "", name.module)
    parent = module.rpartition(".")[0]
    layer = layer_of(module)
    if name.when == "forward":
        if module in ("data", "loss"):
            return MODEL if module == "loss" else None
        if name.what in ("input", "query", "key", "value"):  # an addition, an activation, positions
            return parent
        return module
    if name.when != "backward":
        return None
    if layer is None or not module.startswith("decoder."):
        return MODEL
    if re.fullmatch(r"decoder\.layers\.\d+", module):  # made by the next layer
        return f"decoder.layers.{layer + 1}" if layer + 1 < layers else MODEL
    return f"decoder.layers.{layer}"


class OperatorHooks:
    """Records the operators of chosen modules during a step, on one rank.

    Args:
        directory: Of the recording.
        rank: Global rank.
        modules: Their names.
        micro_batches: Numbers of those that are recorded; empty: all.
        job: Arguments of the job, if the first call of each module is saved to be called again.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        modules: Collection[str],
        micro_batches: Collection[int],
        job: Mapping[str, Any] | None,
    ) -> None:
        self._directory, self._rank, self._job = directory, rank, job
        self._modules, self._only = frozenset(modules), frozenset(micro_batches)

    def around(
        self, schedule: Callable[..., Any], number: int, micro_batch: Callable[[], int]
    ) -> Callable[..., Any]:
        """A schedule that records.

        Args:
            schedule: Megatron's forward-backward function.
            number: Of the step.
            micro_batch: Number of the one whose forward runs.
        """

        @functools.wraps(schedule)
        def run(**options: Any) -> Any:
            model = options["model"]
            recorder = OperatorRecorder(number)
            handles, saved = [], []
            for chunk in model if isinstance(model, list) else [model]:
                found = dict(named_modules(chunk))
                self._check(unwrapped(chunk), found)
                for name in self._modules & found.keys():
                    module = found[name]
                    job = None if is_fsdp(module) else self._job  # it cannot be built without it
                    calls = _Calls(recorder, name, micro_batch, self._only, job)
                    saved.append(calls)
                    handles += [
                        module.register_forward_pre_hook(calls.begin, with_kwargs=True),
                        module.register_forward_hook(calls.end, with_kwargs=True, prepend=True),
                    ]
            try:
                with recorder:
                    return schedule(**options)
            finally:
                for handle in handles:
                    handle.remove()
                recorder.write(self._directory, self._rank)
                for index, calls in enumerate(saved):
                    calls.write(self._directory / f"step-{number:06d}", self._rank, index)

        return run

    def _check(self, chunk: Any, found: Collection[str]) -> None:
        whole = chunk.pre_process and chunk.post_process
        if whole and (unknown := sorted(self._modules.difference(found))):
            some = ", ".join(sorted(name for name in found if name.count(".") < 4)[:8])
            raise ConfigError(
                f"--record-operators {unknown[0]}: the model has no such module; it has {some} ..."
            )


class _Calls:
    """The calls of a module: in the backward, a second forward is that of the same call."""

    def __init__(
        self,
        recorder: OperatorRecorder,
        name: str,
        micro_batch: Callable[[], int],
        only: Collection[int],
        job: Mapping[str, Any] | None,
    ) -> None:
        self._recorder, self._name, self._only, self._job = recorder, name, only, job
        self._micro_batch = micro_batch
        self._calls: list[ModuleCall] = []
        self._numbers: Counter[int] = Counter()
        self._recomputed = 0
        self._inputs: list[Any] = []

    def begin(self, module: Any, args: Any, kwargs: Any) -> None:
        """Begin, in a hook before the forward."""
        recomputed = in_backward()
        if recomputed:
            call = self._calls[self._recomputed] if self._recomputed < len(self._calls) else None
            self._recomputed += 1
        else:
            number = self._micro_batch()
            saved = None
            if (
                self._job is not None
                and self._counts(number)
                and not any(one.saved for one in self._calls)
            ):
                saved = self._saved(module, args, kwargs, number)
            call = ModuleCall(number, self._name, self._numbers[number], saved)
            self._numbers[number] += 1
            self._calls.append(call)
        counts = call is not None and self._counts(call.micro_batch)
        self._inputs.append((args, kwargs) if counts else None)
        if counts:
            assert call is not None
            self._recorder.enter(call, (args, kwargs), recomputed)

    def _counts(self, micro_batch: int) -> bool:
        return not self._only or micro_batch in self._only

    def _saved(self, module: Any, args: Any, kwargs: Any, micro_batch: int) -> SavedCall:
        describer = Describer()
        assert self._job is not None
        description = {
            "name": self._name,
            "micro_batch": micro_batch,
            "step": self._recorder.step,
            "job": dict(self._job),
            "rank": dist.get_rank(),
            "ranks": dist.get_world_size(),
            "training": module.training,
            "module": describer.describe(module, "module"),
            "arguments": describer.describe([list(args), dict(kwargs)], "arguments"),
            "weights": describer.parameters,
            "absent": describer.absent,
        }
        return SavedCall(description, describer.tensors)

    def write(self, folder: Path, rank: int, index: int) -> None:
        """Write the call that is saved, if there is one."""
        saved = next((call.saved for call in self._calls if call.saved is not None), None)
        if saved is not None:
            path = folder / f"module-{rank:05d}-{index}.json"
            write_tensors(path, saved.tensors)
            atomic_write_text(path, json.dumps(saved.description, default=str))

    def end(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """End, in a hook after the forward."""
        inputs = self._inputs.pop()
        if inputs is not None:
            self._recorder.leave(inputs, output)
