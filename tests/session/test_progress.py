"""What a mesh tells of itself: a line on a terminal, else log records, or nothing; and how that ends."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from paths import ROOT
from rich.console import Console

import jaxpp_async as jpp
from jaxpp_async.errors import MeshError
from jaxpp_async.session import progress as progress_module
from jaxpp_async.session.progress import MeshProgress, choose_mode


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def open_terminal(monkeypatch):
    """A function to be called in the test itself: pytest replaces the streams between fixture and test."""

    def open_it():
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        return stream

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("JAXPP_ASYNC_PROGRESS", raising=False)
    return open_it


def told(caplog):
    return [re.sub(r"in \d+\.\d s", "in T", record.getMessage()) for record in caplog.records]


def test_a_terminal_gets_a_line_and_everything_else_records(open_terminal, monkeypatch):
    open_terminal()
    assert choose_mode(None) == choose_mode(True) == "line" and choose_mode(False) == "silent"
    monkeypatch.setenv("TERM", "dumb")
    assert choose_mode(None) == choose_mode(True) == "records"
    monkeypatch.setenv("TERM", "xterm")
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        assert choose_mode(None) == choose_mode(True) == "records"


def test_the_environment_decides_where_the_option_does_not(open_terminal, monkeypatch):
    open_terminal()
    monkeypatch.setenv("JAXPP_ASYNC_PROGRESS", "0")
    assert (choose_mode(None), choose_mode(True)) == ("silent", "line")
    monkeypatch.setenv("JAXPP_ASYNC_PROGRESS", "1")
    assert (choose_mode(None), choose_mode(False)) == ("line", "silent")
    monkeypatch.setenv("JAXPP_ASYNC_PROGRESS", "yes")
    with pytest.raises(MeshError, match="JAXPP_ASYNC_PROGRESS is 'yes'; set it to 0 for silence, to 1"):
        choose_mode(None)
    with pytest.raises(MeshError, match="progress is 'on'; give True, False, or None"):
        jpp.RemoteMesh(1, progress="on")  # type: ignore[arg-type]


def test_a_terminal_that_shows_records_gets_no_line_besides(open_terminal, monkeypatch):
    terminal = open_terminal()
    logger, handler = logging.getLogger("jaxpp_async"), logging.StreamHandler(terminal)
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()
    assert (choose_mode(None), choose_mode(True)) == ("records", "line")
    handler.setLevel(logging.WARNING)
    assert choose_mode(None) == "line"
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(io.StringIO())])
    assert choose_mode(None) == "line"


def test_records_say_what_begins_how_far_it_is_and_what_came_of_it(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "jaxpp_async")
    progress = MeshProgress("records")
    with progress.phase("compiling step") as phase:
        phase.update("1 of 3")
        phase.update("2 of 3", is_news=True)
        monkeypatch.setattr(progress_module, "RECORD_EVERY_S", 0.0)
        phase.update("3 of 3")
    with pytest.raises(KeyError), progress.phase("restoring"):
        raise KeyError
    assert told(caplog) == [
        "compiling step",
        "compiling step: 2 of 3",
        "compiling step: 3 of 3",
        "compiling step: 3 of 3, in T",
        "restoring",
    ]


def test_silence(caplog, open_terminal):
    terminal = open_terminal()
    caplog.set_level(logging.DEBUG, "jaxpp_async")
    with MeshProgress("silent").phase("compiling") as phase:
        phase.update("1 of 3", is_news=True)
    assert told(caplog) == [] and terminal.getvalue() == ""


def test_the_line_is_of_the_latest_phase_and_leaves_what_took_long(open_terminal, caplog, monkeypatch):
    terminal = open_terminal()
    caplog.set_level(logging.INFO, "jaxpp_async")
    monkeypatch.setattr(progress_module, "LONG_S", 0.0)
    progress = MeshProgress("line")
    outer = progress.begin("saving [bold]x[/bold]")
    with progress.phase("compiling") as phase:
        phase.update("1 of 3")
        progress._live.refresh()  # type: ignore[union-attr]
    background = progress.begin("saving y", in_background=True)
    progress._live.refresh()  # type: ignore[union-attr]
    print("of the user")
    progress.end(background)
    progress.end(outer)
    progress.end(outer)
    shown = terminal.getvalue()
    assert told(caplog) == [] and progress._live is None
    assert shown.index("compiling: 1 of 3") < shown.index("compiling: 1 of 3, in 0.")
    assert shown.count("saving [bold]x[/bold], in 0.") == 1 and "saving y" not in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is there again
    assert sys.stdout.getvalue() == "of the user\n"  # type: ignore[attr-defined]  # it is no terminal


def test_the_close_of_the_mesh_ends_every_phase(open_terminal):
    terminal = open_terminal()
    progress = MeshProgress("line")
    phases = [progress.begin("one"), progress.begin("two")]
    progress.close()
    assert progress._live is None and sys.stderr is terminal
    for phase in phases:
        progress.end(phase, is_done=False)
    assert terminal.getvalue().count("one, in") == 0


def test_a_terminal_that_is_gone_does_not_end_training(open_terminal, monkeypatch):
    terminal = open_terminal()

    def write(text):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(terminal, "write", write)
    progress = MeshProgress("line")
    with progress.phase("compiling") as phase:
        phase.update("1 of 3")
    assert progress._live is None


async def test_a_mesh_tells_of_everything_that_steps_wait_for(caplog, tmp_path, monkeypatch):
    monkeypatch.delenv("JAXPP_ASYNC_PROGRESS", raising=False)
    caplog.set_level(logging.INFO, "jaxpp_async")
    async with jpp.RemoteMesh(1, launcher="inline", compilation_cache=str(tmp_path / "cache")) as mesh:
        for _ in range(2):
            step = mesh.distributed(lambda x: (x * 2, x + 1), name="double")
            for _ in range(3):
                result, _ = await mesh.run(step, 1.0)
        await mesh.save(tmp_path / "checkpoint", {"x": result})
        await (await mesh.save(tmp_path / "checkpoint", {"x": result}, wait=False))
        await mesh.restore(tmp_path / "checkpoint", {"x": result})
    said = told(caplog)
    assert [text for text in said if text.startswith("launching")][-1].startswith(
        "launching: 1 actor is ready on"
    )
    done = [text for text in said if "compiling double: " in text]
    form = r"compiling double: no loop, 1 of 1 executables are compiled \(1 (by XLA|from the cache)\), in T"
    assert re.fullmatch(form, done[0])
    assert said.count("first step of double, in T") == 2
    assert sum(text.startswith("saving") and text.endswith("MiB, in T") for text in said) == 2
    assert said[-1] == f"restoring {tmp_path / 'checkpoint'}, in T"


SCRIPT = """
import asyncio, sys
import jax.numpy as jnp
import jaxpp_async as jpp

async def main():
    async with jpp.RemoteMesh(1, compilation_cache=None) as mesh:
        print("a print of the user's")
        await mesh.run(mesh.distributed(lambda x: x + 1, name="add"), jnp.ones(2))
        if sys.argv[1] == "fail":
            raise KeyError("of the user")
        if sys.argv[1] == "wait":
            with mesh._progress.phase("something long"):
                await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("way", ["end", "fail", "wait"])
def test_a_real_terminal_is_left_as_it_was(tmp_path, way):
    """With Ctrl-C in the middle of a phase, too."""
    (tmp_path / "script.py").write_text(SCRIPT)
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    env["PYTHON_COLORS"] = "0"
    env.pop("JAXPP_ASYNC_PROGRESS", None)
    command = [sys.executable, str(tmp_path / "script.py"), way]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=tmp_path)
    os.close(theirs)
    shown, until, is_interrupted = b"", time.monotonic() + 100, False
    try:
        while time.monotonic() < until:
            try:
                data = os.read(ours, 4096)
            except OSError:  # the terminal has no other end any more
                break
            if not data:
                break
            shown += data
            if b"something long" in shown and not is_interrupted:
                is_interrupted = True
                process.send_signal(signal.SIGINT)
        code = process.wait(20)
    finally:
        process.kill()
        os.close(ours)
    text = shown.decode()
    assert code == {"end": 0, "fail": 1, "wait": 1 if code == 1 else -signal.SIGINT}[way], text
    assert "launching" in text
    assert re.search(r"(\n|\x1b\[2K)(\x1b\[\?25h)?a print of the user's", text), text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    if way != "end":
        assert text.index("KeyError: 'of the user'" if way == "fail" else "KeyboardInterrupt") > text.rindex(
            "\x1b[?25h"
        )


def test_a_long_line_is_shortened_and_commands_nothing(open_terminal):
    terminal = open_terminal()
    progress = MeshProgress("line")
    with progress.phase("compiling \x1b]0;pwned\x07" + 40 * "a long name ") as phase:
        phase.update("3 of 4")
        out = io.StringIO()
        Console(file=out, width=60).print(progress_module._Line([phase]))
    (line,) = out.getvalue().splitlines()
    assert len(line) <= 60 and "compiling \\x1b]0;pwned\\x07a long" in line and line.rstrip().endswith("0 s")
    assert "\x1b]0" not in terminal.getvalue()
