"""Files of the `vega_datasets` package: the examples' real input."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def data_set(name: str) -> Path:
    """A file inside the installed package (which itself would import pandas)."""
    spec = importlib.util.find_spec("vega_datasets")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the example needs its input: pip install 'taskline[examples]'")
    return Path(spec.submodule_search_locations[0]) / "_data" / name
