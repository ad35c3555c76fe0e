"""The packages of an environment as a bill of materials: CycloneDX JSON, from installed metadata.

    python tools/sbom.py mindspeed > mindspeed.cdx.json

Lists the package, what it requires, what these require, and so on: name, version, licence, package
URL, and who requires whom. Run it with the interpreter of the environment; it needs nothing but
Python. The same environment gives the same file.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Mapping
from importlib.metadata import Distribution, distributions
from typing import Any

LICENSE = "License :: OSI Approved :: "


def canonical(name: str) -> str:
    """The name as package indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required(package: Distribution, installed: Mapping[str, Distribution]) -> list[str]:
    """Installed packages that ``package`` requires, by itself or with an extra."""
    found = set()
    for requirement in package.requires or []:
        match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
        assert match is not None, requirement
        found.add(canonical(match[0]))
    return sorted((found & installed.keys()) - {_name(package)})


def materials(root: str) -> dict[str, Any]:
    """The document for the package ``root`` of this environment."""
    installed: dict[str, Distribution] = {}
    for package in distributions():
        installed.setdefault(_name(package), package)  # the first is the one that is imported
    requires: dict[str, list[str]] = {}
    waiting = [canonical(root)]
    while waiting:
        name = waiting.pop()
        if name not in requires:
            requires[name] = required(installed[name], installed)
            waiting += requires[name]
    names = sorted(requires)
    components = {name: component(installed[name]) for name in names}
    references = {name: components[name]["bom-ref"] for name in names}
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": components.pop(canonical(root))},
        "components": list(components.values()),
        "dependencies": [
            {"ref": references[name], "dependsOn": [references[one] for one in requires[name]]}
            for name in names
        ],
    }
    content = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True))
    return {**document, "serialNumber": content.urn}


def component(package: Distribution) -> dict[str, Any]:
    """One package."""
    name, version = _name(package), package.version
    url = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
    entry: dict[str, Any] = {
        "type": "library",
        "bom-ref": url,
        "name": name,
        "version": version,
        "purl": url,
    }
    metadata = package.metadata
    if summary := metadata.get("Summary"):
        entry["description"] = summary
    if expression := metadata.get("License-Expression"):
        entry["licenses"] = [{"expression": expression}]
    elif names := _licenses(package):
        entry["licenses"] = [{"license": {"name": name}} for name in names]
    return entry


def _licenses(package: Distribution) -> list[str]:
    """Licences by their classifiers, else the first line of the free text."""
    classifiers = package.metadata.get_all("Classifier") or []
    named = [one.removeprefix(LICENSE) for one in classifiers if one.startswith(LICENSE)]
    text = (package.metadata.get("License") or "").strip()
    return named or text.splitlines()[:1]


def _name(package: Distribution) -> str:
    return canonical(package.metadata["Name"])


if __name__ == "__main__":
    print(json.dumps(materials(sys.argv[1]), indent=1))
