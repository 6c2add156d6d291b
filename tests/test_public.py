"""The public names, and the README's use of them."""

import re
import subprocess
import sys
from pathlib import Path

import dhisparse_jax

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_every_public_name_imports():
    for name in dhisparse_jax._HOMES:
        assert getattr(dhisparse_jax, name).__name__ == name


def test_readme_shows_an_example_that_is_tested():
    """Every line of it is in the example, which has its own tests."""
    (block,) = re.findall(r"```python\n(from dhisparse_jax import .*?)```", README, re.DOTALL)
    example = (Path(__file__).parent / "examples" / "linen_gqa.py").read_text(encoding="utf-8")
    lines = {line.strip() for line in example.splitlines()} | {"..."}
    assert [line for line in block.splitlines() if line.strip() not in lines] == []


def test_readme_uses_names_that_exist():
    for module, name in re.findall(r"\b(hierarchy|plugin)\.(\w+)\(", README):
        assert callable(getattr(getattr(dhisparse_jax, module), name)), name


def test_readme_names_files_that_exist():
    root = Path(__file__).parents[1]
    for path in re.findall(r"`((?:bench|models|dhisparse_jax|tests)/[\w/.]+)`", README):
        assert (root / path).exists(), path


def test_importing_the_package_does_not_import_jax():
    code = "import sys, dhisparse_jax; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
