"""Repairs of releases other than the installed one, on small functions with the same defects."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from mindspeed.adaptor import fused_functions
from mindspeed.adaptor.repairs.checkpoints.serialization_format import in_torchs_format
from mindspeed.adaptor.repairs.layers.mtp import checkpoint_with_mask, take_means_times_tokens
from mindspeed.adaptor.versions import batch_functions
from mindspeed.errors import ConfigError
from mindspeed.features.compatibility import megatron_limits
from mindspeed.features.registry import resolve
from tests.support.lazy import needs
from tests.support.refusal import refusal

needs("megatron.core")

MASK = torch.tensor([True, False])


class Layer:
    """As in 0.18: what runs again does not get the padding mask."""

    def _proj_and_transformer_layer(self, hidden_states, padding_mask=None):
        return hidden_states, padding_mask

    @checkpoint_with_mask
    def _checkpointed_forward(self, hidden_states):
        return self._proj_and_transformer_layer(hidden_states=hidden_states)


def test_a_recomputed_prediction_layer_has_its_padding_mask():
    layer = Layer()
    assert layer._checkpointed_forward(1, padding_mask=MASK) == (1, MASK)
    assert layer._checkpointed_forward(1, padding_mask=None) == (1, None)
    assert vars(layer) == {}


def test_losses_per_token_are_means_times_the_tokens_of_the_main_loss():
    """The weights of one prediction, by 0.17's own formula without tokens, and by hand."""

    @take_means_times_tokens
    def process_mtp_loss(labels, loss_mask, config, cp_group=None):
        rolled = torch.roll(loss_mask, -1, 1)
        rolled[:, -1] = 0
        scale = config.mtp_loss_scaling_factor / config.mtp_num_layers
        assert not config.calculate_per_token_loss
        return scale * rolled / rolled.sum().clamp(min=1)

    config = SimpleNamespace(
        calculate_per_token_loss=True, mtp_loss_scaling_factor=0.5, mtp_num_layers=1
    )
    labels = torch.tensor([[3, 4, -100, 5, 6]])
    weights = process_mtp_loss(labels, None, config)
    torch.testing.assert_close(weights, 0.5 * 4 / 3 * torch.tensor([[1.0, 0, 1, 1, 0]]))
    assert config.calculate_per_token_loss and config.mtp_loss_scaling_factor == 0.5


@pytest.mark.parametrize("sft", [False, True])
def test_samples_stay_apart_unless_the_data_set_packs_them(sft, monkeypatch):
    """As in 0.19: a script hands its batch to Megatron's function, which makes one row of it."""
    values = SimpleNamespace(sft=sft, hybrid_context_parallel=False)
    monkeypatch.setattr(batch_functions, "script_arguments", lambda: values)
    patch = batch_functions.flatten_patch("test")
    flatten = patch.make(lambda batch: {name: x.reshape(1, -1) for name, x in batch.items()})
    tokens = flatten({"tokens": torch.zeros(2, 3)})["tokens"]
    assert tokens.shape == ((1, 6) if sft else (2, 3))


@pytest.mark.parametrize(("name", "weights"), [("swiglu", ()), ("weighted_swiglu", (1.0,))])
def test_a_clamped_activation_is_megatrons_own(name, weights):
    """As in 0.20."""
    (patch,) = fused_functions.PATCHES[name]
    function = patch.make(lambda *given, **named: "clamped")
    assert function(torch.ones(1, 4), None, *weights, clamp_value=2.0) == "clamped"


WRONG = {
    "muon": ("0.17.1", {"optimizer": "muon"}, "--optimizer muon .*emerging_optimizers 0.2"),
    "fused-latent": (
        "0.18.2",
        {"mla_down_proj_fusion": True, "tensor_model_parallel_size": 2},
        "--mla-down-proj-fusion: with tensor parallelism",
    ),
    "repeated": ("0.17.1", {"mtp_use_repeated_layer": True}, "--mtp-use-repeated-layer: .*0.18.2"),
    "gathered": (
        "0.19.0",
        {"tensor_model_parallel_size": 2, "expert_tensor_parallel_num_weight_shards": 4},
        "--tensor-parallel-num-weight-shards .*--zero-stage 3",
    ),
    "documents": (
        "0.19.0",
        {"dataloader_inter_document_masking": True},
        "--dataloader-inter-document-masking: .*--reset-attention-mask",
    ),
    "masters": (
        "0.20.0",
        {"quant_states": "fp8", "bf16": True},
        "--quant-states .*--use-distributed-optimizer",
    ),
}
RIGHT = {
    "muon": ("0.16.1", {"optimizer": "muon"}),
    "fused-latent": ("0.18.2", {"mla_down_proj_fusion": True}),
    "repeated": ("0.18.2", {"mtp_use_repeated_layer": True}),
    "gathered": (
        "0.19.0",
        {"tensor_model_parallel_size": 2, "tensor_parallel_num_weight_shards": 2},
    ),
}


@pytest.fixture
def release(monkeypatch):
    from packaging.version import Version

    return lambda name: monkeypatch.setattr(
        megatron_limits, "megatron_version", lambda: Version(name)
    )


@pytest.mark.parametrize("case", WRONG)
def test_what_a_release_has_wrong_is_refused(case, release):
    version, values, message = WRONG[case]
    release(version)
    with pytest.raises(ConfigError, match=message):
        resolve(values, "cpu")


@pytest.mark.parametrize("case", RIGHT)
def test_what_another_release_has_right_is_accepted(case, release):
    version, values = RIGHT[case]
    release(version)
    assert not refusal(values)


def test_a_file_of_a_checkpoint_is_written_by_the_call_of_0_12():
    item = planner.WriteItem(metadata.MetadataIndex("x"), planner.WriteItemType.BYTE_IO)
    made = io.BytesIO()
    given = (filesystem._StorageWriterTransforms(), made, io.BytesIO(b"abc"), item, "file")
    if hasattr(filesystem, "SerializationFormat"):  # since torch 2.8
        with pytest.raises(TypeError, match="serialization_format"):
            filesystem._write_item(*given)
    in_torchs_format(filesystem._write_item)(*given)
    assert made.getvalue() == b"abc"
