"""Figures of the virtual clock and the ledger at full size, on tensors without memory.

300 TFLOP/s, a link of 200 GB/s and 10 us for each call; the formula for a product of C seconds and
a collective of T seconds in n parts is max(C, T + n a) + min(C, T + n a) / n.
"""

from __future__ import annotations

import pytest

from tests.support.lazy import needs
from tests.tensor_parallel import modelled_ranks
from tests.tensor_parallel.modelled_ranks import FLOPS_PER_SECOND, LINK, RANKS

needs("megatron.core")

SETUP = "tests.support.warm"
M, K, N = 16384, 5120, 1920
MICROSECOND = 1e-6


def test_parts_of_a_product_expose_less_of_the_same_bytes(ranks):
    parts = [1, 2, 4, 8]
    (found,) = ranks(1, modelled_ranks.one_product, M, K, N, parts, setup=SETUP, backend=None)
    computing = 2 * M * K * N / FLOPS_PER_SECOND
    for number, figures in zip(parts, found, strict=True):
        assert (figures.calls, figures.sent) == (number, 55_050_240)
        sending = figures.sent / LINK.bytes_per_second + number * LINK.latency
        longer, shorter = max(computing, sending), min(computing, sending)
        assert figures.total == pytest.approx(longer + shorter / number)
    exposed = [round(figures.exposed / MICROSECOND, 1) for figures in found]
    assert exposed == [285.3, 147.6, 78.8, 44.4]


LAYER = {"s": 4096, "h": 8192, "qkv": 10240, "ffn": 57344}  # Llama-2-70B
U = 4096 * 8192 * 2 * (RANKS - 1) // RANKS
# Configuration: collectives, bytes in U, exposed microseconds.
EXPOSED = {
    "TP": (4, 8, 1505.3),
    "TP, 2 parts": (6, 8, 1107.1),
    "TP, 4 parts": (10, 8, 923.1),
    "TP, 8 parts": (18, 8, 861.0),
    "SP": (10, 10, 1856.1),
    "SP, 2 parts": (16, 10, 1073.5),
    "SP, 4 parts": (28, 10, 727.2),
    "SP, 8 parts": (52, 10, 644.0),
    "SP, kept": (8, 8, 1838.9),
    "SP, 4 parts, kept": (26, 8, 709.9),
}


@pytest.mark.slow
def test_a_layer(ranks, tmp_path):
    """qkv, proj, fc1 and fc2, forward and backward; the table of docs/tensor-parallel.md."""
    file = tmp_path / "coc.json"
    file.write_text('{"recompute_all_gather": false}')
    configurations = []
    for name in EXPOSED:
        kept = {"coc_cfgs": str(file), "coc_mode": 1} if "kept" in name else {}
        parts = [int(word.split()[0]) for word in name.split(", ") if "parts" in word]
        flags = kept | ({"coc_parallel_num": parts[0], "coc_mode": 2} if parts else {})
        configurations.append((flags, name.startswith("SP")))
    given = (LAYER, configurations)
    (found,) = ranks(1, modelled_ranks.one_layer, *given, setup=SETUP, backend=None)
    measured = {
        name: (one.calls, one.sent / U, round(one.exposed / MICROSECOND, 1))
        for name, one in zip(EXPOSED, found, strict=True)
    }
    assert measured == EXPOSED
    # What is hidden is all that changes.
    computing = {round((one.total - one.exposed) / MICROSECOND, 1) for one in found}
    assert len(computing) == 1
