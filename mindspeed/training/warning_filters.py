"""Filters of warnings: those that do not apply here are hidden, others are shown once per job.

Megatron Core warns at import and at construction, in every process, about packages that
:mod:`mindspeed.te` replaces and about padding in data that has none. The list below names these
warnings; rank 0 shows other warnings of Megatron and torch. ``-W`` and ``PYTHONWARNINGS`` turn the
filters off.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

# (beginning of the message, module), each with the reason why it does not apply
_NOT_APPLICABLE = (
    # The norms of both layer specs are mindspeed.te's, optimizers and gradient clipping too.
    ("Apex is not installed", r"megatron\.core\."),
    ("Transformer Engine and Apex are not installed", r"megatron\.core\."),
    # Samples are slices of concatenated documents: nothing is padded.
    ("The pad token id in the tokenizer collides", r"megatron\.core\.datasets\."),
    # The distributed optimizer looks for gradients at its own shards, which are views.
    (r"The \.grad attribute of a Tensor that is not a leaf", r"megatron\.core\.optimizer\."),
)
_THIRD_PARTY = r"(megatron|torch)\b"


def filter_warnings() -> None:
    """Set the filters of this process; call it before the first import of Megatron."""
    if sys.warnoptions:
        return
    if os.environ.get("RANK", "0") != "0":
        warnings.filterwarnings("ignore", module=_THIRD_PARTY)
    for message, module in _NOT_APPLICABLE:
        warnings.filterwarnings("ignore", message, module=module)
    # Mock data has no directory for an index.
    logging.getLogger("megatron.core.datasets.gpt_dataset").addFilter(
        lambda record: "path_to_cache is None" not in record.getMessage()
    )
