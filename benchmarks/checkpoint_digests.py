"""What checking the digests of a checkpoint costs while it is loaded, and writing them while saved.

    python benchmarks/checkpoint_digests.py --gib 1 --repeat 5

One rank saves a sharded state of N GiB with this library's writer and loads it as the trainer
does: with digests and, after they were taken away, without. The files are in the page cache, where
reading is fastest and checking counts most. Prints the shortest times: what
others do on the machine only adds to them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("MINDSPEED_DEVICE", "cpu")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29511")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state (default: 1)")
    parser.add_argument("--tensors", type=int, default=64, help="tensors in it (default: 64)")
    parser.add_argument("--repeat", type=int, default=5, help="measurements of each (default: 5)")
    options = parser.parse_args()
    import torch
    import torch.distributed as dist

    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)

    dist.init_process_group("gloo", rank=0, world_size=1)
    from mindspeed.storage import digests, directory

    elements = int(options.gib * 2**30 / 4 / options.tensors)
    tensors = {f"weight{i}": torch.randn(elements) for i in range(options.tensors)}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        saving = [measured(lambda: save(root, tensors)) for _ in range(options.repeat)]
        checkpoint = directory.path_of(root, 1)
        known = checkpoint / digests.NAME
        checked, unchecked = [], []
        for _ in range(options.repeat):  # in turn: the machine's load is the same for both
            checked.append(measured(lambda: load(checkpoint, tensors)))
            known.rename(root / "aside")
            sidecar = checkpoint / directory.SIDECAR
            sidecar.rename(root / "aside too")
            unchecked.append(measured(lambda: load(checkpoint, tensors)))
            (root / "aside").rename(known)
            (root / "aside too").rename(sidecar)
    print(f"state {options.gib:g} GiB, {options.tensors} tensors, one rank, one thread")
    print(f"{'':24}{'wall s':>10}{'processor s':>14}")
    rows = (
        ("save with digests", saving),
        ("load without", unchecked),
        ("load with digests", checked),
    )
    for name, values in rows:
        wall, processor = (min(column) for column in zip(*values, strict=True))
        print(f"{name:24}{wall:10.3f}{processor:14.3f}")
    for index, name in enumerate(("wall", "processor")):
        with_, without = (min(v[index] for v in values) for values in (checked, unchecked))
        print(f"checking costs {100 * (with_ / without - 1):+.1f} % of loading, {name} time")
    dist.destroy_process_group()
    sys.stdout.flush()


def measured(action: Callable[[], Any]) -> tuple[float, float]:
    """Wall and processor seconds of a call."""
    wall, processor = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - processor


def save(root: Path, tensors: dict[str, Any]) -> None:
    """Save as the trainer does."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy

    from mindspeed.checkpoint.save import Writing
    from mindspeed.storage import directory
    from mindspeed.storage.megatron import queue_in_this_process

    path = directory.begin(root, 1)
    with queue_in_this_process():
        request = dist_checkpointing.save(
            sharded(tensors),
            str(path),
            get_default_save_sharded_strategy("torch_dist"),
            async_sharded_save=True,
        )
    directory.publish(root, 1, {}, {}, Writing(request, in_background=False).finish())


def load(checkpoint: Path, tensors: dict[str, Any]) -> None:
    """Load as the trainer does."""
    from mindspeed.storage.sharded_load import read_sharded

    read_sharded(sharded(tensors), checkpoint)


def sharded(tensors: dict[str, Any]) -> dict[str, Any]:
    """Megatron's description of tensors that one rank has whole."""
    from megatron.core.dist_checkpointing import ShardedTensor

    return {name: ShardedTensor.from_rank_offsets(name, t) for name, t in tensors.items()}


if __name__ == "__main__":
    main()
