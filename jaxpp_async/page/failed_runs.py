"""Keep the pages of runs that failed as files, so that the cause can be read when nobody has looked.

The files are in a folder of the user's own, to which nobody else has access, since a page has host names,
paths, and the last words of actors.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from jaxpp_async.base.private_folder import make_private_folder
from jaxpp_async.page.document import save_document

MOST_FILES = 20
"""The number of pages that are kept; the oldest is deleted for a further one."""


def default_folder() -> Path:
    """Return the folder of the pages: `~/.local/state/jaxpp_async/failed_runs`, or below `XDG_STATE_HOME`."""
    root = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(root, "jaxpp_async", "failed_runs").absolute()


def keep_page(text: str) -> Path:
    """Write the page of a failed run to a new file, and return its path.

    Args:
        text: the page.

    Raises:
        OSError: the file cannot be written.
        NotPrivateError: another user could write to the folder.
    """
    folder = default_folder()
    make_private_folder(str(folder))
    path = folder / f"run-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{os.getpid()}.html"
    save_document(path, text)
    for old in sorted(folder.glob("run-*.html"))[:-MOST_FILES]:  # their names are in the order of time
        old.unlink(missing_ok=True)
    return path
