"""The API reference fails on what it is to fail on; that it builds is a step of .ci/run."""

import os
import subprocess
import sys

import pytest

from tests.support.sources import ROOT

FAULTY = '''
"""A module."""


class Thing:
    """A class.

    Attributes:
        size: said here.
        name: and here.
    """

    size: int
    name: str
    unsaid: str


def bare():
    pass


def fine(thing: object) -> None:
    """Look at a `thing`, a `Thing`, `Thing.size`, `config.json` and `dhisparse_jax`.

    Args:
        thing: what to look at.
    """


def vague():
    """See `Thing.gone` and `dhisparse_jax.nowhere`."""


def malformed(thing):
    """Do something.

    Args:
        a thing to look at
        other: which is not an argument.
    """
'''

WARNINGS = (
    "dhisparse_jax.Thing.unsaid has no docstring",
    "dhisparse_jax.bare has no docstring",
    "nothing is called 'gone' there",
    "Could not find cross-reference target 'dhisparse_jax.nowhere'",
    "Failed to get 'name: description' pair from 'a thing to look at'",
    "No type or annotation for parameter 'other'",
    "Parameter 'other' does not appear in the function signature",
)


def test_faults_in_docstrings_end_the_build(tmp_path):
    pytest.importorskip("mkdocstrings_handlers.python", reason="the docs extra")
    for name, text in (("dhisparse_jax", FAULTY.strip()), ("pallas_kernels", '"""Kernels."""')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"{text}\n", encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    built = subprocess.run(
        [*command, "--config-file", ROOT / ".ci" / "mkdocs.yml"],
        env=os.environ | {"TREE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    warnings = [line for line in built.stderr.splitlines() if line.startswith("WARNING")]
    missing = [text for text in WARNINGS if not any(text in line for line in warnings)]
    assert (built.returncode, missing) == (1, []), built.stderr
    assert len(warnings) == len(WARNINGS), built.stderr
