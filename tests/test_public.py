"""The public names, and the README's use of them."""

import doctest
import importlib
import inspect
import re
import subprocess
import sys

import pytest

import dhisparse_jax
from tests.support.sources import PACKAGES, ROOT, installed_name, sources

README = (ROOT / "README.md").read_text(encoding="utf-8")

PUBLIC = (
    "dhisparse_jax",
    "dhisparse_jax.plugin",
    "dhisparse_jax.hierarchy",
    "dhisparse_jax.configs",
)


WITH_EXAMPLES = [
    installed_name(path)
    for path in sources(*PACKAGES)
    if ">>> " in (ROOT / path).read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings_give_what_they_show(module: str):
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 0
    assert found.failed == 0


def test_entry_points_have_examples():
    shown = {"config", "engine", "plugin", "sampling", "speculation.accept"}
    assert {f"dhisparse_jax.{name}" for name in shown} <= set(WITH_EXAMPLES)


@pytest.mark.parametrize("package", PUBLIC)
def test_what_a_public_package_passes_on_is_documented(package: str):
    module = importlib.import_module(package)
    names = dhisparse_jax._HOMES if package == "dhisparse_jax" else vars(module)
    things = {name: getattr(module, name) for name in names if not name.startswith("_")}
    things = {
        name: thing
        for name, thing in things.items()
        if inspect.isroutine(thing) or inspect.isclass(thing)
    }
    assert things
    # A dataclass or a named tuple without a docstring gets its signature as one.
    bare = lambda name, thing: (thing.__doc__ or f"{name}(").startswith(f"{name}(")
    assert [name for name, thing in things.items() if bare(name, thing)] == []


def test_every_public_name_imports():
    for name in dhisparse_jax._HOMES:
        assert getattr(dhisparse_jax, name).__name__ == name
    assert {*dhisparse_jax._HOMES, "plugin", "hierarchy"} <= set(dir(dhisparse_jax))


def test_readme_shows_an_example_that_is_tested():
    """Every line of it is in the example, which has its own tests."""
    (block,) = re.findall(r"```python\n(from dhisparse_jax import .*?)```", README, re.DOTALL)
    example = (ROOT / "tests" / "examples" / "linen_gqa.py").read_text(encoding="utf-8")
    lines = {line.strip() for line in example.splitlines()} | {"..."}
    assert [line for line in block.splitlines() if line.strip() not in lines] == []


def test_readme_uses_names_that_exist():
    for module, name in re.findall(r"\b(hierarchy|plugin)\.(\w+)\(", README):
        assert callable(getattr(getattr(dhisparse_jax, module), name)), name


def test_readme_names_files_that_exist():
    for path in re.findall(r"`((?:bench|models|dhisparse_jax|tests)/[\w/.]+)`", README):
        assert (ROOT / path).exists(), path


def test_importing_the_package_does_not_import_jax():
    code = "import sys, dhisparse_jax; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
