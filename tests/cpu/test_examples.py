"""The examples run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_none_is_forgotten() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == set(NAMES)


NAMES = ["quickstart", "stream", "compare_speculation", "custom_proposer", "acceptance"]


@pytest.mark.parametrize("name", NAMES)
def test_example(name: str, tiny_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), str(tiny_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
