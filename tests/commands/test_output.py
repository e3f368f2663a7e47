"""How commands end: errors with their exit status, the user's frames alone, and lines that fit."""

from __future__ import annotations

import subprocess
import sys

import jax.numpy as jnp
import pytest
import typer

from jaxpp_async.commands import output
from jaxpp_async.commands.output import (
    FAILED,
    WRONG_USE,
    UseError,
    did_you_mean,
    errors_printed,
    progress,
    wrap,
)
from jaxpp_async.errors import PlanError


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (UseError("write it so"), WRONG_USE, "plan: write it so\n"),
        (PlanError("nothing fits"), FAILED, "plan: nothing fits\n"),
        (
            FileNotFoundError(2, "No such file or directory", "x.json"),
            WRONG_USE,
            "plan: x.json: No such file",
        ),
    ],
)
def test_an_error_is_a_line_and_an_exit_status(error, status, says, capsys):
    with pytest.raises(typer.Exit) as stopped, errors_printed("plan"):
        raise error
    assert stopped.value.exit_code == status
    printed = capsys.readouterr()
    assert printed.err.startswith(says) and printed.out == "" and "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (SystemExit(0), "sys.exit(0)"),
        (SystemExit(), "sys.exit(None)"),
        (SystemExit("text"), "sys.exit('text')"),
        (typer.Exit(0), "Exit"),
        (typer.Abort(), "Abort"),
    ],
)
def test_a_step_that_ends_python_is_an_error(error, how, capsys):
    def of_the_user():
        raise error

    with pytest.raises(typer.Exit) as stopped, errors_printed("plan"):
        of_the_user()
    printed = capsys.readouterr().err
    assert stopped.value.exit_code == FAILED and "in of_the_user" in printed
    assert f"plan: the code of the step ends Python: {how}; a step has to return" in printed


NOISY = """
import atexit, os, subprocess, sys
from jaxpp_async.commands.output import result_stream
print("before")
with result_stream() as result:
    os.write(1, b"written\\n")
    subprocess.run([sys.executable, "-c", "print('of a process')"], check=True)
    print("printed")
    atexit.register(os.write, 1, b"at exit\\n")
    atexit.register(print, "printed at exit")
    print("the result", file=result)
os.write(1, b"behind\\n")
"""


def run_noisy(more: str = "") -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", f'exec "$0" -c "$1" {more}', sys.executable, NOISY.replace("\\\\", "\\")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_standard_output_has_the_result_alone():
    done = run_noisy()
    assert (done.returncode, done.stdout) == (0, "before\nthe result\n"), done.stderr
    for text in ("written", "of a process", "printed", "at exit", "printed at exit", "behind"):
        assert f"{text}\n" in done.stderr


def test_streams_may_be_closed():
    done = run_noisy("2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "before\nthe result\n", "")
    assert run_noisy("1>&-").stdout == ""


def test_an_error_of_the_users_code_is_printed_with_the_users_frames(capsys):
    def of_the_user():
        raise ZeroDivisionError("mine")

    with pytest.raises(typer.Exit) as stopped, errors_printed("plan"):
        of_the_user()
    printed = capsys.readouterr().err
    assert stopped.value.exit_code == FAILED
    assert "in of_the_user" in printed and "mine" in printed and "commands/output.py" not in printed


def test_frames_of_jax_below_the_users_last_one_are_left_out(capsys):
    def of_the_user():
        return jnp.dot(jnp.ones((3, 4)), jnp.ones((5, 6)))

    with pytest.raises(typer.Exit), errors_printed("plan"):
        of_the_user()
    printed = capsys.readouterr().err
    assert "in of_the_user" in printed and "TypeError" in printed
    assert "jax/" not in printed and "JAX" not in printed


def test_a_cause_is_printed_before_the_error(capsys):
    with pytest.raises(typer.Exit), errors_printed("plan"):
        raise UseError("module 'm' could not be imported") from NameError("name 'x' is not defined")
    printed = capsys.readouterr().err
    assert printed.splitlines()[0] == "NameError: name 'x' is not defined"
    assert printed.endswith("plan: module 'm' could not be imported\n")


def test_long_lines_break_between_words_and_are_indented():
    text = "short\n  a line of some 1,234,567 words\n\nend"
    assert wrap(text, 20) == "short\n  a line of some\n    1,234,567 words\n\nend"
    assert wrap("x" * 30, 20) == "x" * 30


def test_names_that_are_spelled_nearly_alike_are_named():
    assert did_you_mean("std1f1b", ["Std1F1B", "GPipe"]) == "; did you mean Std1F1B?"
    assert did_you_mean("other", ["Std1F1B", "GPipe"]) == ""


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_for_terminals_and_the_standard_output_for_results(is_terminal, capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    with progress("importing [red]") as report:
        report("planning [/]")
        print("the module prints")
    printed = capsys.readouterr()
    assert printed.out == "" and "the module prints\n" in printed.err
    assert ("planning [/]" in printed.err) == is_terminal


def test_a_line_of_progress_is_printed_from_time_to_time_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(output, "LOG_INTERVAL_S", 1e-3)
    with progress("importing") as report:
        report("planning [/]")
        printed = ""
        while "s: planning [/]\n" not in printed:
            printed += capsys.readouterr().err
    assert capsys.readouterr().out == ""


def test_progress_ends_where_the_command_is_to_end(capsys):
    interrupts = []

    def check():
        if interrupts:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), progress("importing", check) as report:
        report("planning")
        interrupts.append(1)
        report("searching")
        raise AssertionError("the command goes on")
