"""``MINDSPEED_CONFIG=/path/to/file.yaml``: option values below the command line.

A flat YAML or JSON mapping from option names (``profile_level: level1``) to values.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

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
    path = Path(name)
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{CONFIG_FILE}={name}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{CONFIG_FILE}={name} is no YAML or JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{CONFIG_FILE}={name} must hold a mapping from option names to values")
    return {key.lstrip("-").replace("-", "_"): value for key, value in values.items()}
