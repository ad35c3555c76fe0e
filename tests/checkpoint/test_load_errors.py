"""What goes wrong while tensors are read is told apart: damage, or a defect with its place."""

from __future__ import annotations

import pytest

from mindspeed.errors import CheckpointError, DamagedCheckpoint
from tests.support.lazy import Lazy, needs

needs("megatron.core")

read_sharded = Lazy("mindspeed.storage.sharded_load", "read_sharded")


def failing(error: Exception):
    """A ``dist_checkpointing.load`` that reports ``error`` of rank 3 as torch does."""

    def load(wanted, folder):
        from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

        try:
            raise error
        except type(error) as raised:
            raise CheckpointException("read", {3: _wrap_exception(raised)}) from raised

    return load


@pytest.fixture
def read(tmp_path, monkeypatch):
    """``read(error, digests)``: the exception that reading ends with."""
    from mindspeed.storage import sharded_load

    def run(error: Exception, digests: object) -> CheckpointError:
        monkeypatch.setattr(sharded_load.dist_checkpointing, "load", failing(error))
        monkeypatch.setattr(sharded_load.Digests, "read", lambda folder: digests)
        with pytest.raises(CheckpointError) as found:
            read_sharded({}, tmp_path)
        assert found.value.__cause__ is not None
        return found.value

    return run


DEFECT = AttributeError("'torch.Size' object has no attribute 'items'")


def test_a_defect_is_no_damage_and_names_type_and_place(read, tmp_path):
    error = read(DEFECT, digests=object())
    assert not isinstance(error, DamagedCheckpoint)
    assert str(error).startswith(f"{tmp_path} has its digests but cannot be loaded: AttributeError")
    assert "'torch.Size' object has no attribute 'items'" in str(error)
    assert f"({__file__}:" in str(error) and ", load)" in str(error)


@pytest.mark.parametrize(
    "error, digests",
    [(DEFECT, None), (RuntimeError("short"), None), (RuntimeError("short"), object())],
    ids=["anything without digests", "without digests", "with digests"],
)
def test_damage_names_type_and_place(read, error, digests):
    found = read(error, digests)
    assert isinstance(found, DamagedCheckpoint)
    assert str(found).startswith(f"damaged: {type(error).__name__}: {error} ({__file__}:")


def test_a_small_file_that_cannot_be_read_keeps_its_cause(ranks):
    ((kind, text, cause),) = ranks(1, small_file, setup="tests.support.warm")
    assert kind == "DamagedCheckpoint" and cause == "ValueError"
    assert text.startswith("ValueError: no index") and ", broken)" in text


def small_file():
    from mindspeed.storage.sharded_load import on_all_ranks

    def broken():
        raise ValueError("no index")

    try:
        on_all_ranks(broken)
    except CheckpointError as error:
        return type(error).__name__, str(error), type(error.__cause__).__name__
