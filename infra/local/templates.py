"""The files shipped with this package: poms, configuration templates, logging set-ups."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from string import Template

from taskline.infra.local.errors import InvalidStackConfig

_ASCII_END = 0x80


def shipped(name: str) -> str:
    """Read a shipped file, for example `kafka-pom.xml`."""
    return (resources.files("taskline.infra.local") / name).read_text(encoding="utf-8")


def maven_property(pom: str, name: str) -> str:
    """Read one of a pom's properties, for example `kafka.version`.

    Raises:
        ValueError: The pom does not define it.
    """
    match = re.search(rf"<{re.escape(name)}>([^<]+)</{re.escape(name)}>", pom)
    if match is None:
        raise ValueError(f"the pom has no property {name}")
    return match.group(1).strip()


def render(
    template: str, values: Mapping[str, object], *, overrides: Mapping[str, str], separator: str
) -> str:
    """Fill in a template, then set top-level keys by hand: a key's line is replaced, or appended if there is none.

    Args:
        template: Lines of `key<separator>value` with `${name}` place-holders.
        values: What each place-holder stands for.
        overrides: Keys to set to other values; each value must fit its line.
        separator: `=` for properties, `: ` for YAML.

    Raises:
        InvalidStackConfig: An override spans lines.
        KeyError: A place-holder has no value.
    """
    lines = Template(template).substitute({key: str(value) for key, value in values.items()}).splitlines()
    for key, value in overrides.items():
        line = f"{key}{separator}{value}"
        if len(line.splitlines()) != 1:
            raise InvalidStackConfig(f"the override of {key!r} must be one line, got {value!r}")
        places = [index for index, old in enumerate(lines) if old.startswith(f"{key}{separator.strip()}")]
        if places:
            lines[places[0]] = line
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def escape_property(value: str) -> str:
    """Write a value so that Java's Properties reads it back unchanged (backslashes, characters beyond ASCII)."""
    units = value.replace("\\", "\\\\").encode("utf-16-be")
    codes = [int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2)]
    return "".join(chr(code) if code < _ASCII_END else f"\\u{code:04x}" for code in codes)
