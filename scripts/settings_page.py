"""Print docs/settings.md, generated from the settings classes."""

from __future__ import annotations

import sys

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from taskline.settings import ENV_PREFIX, Settings

INTRO = """# Settings

Generated from `taskline/settings.py` (`make docs`); do not edit.

Sources, strongest first: command-line options, environment variables, the TOML file (`--config FILE`,
`$TASKLINE_CONFIG`, or `taskline.toml` in the working directory). A variable is named
`TASKLINE_<SECTION>__<NAME>`; in the file a setting is `name = value` under `[section]`. Lists are comma-separated in
variables. An unknown name is refused, with the nearest right one. Every setting is read at start: a change takes a restart.
"""


def render() -> str:
    """The whole page."""
    return INTRO + "".join(_section(name, field) for name, field in Settings.model_fields.items())


def _section(name: str, field: FieldInfo) -> str:
    section = field.annotation
    if not (isinstance(section, type) and issubclass(section, BaseModel)):
        raise TypeError(f"settings section {name} is not a model")
    rows = [
        f"\n## {name}\n\n{section.__doc__}\n\n| setting | variable | default | what |\n| --- | --- | --- | --- |\n"
    ]
    rows += [
        f"| `{setting}` | `{ENV_PREFIX}{name.upper()}__{setting.upper()}` | {_default(info)} | {info.description} |\n"
        for setting, info in section.model_fields.items()
    ]
    return "".join(rows)


def _default(info: FieldInfo) -> str:
    value = info.default
    if value is None or value == "" or isinstance(value, SecretStr):
        return "none"
    return f"`{','.join(map(str, value)) if isinstance(value, tuple) else value}`"


if __name__ == "__main__":
    sys.stdout.write(render())
