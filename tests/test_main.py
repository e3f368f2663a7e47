"""`python -m jaxpp_async` is the command line."""

from __future__ import annotations

import subprocess
import sys

from jaxpp_async.launch.run_module import command_here


def test_the_program_is_the_command_line():
    command = [*command_here("jaxpp_async.__main__"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "python -m jaxpp_async" in done.stdout and "doctor" in done.stdout
    assert command[0] == sys.executable
