"""Perform rounds of the fuzzer from a seed, and count what has happened.

A seed also decides for all of its rounds on which event loop they run, and how soon offers are overwritten
and forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import uvloop
from resources import held, num_blocks_mapped
from traffic import Round, draw_round
from trio import Broken, Trio

from jaxpp_async.errors import TransferError
from jaxpp_async.transport.ucx import offers


def round_of(seed: int, number: int) -> Round:
    """A seed's rounds, by number from 0."""
    return draw_round(random.Random(f"{seed}/{number}"))


def perform(seed: int, numbers: Iterable[int], tell: Callable[[int, Counter[str]], object]) -> Counter[str]:
    """Perform rounds on three transports, which are made for them and closed after them.

    Args:
        seed: of the rounds and of their data. numbers: which rounds, asked for one by one.
        tell: called before each round with its number and the tally so far.

    Returns:
        What has happened, by name.

    Raises:
        Broken: what was wrong, and in which round.
    """
    loop_of = uvloop.new_event_loop if seed & 2 else asyncio.new_event_loop
    with (
        _few_offers() if seed & 1 else contextlib.nullcontext(),
        asyncio.Runner(loop_factory=loop_of) as runner,
    ):
        return runner.run(_perform(seed, numbers, tell))


async def _perform(
    seed: int, numbers: Iterable[int], tell: Callable[[int, Counter[str]], object]
) -> Counter[str]:
    trio = Trio(seed)
    try:
        for number in numbers:
            tell(number, trio.tally)
            try:
                await trio.perform(round_of(seed, number))
            except Broken as error:
                raise Broken(f"seed {seed}, round {number}: {error}") from error
    except BaseException:  # also a Ctrl-C: transports hold processes' memory until they are closed
        with contextlib.suppress(TransferError):  # that something is still held may be what was wrong
            await trio.aclose()
        raise
    await trio.aclose()
    return trio.tally


@contextlib.contextmanager
def _few_offers() -> Iterator[None]:
    """A ring and a memory so small that offers are overwritten and forgotten all the time: constants of
    `offers`."""
    with mock.patch.multiple(offers, _ROWS=8, MOST_HELD=3):
        yield


def all_held() -> dict[str, Any]:
    """What this process has, that no transport may leave behind: `resources.held`, and mapped memory of
    peers."""

    async def of_a_loop() -> dict[str, Any]:
        return held()

    return {**asyncio.run(of_a_loop()), "mapped": num_blocks_mapped()}
