"""Whose line an error names: the user's, also where an installed package calls what the user wrote."""

from __future__ import annotations

import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp_async as jpp
from jaxpp_async.errors import StageError
from jaxpp_async.jax_bridge import tracebacks

LIBRARY = sysconfig.get_path("purelib") + "/solver/search.py"
SCRIPT = sysconfig.get_path("scripts") + "/train"


def of_a_library(source: str):
    """The function `call` of a package that is installed."""
    names: dict = {"jpp": jpp, "jnp": jnp}
    exec(compile(source, LIBRARY, "exec"), names)
    return names["call"]


def test_an_equation_of_a_library_is_of_the_users_line():
    call = of_a_library("def call(f, x):\n    return jnp.sin(f(x))\n")
    closed = jax.make_jaxpr(lambda x: call(jnp.cos, x))(1.0)
    line = test_an_equation_of_a_library_is_of_the_users_line.__code__.co_firstlineno + 2
    assert [tracebacks.source_line(eqn) for eqn in closed.eqns] == [f"{__file__}:{line}"] * 2


def test_a_mistake_that_a_library_makes_for_the_user_is_of_the_users_line():
    call = of_a_library("def call(tree):\n    return jpp.pipeline_yield(tree)\n")
    with pytest.raises(
        StageError, match=r"^\S*jax_bridge/test_origins.py:\d+: pipeline_yield got no floating value"
    ):
        call(np.arange(3))


def test_an_error_is_of_the_users_innermost_line():
    call = of_a_library("def call(f):\n    f()\n    raise ValueError('no')\n")
    with pytest.raises(ValueError, match="no") as caught:
        call(lambda: None)
    assert tracebacks.error_line(caught.value) == f"{__file__}:{caught.traceback[0].lineno + 1}"


@pytest.mark.parametrize(
    ("frames", "found"),
    [
        ([LIBRARY, "/home/me/train.py", "/home/me/main.py"], "/home/me/train.py:1"),
        ([LIBRARY, "<frozen runpy>", SCRIPT], f"{LIBRARY}:0"),
        (["<stdin>", LIBRARY], "<stdin>:0"),
        (["/usr/lib/python3/dist-packages/solver.py", "/tmp/ipykernel_1/23.py"], "/tmp/ipykernel_1/23.py:1"),
        ([], "unknown line"),
    ],
    ids=["a library within", "all of it installed", "typed in", "a notebook", "nobody"],
)
def test_the_line_of_what_is_not_installed_wins(frames, found):
    assert tracebacks._innermost((name, lambda k=k: k) for k, name in enumerate(frames)) == found
