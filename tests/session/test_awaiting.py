"""Direct tests of coroutines that say to be awaited."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from jaxpp_async.session.awaiting import UnawaitedCoroutine, says_to_await

ADVICE = "Mesh.run(...) is a coroutine, which has no result yet: write `await` before it"


class Mesh:
    @says_to_await
    async def run(self, x: int, *, y: int = 0) -> int:
        """Add."""
        await asyncio.sleep(0)
        return x + y


@pytest.fixture
def coroutine():
    made = Mesh().run(1)
    yield made
    made.close()


async def test_it_is_awaited_as_any_coroutine_is():
    assert await Mesh().run(1, y=2) == 3
    assert await asyncio.gather(Mesh().run(1), Mesh().run(2)) == [1, 2]
    assert await asyncio.create_task(Mesh().run(5)) == 5
    assert await asyncio.wait_for(Mesh().run(6), 60.0) == 6


def test_it_is_taken_for_a_coroutine(coroutine):
    assert inspect.iscoroutine(coroutine)
    assert asyncio.iscoroutine(coroutine)
    assert type(coroutine) is UnawaitedCoroutine
    assert (coroutine.__name__, coroutine.cr_running) == ("run", False)
    assert repr(coroutine).startswith("<coroutine object Mesh.run at ")


def test_unpacking_and_indexing_say_what_is_missing(coroutine):
    with pytest.raises(TypeError) as unpacked:
        _, _ = coroutine
    with pytest.raises(TypeError) as indexed:
        coroutine[0]
    assert str(unpacked.value) == str(indexed.value) == f"{ADVICE} (`a, b = await ...`)"


def test_an_attribute_of_the_result_says_what_is_missing(coroutine):
    with pytest.raises(AttributeError) as caught:
        _ = coroutine.shape
    assert str(caught.value) == f"{ADVICE} to use its result's 'shape'"
    assert not hasattr(coroutine, "__array__")
    with pytest.raises(AttributeError, match=r"^a coroutine has no attribute '_private'$"):
        _ = coroutine._private


def test_wrong_arguments_are_an_error_at_the_call_and_not_at_the_await():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'z'"):
        Mesh().run(1, z=2)


def test_the_method_keeps_its_name_and_its_words():
    assert (Mesh.run.__name__, Mesh.run.__doc__) == ("run", "Add.")
