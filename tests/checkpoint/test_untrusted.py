"""A checkpoint cannot run code, neither through its index nor through its common part."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mindspeed import unpickle
from mindspeed.errors import DamagedCheckpoint, SecurityError
from mindspeed.storage import directory
from mindspeed.storage.safe_metadata import common_state, read_index
from tests.support.enumerations import Attribute


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def index(tmp_path: Path, *more: object) -> Path:
    tensor = TensorStorageMetadata(
        properties=TensorProperties(dtype=torch.bfloat16), size=torch.Size([2, 3]), chunks=[]
    )
    metadata = Metadata(
        state_dict_metadata={"a": tensor, "b": BytesStorageMetadata()},
        storage_data={MetadataIndex("a"): list(more)},
    )
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    return tmp_path


def test_an_ordinary_index_is_accepted(tmp_path):
    assert read_index(index(tmp_path)).state_dict_metadata.keys() == {"a", "b"}


def with_common_object(tmp_path: Path, *values: object) -> Path:
    """A checkpoint of megatron-core 0.19: torch writes the common part among the tensors."""
    state = {"a": torch.ones(2)}
    if values:
        state[directory.COMMON_STATE] = list(values)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    (tmp_path / "metadata.json").touch()
    return tmp_path


def test_a_common_part_among_the_tensors_is_read(tmp_path):
    checkpoint = with_common_object(tmp_path, {"iteration": 3, "rows": torch.arange(2)})
    assert directory.problem_with(checkpoint) is None
    found = common_state(checkpoint)
    assert found["iteration"] == 3 and found["rows"].tolist() == [0, 1]


def test_one_that_would_call_a_function_is_refused_and_nothing_is_called(tmp_path):
    checkpoint = with_common_object(tmp_path / "saved", {"iteration": Bomb(tmp_path / "harm")})
    with pytest.raises(SecurityError, match=r"(posix|os)\.mkdir"):
        common_state(checkpoint)
    assert not (tmp_path / "harm").exists()


def test_a_checkpoint_without_a_common_part_is_damaged(tmp_path):
    checkpoint = with_common_object(tmp_path)
    assert directory.problem_with(checkpoint) == "common.pt is missing"
    with pytest.raises(DamagedCheckpoint, match=r"common\.pt is missing"):
        common_state(checkpoint)


def test_an_index_that_would_call_a_function_is_refused_and_nothing_is_called(tmp_path):
    with pytest.raises(SecurityError, match=r"names (posix|os)\.mkdir"):
        read_index(index(tmp_path, Bomb(tmp_path / "harm")))
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("module", [b"pathlib", b"pathlib._local"])
def test_paths_of_every_python_are_read(module):
    name = PosixPath.__module__.encode()
    pickled = pickle.dumps(PosixPath("a/b"), 2).replace(b"c" + name, b"c" + module)
    assert unpickle.read_index(io.BytesIO(pickled)) == PosixPath("a/b")


def test_an_index_with_enums_pickled_as_attributes_loads(tmp_path):
    member = Attribute(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")
    (read,) = read_index(index(tmp_path, member)).storage_data.values()
    assert read == [_MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST]


@pytest.mark.parametrize(
    "of", [(torch.Size, "__class__"), (_MEM_FORMAT_ENCODING, "__class__"), (Metadata, "a")]
)
def test_no_other_attribute_is_read(tmp_path, of):
    with pytest.raises(SecurityError, match=f"refusing to load {tmp_path}: .*names the attribute"):
        read_index(index(tmp_path, Attribute(*of)))


@pytest.mark.parametrize(
    "module, name",
    [
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
    ],
)
def test_names_that_lead_to_functions_are_refused(module, name, tmp_path):
    protocol_4 = b"\x80\x04" + b"".join(
        b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)
    )
    (tmp_path / ".metadata").write_bytes(protocol_4 + b"\x93.")
    with pytest.raises(SecurityError, match="refusing to load"):
        read_index(tmp_path)
