"""mindspeed: train large models with Megatron on Ascend NPU, NVIDIA GPU and plain CPU."""

__version__ = "0.1.0"
