"""The examples of docs/testing.md are run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "testing.md"
EXAMPLE = re.compile(r"<!-- example: (\S+) -->\n```python\n(.*?)```", re.DOTALL)


def test_the_examples_of_the_page_pass(tmp_path):
    examples = dict(EXAMPLE.findall(PAGE.read_text(encoding="utf-8")))
    assert set(examples) == {"airports.py", "test_airports.py", "test_cancelling.py"}
    for name, text in examples.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{sum(text.count('def test_') for text in examples.values())} passed" in done.stdout
