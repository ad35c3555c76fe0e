"""Groups of a fake job are Megatron's."""

import pytest


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "cp": 3, "ep": 1, "dp": 2, "pp": 2},
        {"tp": 1, "cp": 1, "ep": 2, "dp": 3, "pp": 2},
        {"tp": 2, "cp": 1, "ep": 1, "dp": 2, "pp": 3, "rank_offset": 5},
    ],
    ids=["context", "experts", "after others"],
)
def test_ranks_are_listed_as_by_megatron(sizes: dict[str, int], order: str) -> None:
    import mindspeed.megatron_adaptor  # noqa: F401, I001 - before megatron.core
    from megatron.core.parallel_state import RankGenerator

    from mindspeed.training.fake_job import fake_groups

    generator = RankGenerator(order=order, **sizes)
    kinds = ("tp", "dp", "pp", "dp-cp", "tp-pp", "tp-dp-cp", "tp-ep-pp", "tp-cp-ep-dp-pp")
    expected = {kind: generator.get_ranks(kind) for kind in kinds}
    with fake_groups(0, 1):
        assert {kind: generator.get_ranks(kind) for kind in kinds} == expected
