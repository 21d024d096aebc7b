"""The folders, the package list and the type-checker's links agree."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
SUBPACKAGES = ("api", "infra", "processors", "producers", "schemas", "state", "workers")


def packages_on_disk() -> dict[str, str]:
    found = {}
    for top in ("taskline", *SUBPACKAGES):
        for marker in (ROOT / top).rglob("__init__.py"):
            folder = marker.parent.relative_to(ROOT)
            dotted = ".".join(folder.parts)
            found[dotted if top == "taskline" else f"taskline.{dotted}"] = str(folder)
    return found


def test_every_package_is_listed_for_the_wheel() -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages_on_disk())


def test_package_dirs_point_at_the_folders() -> None:
    mapped = SETUPTOOLS["package-dir"]
    for package, folder in packages_on_disk().items():
        # taskline.testing follows from taskline itself.
        assert mapped.get(package, package.replace(".", "/")) == folder


@pytest.mark.parametrize("top", SUBPACKAGES)
def test_type_checkers_see_each_folder(top: str) -> None:
    assert (ROOT / ".typing" / "taskline" / top).resolve() == ROOT / top


def test_type_checkers_see_each_module_of_the_public_face() -> None:
    own = {
        path.name
        for path in (ROOT / "taskline").iterdir()
        if path.suffix == ".py" or path.name in ("client", "testing")
    }
    linked = (
        {path.name for path in (ROOT / ".typing" / "taskline").iterdir()} - set(SUBPACKAGES) - {"py.typed"}
    )
    assert linked == own


def test_package_data_reaches_the_wheel() -> None:
    patterns = SETUPTOOLS["package-data"]["*"]
    for folder in packages_on_disk().values():
        for path in (ROOT / folder).iterdir():
            if path.is_file() and path.suffix != ".py":
                assert any(path.match(pattern) for pattern in patterns), f"{path} is in no wheel"
