"""Checkpoints with a payload in one entry, and the commands that read them, each in a fork."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.forked import run_all


class Bomb:
    """Unpickling it makes a directory, as an attacker's payload would run a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


def saved(value: Any) -> bytes:
    """What ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def plant_in_entry(prefix: str, bomb: Bomb, checkpoint: Path) -> None:
    """Replace all byte entries of a ``torch_dist`` checkpoint whose names begin so."""
    from mindspeed.storage.safe_metadata import read_index

    index, payload, found = read_index(checkpoint), saved(bomb), 0
    for key, info in index.storage_data.items():
        if prefix in key.fqn:
            found += 1
            with open(checkpoint / info.relative_path, "ab") as file:
                info.offset, info.length = file.tell(), len(payload)
                file.write(payload)
    assert found, f"no entry {prefix}"
    with open(checkpoint / ".metadata", "wb") as file:
        pickle.dump(index, file)


def plant_in_index(bomb: Bomb, checkpoint: Path) -> None:
    from mindspeed.storage.safe_metadata import read_index

    index = read_index(checkpoint)
    index.planner_data = {"a": bomb}
    with open(checkpoint / ".metadata", "wb") as file:
        pickle.dump(index, file)


def plant_in_common(bomb: Bomb, checkpoint: Path) -> None:
    common = torch.load(checkpoint / "common.pt", weights_only=False)
    torch.save({**common, "opt_param_scheduler": bomb}, checkpoint / "common.pt")


def plant_in_rank_file(bomb: Bomb, checkpoint: Path) -> None:
    for path in checkpoint.glob("mp_rank_*/*.pt"):
        state = torch.load(path, weights_only=False)
        torch.save({**state, "rng_state": [bomb]}, path)


def plant_in_bin(bomb: Bomb, folder: Path) -> None:
    """``pytorch_model.bin`` in the place of safetensors."""
    from safetensors.torch import load_file

    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**state, "more": bomb}, folder / "pytorch_model.bin")


def planted(source: Path, target: Path, plant: Callable[..., None], *args: Any) -> Path:
    """A copy of a directory with a payload; what checks its bytes is taken away, as anyone can."""
    shutil.copytree(source, target)
    folders = [*target.glob("iter_*"), *target.glob("release")] or [target]
    for folder in folders:
        for name in ("mindspeed.json", "digests.jsonl"):
            (folder / name).unlink(missing_ok=True)
        plant(*args, Bomb(target.parent / f"{target.name} went off"), folder)
    return target


def run_planted(
    source: Path, target: Path, plant: Callable[..., None], args: Sequence[Any], commands: Any
) -> tuple[bool, list[tuple[int, str]]]:
    """Plant, run all commands; whether the payload went off, and each status and output."""
    planted(source, target, plant, *args)
    results = run_all(commands)
    return (target.parent / f"{target.name} went off").exists(), results


def load_with_torch(folder: Path, entry: str) -> tuple[bool, str]:
    """Load a directory of torch's checkpoint library with a payload in its index or an object."""
    import torch.distributed.checkpoint as dcp

    marker = folder / "went off"
    bomb: Any = Bomb(marker)
    dcp.save(
        {"weight": torch.ones(2), "state": {"rng": bomb if entry == "object" else 1}},
        checkpoint_id=folder,
    )
    if entry == "index":
        index = pickle.loads((folder / ".metadata").read_bytes())
        index.storage_meta = bomb
        (folder / ".metadata").write_bytes(pickle.dumps(index))
    try:
        dcp.load({"weight": torch.zeros(2), "state": {"rng": None}}, checkpoint_id=folder)
    except BaseException as error:  # torch's is no Exception
        return marker.exists(), str(error)
    return marker.exists(), "was loaded"


def state_of_an_engine(folder: Path) -> tuple[bool, str, bool]:
    """Extra state of a module that unpickles it, with and without a payload."""
    import types

    from mindspeed.adaptor.repairs.checkpoints import checkpoint_pickles
    from mindspeed.journal import Journal

    module = types.ModuleType("engine")
    exec(
        "import io, pickle, torch\n"
        "class Linear:\n"
        "    def set_extra_state(self, state):\n"
        "        if isinstance(state, io.BytesIO):\n"
        "            self.state = torch.load(state, weights_only=False)\n"
        "        else:\n"
        "            self.state = pickle.loads(state.numpy().tobytes())\n",
        vars(module),
    )
    module.Linear.__module__ = "engine"
    journal = Journal()
    checkpoint_pickles.guard_extra_state(module, journal)

    def as_tensor(value: Any) -> torch.Tensor:
        return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)

    state = {"scale_fwd": torch.arange(3.0), "extra_fp8_variables": {"num_gemms": 2}}
    linear = module.Linear()
    linear.set_extra_state(as_tensor(state))
    good = torch.equal(linear.state["scale_fwd"], state["scale_fwd"])
    linear.set_extra_state(io.BytesIO(saved(state)))
    good = good and torch.equal(linear.state["scale_fwd"], state["scale_fwd"])
    marker, messages = folder / "went off", []
    for payload in (as_tensor(Bomb(marker)), io.BytesIO(saved(Bomb(marker)))):
        try:
            linear.set_extra_state(payload)
        except PermissionError as error:
            messages.append(str(error))
    journal.undo()
    return marker.exists(), messages[0] if len(messages) == 2 else "", good


def index_map(folder: Path) -> tuple[bool, str]:
    """An index map of a data set that is a pickle."""
    from megatron.core.datasets import blended_dataset

    path, marker = folder / "map.npy", folder / "went off"
    path.write_bytes(pickle.dumps(Bomb(marker)))
    try:
        blended_dataset.numpy.load(path, allow_pickle=True, mmap_mode="r")
    except PermissionError as error:
        return marker.exists(), str(error)
    return marker.exists(), "was loaded"
