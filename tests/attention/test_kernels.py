"""One region: every small rectangle with every band, against the dense formula."""

from __future__ import annotations

import itertools

import pytest
import torch

from mindspeed.attention import Mask, Region, kernels
from mindspeed.attention.mask import INF
from mindspeed.attention.varlen_batches import varlen_batches
from tests.support import truth

SCALE, LARGEST = 0.5, 6


def regions(queries: int, keys: int) -> list[Region]:
    """Those without an empty row or column, each once."""
    limits = range(-LARGEST, LARGEST + 1)
    bands = itertools.product([-INF, *limits], [INF, *limits])
    cut = {Region(0, queries, 0, keys, *band).crop(0, queries, 0, keys) for band in bands}
    return sorted(region for region in cut if region and region[:4] == (0, queries, 0, keys))


@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("keys", [1, 3, 5])
def test_every_band(queries: int, keys: int) -> None:
    size = max(queries, keys)
    q, k, v, dout = truth.tensors(size, 2, 1, 4, 4)
    q, dout, k, v = q[:queries], dout[:queries], k[:keys], v[:keys]
    assert regions(queries, keys)
    for region in regions(queries, keys):
        softmax = kernels.SoftmaxOptions(SCALE)
        out, lse = torch.zeros(queries, 2, 4).double(), torch.zeros(queries, 2).double()
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        for batch in varlen_batches([region]):
            rows = slice(batch.sequences[0].q0, batch.sequences[0].q1)
            part, part_lse = kernels.forward(q[rows], k, v, batch, softmax)
            out[rows], lse[rows] = part, part_lse  # the batches of one region share no query
            final = dout[rows], q[rows], k, v, part, part_lse
            for total, grad in zip(
                (grads[0][rows], *grads[1:]), kernels.backward(*final, batch, softmax), strict=True
            ):
                total += grad
        keep = Mask(size, (region,)).dense()[:queries, :keys]
        expected = truth.attend(q, k, v, dout, keep, scale=SCALE)
        torch.testing.assert_close((out, *grads), expected, atol=1e-12, rtol=1e-12)
