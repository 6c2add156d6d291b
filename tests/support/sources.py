"""Where the source text is, and what it installs as."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

# Folder -> the package that it installs as.
PACKAGES = {
    "dhisparse_jax": "dhisparse_jax",
    "models": "dhisparse_jax.models",
    "configs": "dhisparse_jax.configs",
    "pallas_kernels": "pallas_kernels",
}


def sources(*folders: str) -> list[Path]:
    """Modules under the folders, as paths from the root."""
    return sorted(
        path.relative_to(ROOT) for name in folders for path in (ROOT / name).rglob("*.py")
    )


def installed_name(path: Path) -> str:
    """The name of the module, or of the package, in a source file."""
    folder, *rest = path.with_suffix("").parts
    return ".".join([PACKAGES[folder], *rest]).removesuffix(".__init__")
