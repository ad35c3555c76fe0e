"""The original's import path of :mod:`mindspeed.attention.grid_mask`.

It is the same module, not a copy of its names: users assign their own functions to its attributes.
"""

import sys

from mindspeed.attention import grid_mask

sys.modules[__name__] = grid_mask
