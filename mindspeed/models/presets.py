"""Models by name (``--model llama2-7b``) or by a directory with a ``config.json``.

``presets.yaml`` holds what is in the published models' ``config.json``; it is read by the same
codecs as a real file, so that a preset cannot mean anything else than its model. A preset names
every key that they read, so that no class of transformers has to be imported for it.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindspeed.errors import ConfigError
from mindspeed.models.families import families, family_of_config, origin_of
from mindspeed.models.hf_files import CONFIG, read_config

FILE = Path(__file__).parent / "presets.yaml"


@dataclass(frozen=True)
class Preset:
    """One published model.

    Attributes:
        name: As in ``--model``.
        family: Name of its family.
        config: What its ``config.json`` says.
    """

    name: str
    family: str
    config: Mapping[str, Any]

    @property
    def flags(self) -> dict[str, Any]:
        """Megatron's flags."""
        return families()[self.family].flags(self.config)


@functools.cache
def presets() -> Mapping[str, Preset]:
    """All presets by name: those of ``presets.yaml``, then those of families of plug-ins.

    Raises:
        ConfigError: two presets share a name.
    """
    result = {}
    quick = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a seventh of the time of ours
    for name, config in yaml.load(FILE.read_text("utf-8"), quick).items():
        if not name.startswith("_"):  # a shared part
            result[name] = Preset(name, family_of_config(config).name, config)
    for family in families().values():
        for name, config in family.presets.items():
            if name in result:
                first = origin_of(result[name].family)
                raise ConfigError(
                    f"preset {name!r} is declared twice, by {first} and by {origin_of(family.name)}"
                )
            result[name] = Preset(name, family.name, config)
    return result


def model_flags(model: str) -> dict[str, Any]:
    """Flags of ``--model``.

    Args:
        model: Name of a preset, or a directory with a ``config.json``.

    Raises:
        ConfigError: It is neither; names the closest presets.
    """
    known = presets()
    if model in known:
        return known[model].flags
    if Path(model).is_dir():
        config, where = read_config(model), str(Path(model) / CONFIG)
        return family_of_config(config, where).read(config, where)
    near = difflib.get_close_matches(model, known, n=3, cutoff=0.4)
    hint = f"; closest: {', '.join(near)}" if near else ""
    raise ConfigError(
        f"--model {model}: there is no such preset and no such directory{hint} (mindspeed models "
        "lists the presets)"
    )
