"""Process groups by object, torch name and HCCL name."""

from __future__ import annotations

import mindspeed.ops.catalog as catalog
from tests.ops import coc_ranks, group_ranks


def test_groups_are_found_by_object_and_by_torch_name(ranks):
    for facts, refusal in ranks(2, group_ranks.names_of_groups):
        assert all(facts.values()), facts
        assert refusal.startswith("mindspeed.ops.an_op: hcom: expected a group that this process")
        assert "no process group is called 'no such group'" in refusal


def test_the_newest_tensor_parallel_group_of_megatron_is_found(ranks):
    assert ranks(2, group_ranks.tensor_parallel_group) == [(True, False)] * 2


def test_a_communicator_of_hccl_has_a_name_once_it_is_used(ranks):
    for result in ranks(2, group_ranks.names_of_communicators):
        early, name, found, name_without_hccl = result
        assert (early, name, found) == ("unknown", "hccl_2", True)
        assert name_without_hccl == "0"


def test_the_catalogue_knows_which_operators_need_a_group():
    communicating = {one.name for one in catalog.operators() if one.communicates}
    assert "mm_all_reduce" in communicating
    assert not communicating & {"rms_norm", "rms_norm_backward"}
    for one in catalog.operators():
        assert not (one.communicates and list(one.samples(one.dtypes[0])))


def test_flops_of_operators_with_a_group(ranks):
    """Two operations for every product of numbers that this rank forms."""
    for counts in ranks(2, coc_ranks.count_flops):
        assert counts == {
            "coc_matmul_all_reduce": 2 * 4 * 3 * 5,
            "coc_matmul_reduce_scatter": 2 * 4 * 3 * 5,
            "coc_all_gather_matmul": 2 * 8 * 3 * 5,
            "coc_all_gather_matmul_v2": 2 * 8 * 3 * 5,
            "mm_all_reduce": 2 * 4 * 3 * 5,
            "grouped_mat_mul_all_reduce": 2 * 4 * 3 * 5 + 2 * 2 * 3 * 1,
            "all_to_all_all_gather_bmm": 2 * 2 * 12 * 3 * 5,
            "bmm_reduce_scatter_all_to_all": 2 * 2 * 12 * 3 * 5,
        }
