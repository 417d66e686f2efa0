"""The house stays easy to see: short files, documented names, few dependencies."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import clipwise as cw

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_files_are_short_and_say_what_they_are(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    assert ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize("name", cw.__all__)
def test_public_names_are_documented(name):
    assert getattr(cw, name).__doc__


def test_importing_is_light():
    heavy = "[name for name in ('numpy.random', 'scipy', 'dp_accounting', 'torch._dynamo') if name in sys.modules]"
    code = f"import torch, sys; before = set(sys.modules); import clipwise; print([n for n in {heavy} if n not in before])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
