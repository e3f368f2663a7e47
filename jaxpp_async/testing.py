"""A pytest plugin for tests that run steps, with the fixture `remote_mesh`. Pytest loads the plugin
automatically once this package is installed.

    async def test_trains(remote_mesh):
        mesh = await remote_mesh(2, launcher="inline")
        step = mesh.distributed(train_step)
        state, losses = await mesh.run(step, state, batch)
        assert_close(await losses, expected)

All tests of a session share meshes, since starting actors and compiling take most of the time. The meshes use
one event loop, so tests that use them run on the session's loop: set `asyncio_default_test_loop_scope =
"session"`, or mark the tests `@pytest.mark.asyncio(loop_scope="session")`. The fixture needs
pytest-asyncio; `assert_close` needs neither that nor pytest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from jaxpp_async.mesh import RemoteMesh

GetMesh: TypeAlias = "Callable[..., Awaitable[RemoteMesh]]"


async def _remote_mesh() -> AsyncIterator[GetMesh]:
    """A fixture: `await remote_mesh(num_actors, **options)` in a test returns a running `RemoteMesh`. All
    tests of the session share the mesh, and it is closed at the session's end.

    The options are those of `RemoteMesh`. A mesh that has failed or closed is replaced by a new one.
    """
    meshes: dict[Any, RemoteMesh] = {}
    loop = asyncio.get_running_loop()

    async def get(num_actors: int, **options: Any) -> RemoteMesh:
        from jaxpp_async.mesh import RemoteMesh

        if asyncio.get_running_loop() is not loop:
            __tracebackhide__ = True
            raise RuntimeError(
                "remote_mesh lives on the session's event loop, and this test runs on another; set "
                'asyncio_default_test_loop_scope = "session" in the pytest configuration, or mark the test '
                '`@pytest.mark.asyncio(loop_scope="session")`'
            )
        key = (num_actors, repr(sorted(options.items())))
        if key not in meshes or meshes[key].is_closed:
            meshes[key] = await RemoteMesh(num_actors, **options).__aenter__()
        return meshes[key]

    yield get
    for mesh in meshes.values():
        await mesh.aclose()


def _no_remote_mesh() -> None:
    """Fail, because pytest-asyncio is missing."""
    import pytest

    pytest.fail("the fixture remote_mesh needs pytest-asyncio; install it", pytrace=False)


remote_mesh: Any
if find_spec("pytest_asyncio") is not None:
    import pytest_asyncio

    remote_mesh = pytest_asyncio.fixture(
        _remote_mesh, scope="session", loop_scope="session", name="remote_mesh"
    )
elif find_spec("pytest") is not None:
    import pytest

    remote_mesh = pytest.fixture(_no_remote_mesh, name="remote_mesh")


def assert_close(actual: Any, expected: Any, *, rtol: float = 1e-5, atol: float | None = None) -> None:
    """Check that two trees of arrays are equal within a tolerance, leaf by leaf; the error names the leaves
    that differ (the first five) and says how many there are.

    Args:
        actual, expected: trees of the same structure (`await mesh.fetch(tree)` for remote ones).
        rtol: the tolerance relative to each leaf's largest magnitude, so that a value near zero in a large
            leaf is not compared with its own size.
        atol: an absolute tolerance that is added to the relative one; None for 0.

    Raises:
        AssertionError: structures, shapes, dtypes or values differ.
    """
    __tracebackhide__ = True  # pytest then shows the test's own line
    import jax
    import numpy as np

    named, tree = jax.tree_util.tree_flatten_with_path(expected)
    leaves, actual_tree = jax.tree.flatten(actual)
    if tree != actual_tree:
        raise AssertionError(f"trees differ: {actual_tree} and {tree}")

    def plain(x: Any) -> np.ndarray:
        is_key = hasattr(x, "dtype") and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    wrong: list[str] = []
    for (path, expected_leaf), actual_leaf in zip(named, leaves, strict=True):
        name = jax.tree_util.keystr(path) or "value"
        got, want = plain(actual_leaf), plain(expected_leaf)
        if got.shape != want.shape or got.dtype != want.dtype:
            wrong.append(f"{name}: {got.dtype}{got.shape}, expected {want.dtype}{want.shape}")
            continue
        if not got.size:
            continue
        wide = np.complex128 if np.iscomplexobj(want) else np.float64
        got, want = got.astype(wide), want.astype(wide)
        # Values that are not finite have to be equal, and do not count for the leaf's magnitude.
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        with np.errstate(invalid="ignore"):
            worst = np.where(same, 0.0, np.abs(got - want)).max()
        bound = rtol * np.abs(np.where(np.isfinite(want), want, 0)).max() + (atol or 0.0)
        if not worst <= bound:
            wrong.append(f"{name}: differs by {worst:.3g}, allowed {bound:.3g}")
    if wrong:
        raise AssertionError("\n".join([*wrong[:5], f"{len(wrong)} of {len(leaves)} leaves differ"]))
