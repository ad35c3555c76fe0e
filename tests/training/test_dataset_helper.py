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


def built() -> str:
    from mindspeed.training import data

    data.ensure_helper = asked
    with pytest.raises(DataError) as error:
        data.build_datasets(argparse.Namespace(), None, None)
    return str(error.value)


def test_the_helper_is_there_before_data_sets_are_built(ranks):
    assert ranks(1, built, setup="tests.support.warm", backend=None) == ["asked for the helper"]
