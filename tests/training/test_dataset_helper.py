"""Our trainer builds the data set helper of a checkout that has none, as Megatron's script does."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.support.lazy import needs

needs("megatron.core")

from mindspeed.errors import DataError


def asked(directory: Path) -> None:
    assert (directory / "gpt_dataset.py").is_file()
    raise DataError("asked for the helper")


def built() -> None:
    from mindspeed.training import data

    data.ensure_helper = asked
    with pytest.raises(DataError, match="asked for the helper"):
        data.build_datasets(argparse.Namespace(), None, None)


def test_the_helper_is_there_before_data_sets_are_built(ranks):
    ranks(1, built, setup="tests.support.warm", backend=None)
