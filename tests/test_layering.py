"""Rules about the source text that no linter states: who imports what, and how long things are."""

import ast
import re
import tomllib
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import pytest

from tests.support.sources import PACKAGES, ROOT, installed_name, sources

MAX_FUNCTION_LINES = 60
MAX_MODULE_LINES = 300
MAX_KERNEL_LINES = 500

ALL = sources(*PACKAGES, "bench")


def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def imports(path: Path) -> set[str]:
    """Dotted names that a module imports, with each name that it takes from a package."""
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def importers(prefix: str) -> set[Path]:
    """Modules that import `prefix` or something in it."""
    return {
        path
        for path in ALL
        if any(name == prefix or name.startswith(f"{prefix}.") for name in imports(path))
    }


def test_flax_is_imported_under_models_only():
    assert {path.parts[0] for path in importers("flax")} <= {"models"}


def test_pallas_is_imported_under_pallas_kernels_only():
    assert {path.parts[0] for path in importers("jax.experimental.pallas")} <= {"pallas_kernels"}


def test_models_and_configs_are_imported_by_their_installed_names():
    assert not importers("models") | importers("configs")


@pytest.mark.parametrize("path", ALL, ids=str)
def test_modules_are_short(path: Path):
    lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
    kernel = path.parts[0] == "pallas_kernels"
    assert lines <= (MAX_KERNEL_LINES if kernel else MAX_MODULE_LINES)


@pytest.mark.parametrize("path", ALL, ids=str)
def test_functions_are_short(path: Path):
    lengths = {
        f"{node.name}:{node.lineno}": node.end_lineno - node.lineno + 1
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}


LISTING = r"(?m)^ *([a-z0-9_*]+)(?:\.py|/)? {2,}\S"


@pytest.mark.parametrize(
    "package",
    ["audit", "cli", "engine", "hierarchy", "plugin", "speculation", "pallas_kernels", "bench"],
)
def test_a_package_that_lists_its_modules_lists_all(package: str):
    folder = Path(package) if (ROOT / package).is_dir() else Path("dhisparse_jax", package)
    text = ast.get_docstring(parse(folder / "__init__.py"))
    assert text is not None
    listed = re.findall(LISTING, text)
    modules = {
        path.relative_to(folder).parts[0].removesuffix(".py")
        for path in ALL
        if path.is_relative_to(folder)
    } - {"__init__"}
    assert {name for name in modules if not any(map(partial(fnmatch, name), listed))} == set()


def test_every_package_is_installed():
    """pyproject.toml lists packages by hand, since two folders install under other names."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {installed_name(path) for path in sources(*PACKAGES) if path.name == "__init__.py"}
    assert set(config["tool"]["setuptools"]["packages"]) == folders
