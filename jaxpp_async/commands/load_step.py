"""Find a step function and the arguments of a call in a user's module, as `MODULE:STEP` names them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from jaxpp_async.commands.output import ENDS, UseError, did_you_mean

EXAMPLE_ARGUMENTS = "example_arguments"
"""The name that the arguments have in a module if the command line gives no other."""


class LoadedStep(NamedTuple):
    """A step function that was found in a user's module.

    Attributes:
        fn: the step function.
        args: the arguments of a call; an array may be a `jax.ShapeDtypeStruct`.
        module: the module.
    """

    fn: Callable
    args: tuple[Any, ...]
    module: ModuleType


def load_step(text: str, arguments: str = EXAMPLE_ARGUMENTS) -> LoadedStep:
    """Import a module, and return a step function of it with the arguments of a call.

    JAX runs on CPUs unless the environment variable `JAX_PLATFORMS` says otherwise, since no device is needed
    to look at shapes.

    Args:
        text: the module and the step function, such as `"train:train_step"` or `"dir/train.py:train_step"`.
        arguments: the name of the arguments in the module: a tuple, or a function that returns one.

    Raises:
        UseError: the module, the step function or the arguments cannot be found, or the module's code fails.
    """
    name, colon, step = text.rpartition(":")
    if not (name and colon and step.isidentifier()):
        raise UseError(
            f"{text!r} does not name a step; write MODULE:STEP, such as train:train_step or "
            "dir/train.py:train_step"
        )
    use_cpus()
    module = _import_module(name)
    fn = lookup(module, step, "step function")
    if isinstance(fn, type) or not callable(fn):
        what = "a class" if isinstance(fn, type) else _article(type(fn).__name__)
        raise UseError(
            f"{step!r} of module {name!r} is no function but {what}; name the "
            "function that trains for one step, as train_step in `mesh.distributed(train_step)`"
        )
    return LoadedStep(fn, _arguments(module, step, arguments), module)


def use_cpus() -> None:
    """Let JAX use CPUs unless `JAX_PLATFORMS` says otherwise. Call this before JAX is imported."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def lookup(module: ModuleType, name: str, kind: str) -> Any:
    """Return the value of a name in a user's module.

    Args:
        module: the module.
        name: the name.
        kind: text that says what the name stands for, such as `"step function"`.

    Raises:
        UseError: the module has no such name.
    """
    if hasattr(module, name):
        return getattr(module, name)
    public = [each for each in vars(module) if not each.startswith("_")]
    raise UseError(f"module {module.__name__!r} has no {kind} {name!r}{did_you_mean(name, public)}")


# ---------------------------------------------------------------- modules


def _import_module(name: str) -> ModuleType:
    is_file = name.endswith(".py") or os.sep in name
    if not is_file and "" in name.split("."):
        raise UseError(
            f"{name!r} is no name of a module; write it from the top, such as package.module, without a dot "
            "before or behind it, or name a file: package/module.py"
        )
    if is_file and Path(name).is_dir():
        raise UseError(f"{name!r} is a folder; name a file in it, such as {os.path.join(name, 'train.py')}")
    if is_file and not Path(name).is_file():
        folder = Path(name).parent
        there = [str(path) for path in folder.glob("*.py")] if folder.is_dir() else []
        raise UseError(f"there is no file {name!r}{did_you_mean(name, there)}")
    folder = Path(name).parent.resolve() if is_file else Path.cwd()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    # The module sees an empty command line of its own, not the options of this command.
    sys.argv = [str(Path(name).resolve()) if is_file else name]
    try:
        return _run_file(Path(name).resolve()) if is_file else importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not is_file and error.name is not None and f"{name}.".startswith(f"{error.name}."):
            there = [path.stem for path in folder.glob("*.py")]
            raise UseError(
                f"there is no module {name!r}, neither installed nor in {folder}{did_you_mean(name, there)}"
            ) from None
        raise UseError(f"module {name!r} could not be imported") from error
    except ENDS as error:
        raise UseError(
            f"module {name!r} ends Python when it is imported; put what only the script does below "
            '`if __name__ == "__main__":`'
        ) from error
    except Exception as error:  # the user's module may raise anything
        is_relative = is_file and isinstance(error, ImportError) and "relative import" in str(error)
        hint = "; name a module of a package with dots, such as package.module" if is_relative else ""
        raise UseError(f"module {name!r} could not be imported{hint}") from error


def _run_file(path: Path) -> ModuleType:
    """Return the module that a file defines, named like the file unless another module has that name."""
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_of_the_step"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UseError(f"{str(path)!r} is no Python file; its name has to end with .py")
    sys.modules[name] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:  # also Ctrl-C: a module that is half imported is not kept
        del sys.modules[name]
        raise
    return module


# ---------------------------------------------------------------- arguments


def _arguments(module: ModuleType, step: str, name: str) -> tuple[Any, ...]:
    if name == EXAMPLE_ARGUMENTS and not hasattr(module, name):
        raise UseError(
            f"module {module.__name__!r} does not say with which arguments {step!r} is called; add, with "
            "your shapes,\n\n"
            f"def {EXAMPLE_ARGUMENTS}():\n"
            "    batch = jax.ShapeDtypeStruct((num_microbatches, microbatch_size, ...), jnp.float32)\n"
            "    return jax.eval_shape(init, jax.random.key(0)), batch\n\n"
            "or name what returns them: --arguments NAME"
        )
    value = lookup(module, name, "arguments")
    if callable(value):
        try:
            value = value()
        except ENDS as error:
            raise UseError(
                f"{name!r} of module {module.__name__!r} ends Python, by sys.exit or the like; it has to "
                f"return the arguments of a call of {step!r}"
            ) from error
        except Exception as error:  # the user's function may raise anything
            raise UseError(f"{name!r} of module {module.__name__!r} failed") from error
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UseError(
            f"{name!r} of module {module.__name__!r} gives {_article(type(value).__name__)}; it has to be a "
            f"tuple with the arguments of a call of {step!r}, or a function that returns one"
        )
    return tuple(value)


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
