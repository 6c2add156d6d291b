"""Docstrings as they are written here, read for the API reference: an extension of Griffe.

A name in `backticks` that leads to something of these packages becomes a link to it, and one that
leads to a module or a class, but no further, is an error. So is a public name without a docstring.
"""

import logging
import re
from collections.abc import Iterator

import griffe

log = logging.getLogger("mkdocs.docstrings")  # what MkDocs counts in strict mode

NAME = re.compile(r"(?<!`)`([A-Za-z]\w*(?:\.[A-Za-z_]\w*)*)`(?!`)")
FILE = re.compile(r"\.(json|npy|py)$")
TABLE = re.compile(r"(?:^\S.*?\S {2,}\S.*(?:\n +\S.*)*(?:\n|\Z))+", re.MULTILINE)

PACKAGES = ("dhisparse_jax", "pallas_kernels")
LOOSE = (
    "dhisparse_jax.cli",  # options have help texts
    "dhisparse_jax.models",  # modules of Flax have the names of their parameters
    "dhisparse_jax.engine.compiled",  # functions under the names of what they compile
    "pallas_kernels",
)
"""Where fields and constants need no docstring."""
STRICT = re.compile(r"pallas_kernels\.\w+\.(api|types)\b")
"""Where they do all the same: the contracts of the kernels."""


class Docstrings(griffe.Extension):
    """Checks and links the docstrings of a package as soon as all of it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """Look at everything in a package that is public."""
        items = list(public(pkg))
        for item in items:
            if item.docstring:
                item.docstring.value = readable(item.docstring.value, item)
        for item in items:
            if item.is_class:
                hand_down(item)
        for item in items:
            if not item.docstring and needs_docstring(item):
                log.warning("%s:%s: %s has no docstring", item.filepath, item.lineno, item.path)


def public(item: griffe.Object) -> Iterator[griffe.Object]:
    """The object, and what is in it under names that do not begin with an underscore."""
    yield item
    for name, member in item.members.items():
        if not member.is_alias and not name.startswith("_"):
            yield from public(member)


def needs_docstring(item: griffe.Object) -> bool:
    """Whether nothing says what it is, and others may use it."""
    if not item.is_attribute:
        return True
    if item.path.startswith(LOOSE) and not STRICT.match(item.path):
        return False
    owner = item.parent
    if owner is None or not owner.is_class:
        return True
    inherited = owner.inherited_members.get(item.name)
    return item.name not in owner.parameters and not (inherited and inherited.docstring)


def hand_down(owner: griffe.Object) -> None:
    """Give what a class says of its attributes to them, which are shown with their types."""
    sections = owner.docstring.parse("google") if owner.docstring else []
    for section in sections:
        if isinstance(section, griffe.DocstringSectionAttributes):
            for field in [field for field in section.value if field.name in owner.members]:
                member = owner.members[field.name]
                member.docstring = griffe.Docstring(field.description, parent=member)
                section.value.remove(field)
    if owner.docstring:
        owner.docstring.parsed = [section for section in sections if section.value]


def readable(text: str, item: griffe.Object) -> str:
    """A docstring in Markdown: with links, and with tables set as they are typed."""
    linked = NAME.sub(lambda found: link(found.group(1), item), text)
    return TABLE.sub(lambda found: f"```text\n{found.group()}\n```\n", linked)


def link(name: str, item: griffe.Object) -> str:
    """The name in backticks, as a link where it is a name of these packages."""
    target = None if FILE.search(name) else target_of(name.split("."), item)
    return f"[`{name}`][{target}]" if target else f"`{name}`"


def target_of(parts: list[str], item: griffe.Object) -> str | None:
    """The path of what a docstring calls by this name; None if that is nothing of ours.

    One word is looked for in the object and its module, which have what it may mean; a name with
    dots also in the packages around, since modules are called by their names there.
    """
    head = parts[0]
    if (item.is_function or item.is_class) and head in item.parameters:
        return None
    if head in PACKAGES:
        return ".".join(parts)  # MkDocs says so if there is no such thing
    scope: griffe.Object | None = item
    while scope is not None:
        if head in scope.members:
            return followed(scope.members[head], parts[1:], item)
        scope = None if len(parts) == 1 and scope.is_module else scope.parent
    return None


def followed(
    found: griffe.Object | griffe.Alias, rest: list[str], item: griffe.Object
) -> str | None:
    """The path of what is reached from an object by the rest of a name."""
    if found.is_alias and not found.target_path.startswith(PACKAGES):
        return None
    try:
        for part in rest:
            if not (found.is_module or found.is_class):
                return None  # a value, whose parts are nobody's names
            found = found.all_members[part]
        found = found.final_target if found.is_alias else found
    except griffe.AliasResolutionError:
        return ".".join([found.target_path, *rest])  # of the package that is loaded later
    except KeyError as missing:
        log.warning("%s:%s: nothing is called %s there", item.filepath, item.lineno, missing)
        return None
    return None if found.name.startswith("_") else found.path
