"""``setup=`` of ranks that run ``pretrain_gpt.py``: what the script imports is imported once.

A rank under ``torchrun`` spends some ten seconds of processor time on imports, for a few steps of a
small model. The adaptor comes before Megatron, as in the script.
"""

import os
import sys

sys.path.insert(0, os.environ["MEGATRON_LM_PATH"])

import mindspeed.megatron_adaptor  # noqa: F401
import pretrain_gpt  # noqa: F401  # trains as a script only
