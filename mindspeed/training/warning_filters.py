"""What a user of the trainer is told: warnings that mean something here, once for the job.

Megatron Core warns at import and at construction, in every process, of things that are no matter of
the user's: packages whose part is played by :mod:`mindspeed.te`, padding in data that has none. The
lists below name those; other warnings of Megatron and torch are shown by rank 0 only.

Whoever asks Python for other warnings (``-W``, ``PYTHONWARNINGS``) gets what he asks for.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

# (beginning of the message, module): why it means nothing here
_MEANINGLESS = (
    # The norms of both layer specs are mindspeed.te's, optimizers and gradient clipping too.
    ("Apex is not installed", r"megatron\.core\."),
    ("Transformer Engine and Apex are not installed", r"megatron\.core\."),
    # Sequences are cut from documents that stand end to end: nothing is padded.
    ("The pad token id in the tokenizer collides", r"megatron\.core\.datasets\."),
    # The distributed optimizer looks for gradients at its own shards, which are views.
    (r"The \.grad attribute of a Tensor that is not a leaf", r"megatron\.core\.optimizer\."),
)
_OTHER_PEOPLES_MODULES = r"(megatron|torch)\b"


def filter_warnings() -> None:
    """Set the filters of this process; call it before the first import of Megatron."""
    if sys.warnoptions:
        return
    if os.environ.get("RANK", "0") != "0":
        warnings.filterwarnings("ignore", module=_OTHER_PEOPLES_MODULES)
    for message, module in _MEANINGLESS:
        warnings.filterwarnings("ignore", message, module=module)
    # Invented data has no folder to keep an index in.
    logging.getLogger("megatron.core.datasets.gpt_dataset").addFilter(
        lambda record: "path_to_cache is None" not in record.getMessage()
    )
