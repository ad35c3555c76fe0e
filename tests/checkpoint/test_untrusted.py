"""A checkpoint cannot run code, neither through its index nor through its common part."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mindspeed.errors import SecurityError
from mindspeed.storage.safe_metadata import read_index
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


def test_an_index_that_would_call_a_function_is_refused_and_nothing_is_called(tmp_path):
    with pytest.raises(SecurityError, match=r"names (posix|os)\.mkdir"):
        read_index(index(tmp_path, Bomb(tmp_path / "harm")))
    assert not (tmp_path / "harm").exists()


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
