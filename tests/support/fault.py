"""Faults put into a rank before it trains."""

from __future__ import annotations

import errno
import functools
import os
import signal
import threading
import time
from typing import Any


def disk_full_at(saves: tuple[int, ...], rank: int) -> None:
    """Some saves (1, 2, ...) of one rank meet a full disk in the middle of its file."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from mindspeed.checkpoint.save import Writing

    if int(os.environ["RANK"]) != rank:
        return
    count = 0
    start, write = Writing.__init__, filesystem_async._write_item

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        start(self, *args, **kwargs)

    @functools.wraps(write)
    def fails(*args: Any, **kwargs: Any) -> Any:
        if count in saves:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args, **kwargs)

    Writing.__init__ = counted
    filesystem_async._write_item = fails


def disk_full_in(module: str, name: str, save: int) -> None:
    """A function that only rank 0 calls during a save (1, 2, ...) meets a full disk."""
    import importlib

    holder: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        holder = getattr(holder, part)
    original, calls = getattr(holder, last), []

    @functools.wraps(original)
    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == save and int(os.environ["RANK"]) == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args, **kwargs)

    setattr(holder, last, fails)


def weight_not_finite_after(step: int, rank: int) -> None:
    """One weight of one rank is ``nan`` when a step (1, 2, ...) is done."""
    import torch

    from mindspeed.training.step import Trainer

    original = Trainer.step

    def spoils(self: Any, readers: Any, iteration: int) -> Any:
        result = original(self, readers, iteration)
        if iteration == step and int(os.environ["RANK"]) == rank:
            with torch.no_grad():
                next(self._model.modules[0].parameters())[3, 5] = float("nan")
        return result

    Trainer.step = spoils  # type: ignore[method-assign]


def signal_in_step(step: int, rank: int) -> None:
    """One rank gets SIGTERM while it runs a step."""
    from mindspeed.training.step import Trainer

    run = Trainer.step

    def with_signal(self: Any, readers: Any, iteration: int) -> Any:
        if iteration == step and int(os.environ["RANK"]) == rank:
            signal.raise_signal(signal.SIGTERM)
        return run(self, readers, iteration)

    Trainer.step = with_signal


def bad_loss_in_step(step: int, micro_batch: int) -> None:
    """The loss of one micro-batch is not a number."""
    from mindspeed.training import forward_step as module
    from mindspeed.training.step import Trainer

    run, losses = Trainer.step, module.next_token_loss
    state = {"iteration": 0, "micro_batch": 0}

    def counted(self: Any, readers: Any, iteration: int) -> Any:
        state.update(iteration=iteration, micro_batch=-1)
        return run(self, readers, iteration)

    def bad(loss_mask: Any, output: Any) -> Any:
        state["micro_batch"] += 1
        if (state["iteration"], state["micro_batch"]) == (step, micro_batch):
            output = output * float("nan")
        return losses(loss_mask, output)

    Trainer.step, module.next_token_loss = counted, bad


def killed_in_save(save: int, moment: str) -> None:
    """The rank that writes last dies without warning at a moment of a save (1, 2, ...).

    Moments: ``in a file`` (half of it is written), ``before the rename`` (all files are), ``before
    the tracker`` (the checkpoint has its name).
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from mindspeed.checkpoint.save import Writing
    from mindspeed.storage import directory

    if int(os.environ["RANK"]) != 0:
        return
    count = 0
    start = Writing.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        start(self, *args, **kwargs)

    def dying(function: Any) -> Any:
        @functools.wraps(function)
        def dies(*args: Any, **kwargs: Any) -> Any:
            if count == save:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return dies

    Writing.__init__ = counted
    if moment == "in a file":
        write = filesystem_async._write_item
        seen = []

        @functools.wraps(write)
        def half(*args: Any, **kwargs: Any) -> Any:
            seen.append(count)
            act = dying(write) if seen.count(save) > 1 else write
            return act(*args, **kwargs)

        filesystem_async._write_item = half
    elif moment == "before the rename":
        directory.harden_tree = dying(directory.harden_tree)
    else:
        directory.atomic_write_text = dying(directory.atomic_write_text)


def killed_after(file: str, seconds: float) -> None:
    """Every rank dies without warning so long after a file appears, whatever it does then."""

    def wait_and_die() -> None:
        while not os.path.exists(file):
            time.sleep(0.02)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_and_die, daemon=True).start()


def weights_that_are_not_numbers() -> None:
    """The model begins with NaN."""
    from mindspeed.training.step import Trainer

    start = Trainer.__init__

    def with_nan(self: Any, args: Any, model: Any, *more: Any) -> None:
        start(self, args, model, *more)
        for chunk in model.chunks:
            next(chunk.parameters()).data.fill_(float("nan"))
        model.optimizer.reload_model_params()

    Trainer.__init__ = with_nan
