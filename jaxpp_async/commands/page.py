"""The command `page`: make a page of a saved step or plan, and show it in a browser if there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxpp_async.commands.output import UseError, errors_printed, say_written
from jaxpp_async.commands.timeline import load_timeline

if TYPE_CHECKING:
    from jaxpp_async.view import Drawable

_HEAD = 4096
"""The characters at the beginning of a page in which its mark stands."""

_KINDS = (
    "it makes pages of steps (timeline.write(path)) and of plans (plan.save(path)), and opens pages that "
    "mesh.write_page(path) or .to_html(path) wrote"
)


def page(
    file: Annotated[Path, typer.Argument(help="A saved step, a saved plan, or a page.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page to write; default: FILE with .html.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="The number of the step; default: the last of the file.")
    ] = None,
    opens: Annotated[
        bool, typer.Option("--open/--no-open", help="Whether to show the page in a browser.")
    ] = True,
) -> None:
    """Make a page of a file, and show it.

    The file is a step that timeline.write(path) saved, or a plan that plan.save(path) saved. The page is one
    file that loads nothing, to zoom into and to send to others. A page that mesh.write_page(path) wrote is
    shown as it is. Without a browser the command only says where the page is.

    \b
    Examples:
      jaxpp-async page step.json
      jaxpp-async page plan.json --output plan.html --no-open
    """
    with errors_printed("page"):
        text = _read(file)
        if output is not None and output.exists() and output.samefile(file):
            raise UseError(f"--output {output} is the file itself; name another for the page")
        if text.lstrip().startswith("<"):
            _check_page(file, text[:_HEAD])
            if step is not None:
                raise UseError(f"--step {step}: {file} is a page; give the file of the steps")
            path = file if output is None else Path(shutil.copyfile(file, output))
        else:
            drawn = _load(file, text, step)
            path = _default_output(file) if output is None else output
            drawn.to_html(path)
    where = path.absolute().as_uri()
    say_written(path, "a page")
    if opens:
        show_in_browser(where)


# ---------------------------------------------------------------- files


def _read(file: Path) -> str:
    if file.is_dir():
        hint = ""
        if (file / "manifest.json").exists():
            hint = f"; it is a checkpoint: jaxpp-async checkpoint show {file}"
        raise UseError(f"{file} is a folder{hint or f'; {_KINDS}'}")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UseError(f"{file} is no text file, so the command page cannot show it; {_KINDS}") from None


def _check_page(file: Path, head: str) -> None:
    """Check that an HTML file is a page of this package and version.

    Args:
        file: the file.
        head: the beginning of its text.

    Raises:
        UseError: another program wrote the file, or another version of this package.
    """
    from jaxpp_async.view.html import PAGE_VERSION, page_version

    version = page_version(head)
    if version is None:
        raise UseError(f"{file} is no page that jaxpp_async wrote; the command page opens no others")
    if version != PAGE_VERSION:
        raise UseError(
            f"{file} is a page of version {version}, and this version of jaxpp_async knows pages of version "
            f"{PAGE_VERSION}; any browser shows it: {file.absolute().as_uri()}"
        )


def _load(file: Path, text: str, step: int | None) -> Drawable:
    """Return the step or the plan of a file.

    Args:
        file: the file.
        text: its text.
        step: the number of the step; None: the last of the file.

    Raises:
        UseError: the file is of another kind.
        TimelineError, PlanError: the file is damaged or of another version.
    """
    import msgspec

    from jaxpp_async.planning.plan import KIND, Plan

    try:
        found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        kind = msgspec.json.decode(found["kind"]) if "kind" in found else None
    except (msgspec.MsgspecError, RecursionError):
        raise UseError(f"{file} is neither a page nor JSON, or it is damaged; {_KINDS}") from None
    if kind == KIND:
        if step is not None:
            raise UseError(f"--step {step}: {file} is a plan, which has one step")
        return Plan.load(file)
    if "jaxpp_async" in found:
        return load_timeline(file, step)
    if isinstance(kind, str) and kind.startswith("jaxpp_async "):
        raise UseError(f"{file} is a file of kind {kind!r}, of which there is no page; {_KINDS}")
    if "traceEvents" in found:
        raise UseError(f"{file} is a trace of another program; https://ui.perfetto.dev opens it")
    raise UseError(f"{file} is no file that jaxpp_async wrote; {_KINDS}")


def _default_output(file: Path) -> Path:
    """Return the path of the page of a file: beside it, with the suffix .html.

    Raises:
        UseError: another program's file has that name.
    """
    from jaxpp_async.view.html import page_version

    path = file.with_suffix(".html")
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as there:
            if page_version(there.read(_HEAD)) is None:
                raise UseError(f"{path} exists and is no page of jaxpp_async; name another: --output FILE")
    return path


# ---------------------------------------------------------------- browsers


def show_in_browser(address: str) -> bool:
    """Ask the user's browser to show an address, and return at once.

    Nothing is asked where there is only a browser for terminals, which would take this terminal. The
    environment variable `BROWSER` names another browser.

    Args:
        address: the address of the page.

    Returns:
        Whether there is a browser.
    """
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    is_for_terminals = isinstance(browser, webbrowser.GenericBrowser) and not isinstance(
        browser, webbrowser.BackgroundBrowser
    )
    if is_for_terminals and not os.environ.get("BROWSER"):
        return False
    # A process of its own: some browsers end only when the user closes them.
    subprocess.Popen(
        [sys.executable, "-m", "webbrowser", address],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return True
