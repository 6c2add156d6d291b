"""A page for every public module, and an index of them: a hook of MkDocs."""

import os
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PACKAGES = ("dhisparse_jax", "pallas_kernels")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, of packages as they are installed in the folder TREE."""
    tree = Path(os.environ["TREE"])
    loader = griffe.GriffeLoader(search_paths=[tree])
    packages = [loader.load(name, try_relative_path=False) for name in PACKAGES]
    modules = [module for package in packages for module in public_modules(package)]
    index = "".join(
        f"- [`{module.path}`]({module.path}.md): {title(module)}\n" for module in modules
    )
    pages = {"index": f"# Modules\n\n{index}"}
    pages |= {module.path: page(module) for module in modules}
    for name, content in pages.items():
        files.append(File.generated(config, f"{name}.md", content=content))
    return files


def public_modules(module: griffe.Module) -> list[griffe.Module]:
    """The module and those below it, in the order of their names."""
    below = [
        part
        for name, part in sorted(module.modules.items())
        if not part.is_alias and not name.startswith("_")
    ]
    return [module, *(inner for part in below for inner in public_modules(part))]


def title(module: griffe.Module) -> str:
    """The first line of its docstring."""
    return module.docstring.value.splitlines()[0] if module.docstring else ""


def page(module: griffe.Module) -> str:
    """What a module has, and what a package passes on of its modules."""
    passed = [
        f"- [`{name}`][{member.target_path}]\n"
        for name, member in module.members.items()
        if member.is_alias and member.target_path.startswith(PACKAGES)
    ]
    names = f"\n## Names\n\n{''.join(passed)}" if passed and module.is_init_module else ""
    return f"::: {module.path}\n{names}"
