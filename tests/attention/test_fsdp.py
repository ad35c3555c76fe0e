"""The example of docs/attention-plans.md: FSDP on two ranks against one process."""

from __future__ import annotations

import pytest
import torch

from tests.attention import fsdp_ranks as jobs


def test_losses_and_gradients_are_those_of_one_process(ranks) -> None:
    ((wanted_loss, wanted),) = ranks(1, jobs.step, False)
    for loss, grads in ranks(2, jobs.step, True, timeout=120):
        assert loss == pytest.approx(wanted_loss, rel=1e-12)
        assert set(grads) == set(wanted)
        for name, grad in grads.items():
            torch.testing.assert_close(
                torch.tensor(grad), torch.tensor(wanted[name]), atol=1e-12, rtol=1e-9
            )


def test_the_example_runs_as_it_is_printed(ranks) -> None:
    assert ranks(2, jobs.main, timeout=120) == [None, None]
