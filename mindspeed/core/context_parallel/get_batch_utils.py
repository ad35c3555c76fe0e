"""The original's import path of :mod:`mindspeed.utils`."""

import sys

from mindspeed import utils

sys.modules[__name__] = utils
