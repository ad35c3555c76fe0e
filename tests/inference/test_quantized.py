"""Generation with weights in 4 or 8 bits: that of the dequantised model, in counted bytes."""

from __future__ import annotations

import pytest
import torch

from tests.support.lazy import Lazy, needs

needs("megatron.core", "peft")

from mindspeed.errors import ConfigError
from mindspeed.lora.config import LoraConfig
from tests.inference import quantized_ranks
from tests.lora import oracle

load = Lazy("mindspeed.inference.load")
SETUP = "tests.support.warm"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
BITS = {"nf4": (4.12, 4.2), "int8": (8, 8.3), "fp8": (8, 8.3)}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    root = tmp_path_factory.mktemp("quantized")
    folder = oracle.save_base(root / "base", **SIZES)
    oracle.adapted(folder, target_modules=["q_proj", "down_proj"]).save_pretrained(root / "adapter")
    return str(folder), str(root / "adapter")


@pytest.mark.parametrize(
    ("form", "adapted", "tp"),
    [("nf4", False, 1), ("nf4", True, 2), ("int8", True, 1), ("fp8", False, 1)],
)
def test_logits_are_those_of_the_dequantised_model(form, adapted, tp, base, ranks):
    folder, adapter = base
    args = (quantized_ranks.compared, folder, adapter if adapted else None, tp, form)
    for found in ranks(tp, *args, setup=SETUP):
        (logits, text), (expected, other) = found["stored"], found["plain"]
        # Logits reach 6, and products of stored weights round otherwise.
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=5e-5)
        assert text == other and found["weights"] == 8
        low, high = BITS[form]
        assert low <= found["bits"] <= high


def test_weights_that_are_read_whole_are_refused(base, tmp_path, monkeypatch):
    saved = load.saved_args(f"hf:{base[0]}", None)
    monkeypatch.setattr("mindspeed.inference.load.saved_args", lambda root, step: saved)
    with pytest.raises(ConfigError, match=r"mindspeed convert --format hf$"):
        load.resolve_source(load.Source(str(tmp_path), base_weights="nf4"), 1)
    adapter = LoraConfig(("all-linear",), base_weights="int8")
    monkeypatch.setattr("mindspeed.inference.load.config_of", lambda path: adapter)
    with pytest.raises(ConfigError, match=r"adapter a was trained on them; .*--base-weights none"):
        load.resolve_source(load.Source(str(tmp_path), lora="a"), 1)
    source = load.Source(str(tmp_path), lora="a", base_weights="none")
    assert load.resolve_source(source, 1).base_weights is None
