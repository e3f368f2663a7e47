"""The command `checkpoint`: list checkpoints, show what is in one, and check that it is whole."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table

from jaxpp_async.base.printable import listed
from jaxpp_async.commands.output import FAILED, errors_printed, progress, terminal_width

if TYPE_CHECKING:
    from jaxpp_async.checkpoint.manifest import Array, Manifest
    from jaxpp_async.checkpoint.stored import StoredCheckpoint

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List checkpoints, show what is in one, and check that it is whole; no mesh is needed.",
)

Folder = Annotated[Path, typer.Argument(help="The checkpoint's folder.", show_default=False)]
_MOST_WRITERS = 3

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def ls(
    folder: Annotated[Path, typer.Argument(help="A folder with checkpoints in it.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """List the checkpoints in a folder, the oldest first.

    \b
    Examples:
      jaxpp-async checkpoint ls checkpoints
    """
    from jaxpp_async.view.table import table_as_text

    with errors_printed("checkpoint ls"):
        from jaxpp_async.checkpoint.stored import checkpoints_in, describe, load_manifest

        names = checkpoints_in(str(folder))[::-1]
        if not names:
            load_manifest(str(folder))  # an error that says what is there instead
            names = ["."]
        found = [describe(str(folder), name) for name in names]
    if as_json:
        typer.echo(json.dumps([_as_plain(each) for each in found], indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("checkpoint", "saved"):
        table.add_column(name, no_wrap=True)
    for name in ("size", "leaves"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found:
        if row.error:
            table.add_row(row.name, row.saved, "cannot be read", "")
        else:
            table.add_row(row.name, row.saved, decimal(row.size_bytes), str(row.num_leaves))
    typer.echo(table_as_text(table, terminal_width()))


@app.command()
def show(folder: Folder, as_json: AsJson = False) -> None:
    """Show each array and value of a checkpoint: its type, its size, and who wrote it.

    \b
    Examples:
      jaxpp-async checkpoint show checkpoints/00000020
    """
    from jaxpp_async.view.table import table_as_text

    with errors_printed("checkpoint show"):
        from jaxpp_async.checkpoint.stored import load_manifest

        manifest = load_manifest(str(folder))
        rows = [
            (path, _type_text(array), _size_bytes(array), _written_by(manifest, array))
            for path, array in manifest.arrays.items()
        ]
    if as_json:
        arrays = [dict(zip(("path", "type", "bytes", "written_by"), row, strict=True)) for row in rows]
        values = {path: str(value) for path, value in manifest.values.items()}
        typer.echo(json.dumps({"arrays": arrays, "values": values}, indent=1))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("leaf")
    table.add_column("type", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("written by")
    for path, kind, size, by in rows:
        table.add_row(path, kind, decimal(size), by)
    for path, value in manifest.values.items():
        table.add_row(path, type(value).__name__, "", repr(value))
    typer.echo(table_as_text(table, terminal_width()))
    typer.echo(f"{len(manifest.paths)} leaves, {decimal(manifest.size_bytes)} in {len(manifest.files)} files")


@app.command()
def verify(folder: Folder) -> None:
    """Read every array of a checkpoint and compare it with its checksum.

    The exit status is 0 if all are whole, or 1 if not.

    \b
    Examples:
      jaxpp-async checkpoint verify checkpoints/00000020
    """
    with errors_printed("checkpoint verify"):
        from jaxpp_async.checkpoint.stored import find_damage, load_manifest

        with progress("reading") as report:
            manifest = load_manifest(str(folder))
            total = len(manifest.arrays)
            damage = find_damage(
                str(folder), manifest, lambda count: report(f"{count} of {total} arrays are read")
            )
    for path, what in damage.items():
        typer.echo(f"{path}: {what}")
    if damage:
        typer.echo(f"{len(damage)} of {total} arrays are damaged")
        raise typer.Exit(FAILED)
    typer.echo(f"{total} arrays are whole, {decimal(manifest.size_bytes)}")


def _as_plain(row: StoredCheckpoint) -> dict[str, Any]:
    plain: dict[str, Any] = {"name": row.name, "saved": row.saved_s}
    return plain | (
        {"error": row.error} if row.error else {"bytes": row.size_bytes, "leaves": row.num_leaves}
    )


def _written_by(manifest: Manifest, array: Array) -> str:
    """Return who wrote an array: of one in pieces, everyone who wrote a piece of it."""
    files = [piece.file for piece in array.pieces] or [array.file]
    writers = list(dict.fromkeys(manifest.files[file].written_by for file in files))
    return listed(writers, _MOST_WRITERS)


def _type_text(array: Array) -> str:
    kind = f"{array.dtype}{list(array.shape)}"
    return kind if array.key_impl is None else f"{kind} ({array.key_impl} key)"


def _size_bytes(array: Array) -> int:
    from jaxpp_async.storage.tensor_files import numpy_dtype

    return prod(array.shape) * numpy_dtype(array.dtype).itemsize
