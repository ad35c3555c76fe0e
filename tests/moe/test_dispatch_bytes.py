"""What the all-to-all dispatcher sends: its calls, and their bytes by formula.

N tokens of a rank, k experts of a token, H hidden size, e bytes of an element, t slices of an
expert. Packed rows are 16 bytes longer.
"""

from __future__ import annotations

import pytest

from tests.moe import layer_ranks as jobs
from tests.moe.layer_ranks import EXPERTS, HIDDEN, TOKENS
from tests.moe.test_overlap import ADAPTOR, SHARED
from tests.support.lazy import needs

needs("megatron.core")

COPIES, ROW, PITCH = TOKENS * 2, HIDDEN * 4, HIDDEN * 4 + 16
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
"""As many rows to every expert: the even routing of the formulas."""
DIRECTIONS = [("forward", PITCH), ("forward", ROW), ("backward", ROW), ("backward", PITCH)]
"""Of the dispatch and the combine in the order of a step."""


def sent(result, op):
    return [(phase, wire) for kind, phase, wire in result.extra["calls"] if kind == op]


def test_even_routing(ranks):
    """N k H e (EP - 1) / EP each way."""
    for (result,) in ranks(
        2, jobs.counted, {"expert": 2}, PADDED, [{"overlap": True}], setup=ADAPTOR
    ):
        assert {call[0] for call in result.extra["calls"]} == {"all_to_all"}
        expected = [(phase, COPIES * row // 2) for phase, row in DIRECTIONS]
        assert sent(result, "all_to_all") == expected


def test_actual_routing(ranks):
    """Rows for the other rank, and the counts of N tokens for E experts."""
    found = ranks(2, jobs.counted, {"expert": 2}, SHARED, [{}, {"overlap": True}], setup=ADAPTOR)
    for rank, results in enumerate(found):
        for result in results:
            other = slice(0, EXPERTS // 2) if rank else slice(EXPERTS // 2, EXPERTS)
            own = slice(EXPERTS // 2, EXPERTS) if rank else slice(0, EXPERTS // 2)
            away = sum(result.extra["counts"][0][other])
            here = sum(found[1 - rank][0].extra["counts"][0][own])
            expected = zip((away, here, away, here), DIRECTIONS, strict=True)
            assert sent(result, "all_to_all") == [(p, n * row) for n, (p, row) in expected]
            assert sent(result, "all_gather") == [("forward", EXPERTS * 8)]
            log = result.log
            starts = [*log.communications("forward"), *log.communications("backward")]
            assert len(starts) == len(result.extra["calls"]) == 5


def test_probabilities_in_the_rows_save_two_collectives(ranks):
    for results in ranks(2, jobs.counted, {"expert": 2}, {}, [None, {}], setup=ADAPTOR):
        assert [len(result.extra["calls"]) for result in results] == [7, 5]


@pytest.mark.parametrize("expert", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_expert_tensor_parallelism(ranks, expert):
    """N k H e (t - 1) for each gather of rows, and as much for each sum of them."""
    layout = {"tensor": 2, "expert": expert, "expert_tensor": 2}
    packed = PITCH if expert > 1 else ROW
    probs = [] if expert > 1 else [("forward", COPIES * 4)]
    for (result,) in ranks(
        2 * expert, jobs.counted, layout, PADDED, [{"overlap": True}], setup=ADAPTOR
    ):
        gathers = [("forward", COPIES * packed), *probs, ("backward", COPIES * ROW)]
        assert sent(result, "all_gather") == gathers
        assert sent(result, "reduce_scatter") == []
        log = result.log
        starts = [*log.communications("forward"), *log.communications("backward")]
        assert len(starts) == len(result.extra["calls"])
        sums = sent(result, "all_to_all")
        assert ("forward", COPIES * ROW) in sums
        assert ("backward", COPIES * packed) in sums
