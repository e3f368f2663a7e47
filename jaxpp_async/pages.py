"""pages: where a page of docs/ is to be read, for messages that name one. In: its name. Out: its path, or whose it is.

The pages are in the repository and are not installed, so a project of one's own has none beside it. Reads no page.
"""

from __future__ import annotations

from pathlib import Path

from jaxpp_async.extras import source_here


def page(name: str) -> str:
    """Its path in the folder that this package came from; else its place in the repository.

    Args:
        name: as `restarts.md`.
    """
    path = Path(source_here().removeprefix("-e "), "docs", name)
    return str(path) if path.is_absolute() and path.is_file() else f"docs/{name} in jaxpp-async's repository"
