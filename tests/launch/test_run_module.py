"""Direct tests of how the package's own programs are started."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from jaxpp_async.launch import run_module
from jaxpp_async.launch.run_module import command_here, command_there, inherited_environment, script_folder


def test_every_interpreter_is_told_to_leave_the_working_directory_out_of_its_path():
    assert command_here("jaxpp_async.__main__", "doctor")[:2] == [sys.executable, "-P"]
    assert command_here("jaxpp_async.__main__", "doctor")[-2:] == ["jaxpp_async.__main__", "doctor"]
    there = command_there("/opt/python", "jaxpp_async.__main__", "doctor")
    assert (there[:2], there[-3:]) == (["/opt/python", "-P"], ["-m", "jaxpp_async.__main__", "doctor"])


@pytest.mark.parametrize(("ignores", "kept"), [(True, {"OTHER"}), (False, {"OTHER", "PYTHONFOO"})])
def test_what_this_process_ignores_of_its_environment_others_do_not_get(monkeypatch, ignores, kept):
    monkeypatch.setattr(os, "environ", {"PYTHONFOO": "1", "OTHER": "2"})
    monkeypatch.setattr(sys, "flags", SimpleNamespace(ignore_environment=ignores, no_user_site=1))
    assert set(inherited_environment()) == kept
    there = command_there("py", "m")
    assert there == (["py", "-P", "-s", "-E", "-m", "m"] if ignores else ["py", "-P", "-s", "-m", "m"])


def main_module(monkeypatch, file: str | None, package: str | None = None) -> None:
    main = ModuleType("__main__")
    if file is not None:
        main.__file__ = file
    main.__spec__ = None if package is None else SimpleNamespace(name=package)
    monkeypatch.setitem(sys.modules, "__main__", main)


def test_the_folder_of_a_module_is_that_of_its_outermost_package(monkeypatch, tmp_path):
    folder = os.fsencode(os.path.realpath(tmp_path))
    main_module(monkeypatch, str(tmp_path / "train.py"))
    assert script_folder() == folder
    main_module(monkeypatch, str(tmp_path / "own" / "tools" / "train.py"), "own.tools.train")
    assert script_folder() == folder


@pytest.mark.parametrize("is_safe", [False, True])
def test_without_a_script_it_is_the_working_directory_unless_told_otherwise(monkeypatch, tmp_path, is_safe):
    main_module(monkeypatch, None)
    monkeypatch.setattr(sys, "flags", SimpleNamespace(safe_path=is_safe))
    monkeypatch.chdir(tmp_path)
    assert script_folder() == (None if is_safe else os.getcwdb())


def test_a_module_runs_as_main_with_its_arguments_and_the_import_path_as_it_was(
    monkeypatch, capsys, tmp_path
):
    (tmp_path / "shown.py").write_text("import sys; print(__name__, sys.argv[1:], sys.path[0])")
    path = [str(tmp_path), *sys.path]
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.setattr(sys, "argv", [run_module.__file__, "shown", "word"])
    monkeypatch.setitem(sys.modules, "jaxpp_async", sys.modules["jaxpp_async"])  # put back behind the test
    run_module.main()
    assert capsys.readouterr().out == f"__main__ ['word'] {tmp_path}\n"
    assert sys.path == path


def test_a_module_of_this_very_package_is_run_from_anywhere(tmp_path):
    command = command_here("jaxpp_async.base.printable")
    ended = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
