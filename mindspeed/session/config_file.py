"""``MINDSPEED_CONFIG=/path/to/file.yaml``: option values below the command line.

A flat YAML or JSON mapping from option names (``profile_level: level1``) to values.
"""

from __future__ import annotations

import os
from typing import Any

from mindspeed.errors import ConfigError

CONFIG_FILE = "MINDSPEED_CONFIG"


def read_config_file() -> dict[str, Any]:
    """The values of the file named by ``MINDSPEED_CONFIG``, or nothing.

    Raises:
        ConfigError: the file is missing or no mapping.
    """
    name = os.environ.get(CONFIG_FILE)
    if not name:
        return {}
    from mindspeed.parsing import read_yaml  # loads the YAML package, rarely needed here

    values = read_yaml(name, f"{CONFIG_FILE}={name}")
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{CONFIG_FILE}={name} must hold a mapping from option names to values")
    return {key.lstrip("-").replace("-", "_"): value for key, value in values.items()}
