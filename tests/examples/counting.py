"""How much of an example is about the hierarchy."""

from pathlib import Path


def hierarchy_lines(path: Path) -> int:
    """Lines with code between `# -- hierarchy` and the `# --` after it."""
    count, inside = 0, False
    for line in map(str.strip, path.read_text(encoding="utf-8").splitlines()):
        if line in ("# -- hierarchy", "# --"):
            inside = line == "# -- hierarchy"
        elif inside and line:
            count += 1
    return count
