"""The original's import path of the settings of CoC, read when the feature is attached.

    from mindspeed.core.tensor_parallel.lcal_coc.user_config import coc_cfgs
    coc_cfgs["customized_coc"] = {"[16384, 5120, 1920]": 8, "[16384, 1920, 5120]": 1}

:mod:`mindspeed.tensor_parallel.coc_settings` says what they mean.
"""

from mindspeed.tensor_parallel.coc_settings import coc_cfgs

__all__ = ["coc_cfgs"]
