"""Ids beyond the vocabulary, as a data set of any release of Megatron reads its samples."""

from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed.adaptor.repairs.data.token_ids import check_each
from mindspeed.errors import DataError

DOCUMENTS = np.array([4])


def data_set(ids: list[int]):
    return SimpleNamespace(
        config=SimpleNamespace(vocab_size=8),
        dataset=SimpleNamespace(get=lambda document: ids),
        dataset_path="corpus",
        _pad_token_id=-1,
    )


@pytest.mark.parametrize("further", [(), ([3],)], ids=["0.12.1", "0.19.0"])
def test_a_sample_is_passed_on_with_all_that_a_release_gives(further):
    sample = (np.array([0, 7, -1]), DOCUMENTS, *further)
    assert check_each(lambda self, idx: sample)(data_set([0, 7]), 0) == sample


@pytest.mark.parametrize("wrong", [8, -2])
def test_a_wrong_id_is_named(wrong):
    sample = (np.array([0, wrong, -1]), DOCUMENTS)
    with pytest.raises(
        DataError, match=f"corpus: document 4 has the token id {wrong}, .* 8 entries"
    ):
        check_each(lambda self, idx: sample)(data_set([0, wrong]), 0)
