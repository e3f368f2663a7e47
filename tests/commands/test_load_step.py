"""A step and its arguments are found in a user's module, and what is wrong with the module is said."""

from __future__ import annotations

import sys

import pytest
from user_folder import process_restored

from jaxpp_async.commands.load_step import load_step, lookup
from jaxpp_async.commands.output import UseError

GOOD = """
import helper
def train_step(state, batch): return state
def example_arguments(): return 1, helper.batch
other = [3]
number = 4
class Model: pass
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A user's folder, which is the working directory; what is imported from it is forgotten at the end."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("batch = 2\n")
    (tmp_path / "training.py").write_text(GOOD)
    (tmp_path / "package").mkdir()
    (tmp_path / "d.py").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "steps.py").write_text("from training import *\n")
    with process_restored(tmp_path):
        yield tmp_path


@pytest.mark.parametrize("module", ["training", "training.py", "./training.py", "package.steps"])
def test_a_module_is_a_dotted_name_or_a_file(module, folder):
    loaded = load_step(f"{module}:train_step")
    assert loaded.fn(5, 6) == 5 and loaded.args == (1, 2)


def test_a_file_finds_its_neighbours_from_any_folder(folder, monkeypatch):
    monkeypatch.chdir("/")
    assert load_step(f"{folder}/training.py:train_step").args == (1, 2)


def test_a_file_may_have_the_name_of_another_module(folder):
    (folder / "json.py").write_text(GOOD)
    import json

    assert load_step("json.py:train_step").module is not json
    assert sys.modules["json"] is json


def test_arguments_may_be_a_sequence_of_another_name():
    assert load_step("training:train_step", "other").args == (3,)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ("training", "'training' does not name a step; write MODULE:STEP, such as train:train_step"),
        ("training:", "'training:' does not name a step"),
        ("trainin:f", "there is no module 'trainin', neither installed nor in .*; did you mean training?"),
        ("package.step:f", "there is no module 'package.step'"),
        ("trainin.py:f", "there is no file 'trainin.py'; did you mean training.py?"),
        ("none/f.py:f", "there is no file 'none/f.py'$"),
        ("training:trainstep", "'training' has no step function 'trainstep'; did you mean train_step?"),
        (
            "training:number",
            "'number' of module 'training' is no function but an int; name the function that",
        ),
        ("helper:__name__", "is no function but a str"),
        ("training:Model", "'Model' of module 'training' is no function but a class; name the function"),
        ("d.py:f", "'d.py' is a folder; name a file in it, such as d.py/train.py"),
        ("package/:f", "'package/' is a folder; name a file in it"),
        (".training:f", "'.training' is no name of a module; write it from the top, such as package.module"),
        ("package.:f", "'package.' is no name of a module"),
        ("package..steps:f", "'package..steps' is no name of a module"),
    ],
)
def test_a_step_that_is_not_there(step, says):
    with pytest.raises(UseError, match=says):
        load_step(step)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("exmple_arguments", "no arguments 'exmple_arguments'; did you mean example_arguments?"),
        ("number", "'number' of module 'training' gives an int; it has to be a tuple with the arguments"),
    ],
)
def test_arguments_that_are_none(arguments, says):
    with pytest.raises(UseError, match=says):
        load_step("training:train_step", arguments)


def test_a_module_without_arguments_is_shown_the_lines_to_write(folder):
    (folder / "bare.py").write_text("def train_step(): pass\n")
    with pytest.raises(UseError) as error:
        load_step("bare:train_step")
    code = str(error.value).split("\n\n")[1]
    names: dict = {}
    exec(
        "import jax, jax.numpy as jnp\ninit, num_microbatches, microbatch_size = lambda k: 0.0, 4, 2\n", names
    )
    exec(code.replace("...", "8"), names)
    state, batch = names["example_arguments"]()
    assert state.shape == () and batch.shape == (4, 2, 8)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import nonesuch", ModuleNotFoundError),
        ("1 / 0", ZeroDivisionError),
        ("def f(:", SyntaxError),
        ("import sys; sys.exit(3)", SystemExit),
    ],
)
@pytest.mark.parametrize("module", ["failing", "failing.py"])
def test_a_module_that_fails_is_the_cause_of_the_error(text, cause, module, folder):
    (folder / "failing.py").write_text(text)
    with pytest.raises(UseError, match="module 'failing") as error:
        load_step(f"{module}:f")
    assert isinstance(error.value.__cause__, cause)
    assert "failing" not in sys.modules


def test_a_file_of_a_package_is_named_with_dots(folder):
    (folder / "package" / "relative.py").write_text("from . import steps\nfrom .steps import *\n")
    assert load_step("package.relative:train_step").args == (1, 2)
    with pytest.raises(UseError, match="name a module of a package with dots"):
        load_step("package/relative.py:train_step")


def test_arguments_that_fail_are_the_cause_of_the_error(folder):
    (folder / "failing.py").write_text("def train_step(): pass\ndef example_arguments(): return 1 / 0\n")
    with pytest.raises(UseError, match="'example_arguments' of module 'failing' failed") as error:
        load_step("failing:train_step")
    assert isinstance(error.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("end", ["sys.exit(0)", "exit()", "raise typer.Exit(0)", "raise typer.Abort"])
def test_arguments_that_end_python_are_an_error(end, folder):
    (folder / "ending.py").write_text(
        f"import sys, typer\ndef train_step(): pass\ndef example_arguments(): {end}\n"
    )
    with pytest.raises(UseError, match="'example_arguments' of module 'ending' ends Python") as error:
        load_step("ending:train_step")
    assert error.value.__cause__ is not None


def test_a_name_of_a_module():
    assert lookup(load_step("training:train_step").module, "number", "shardings") == 4


def test_a_module_that_reads_its_command_line_sees_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "import argparse, sys\nargparse.ArgumentParser().parse_args()\nline = sys.argv\n"
    (tmp_path / "reads.py").write_text(
        text + "def step():\n    pass\ndef example_arguments():\n    return ()\n"
    )
    with process_restored(tmp_path):
        monkeypatch.setattr("sys.argv", ["jaxpp-async", "plan", "reads.py:step", "--actors", "2"])
        assert load_step("reads.py:step").module.line == [str(tmp_path / "reads.py")]
