"""Direct tests of the lease, and of the codes with which an actor's process ends itself."""

from __future__ import annotations

import pytest

from jaxpp_async.protocol.actor_info import ExitCode
from jaxpp_async.protocol.parent_watch import Lease


@pytest.mark.parametrize(("lease_s", "beat_s"), [(1.0, 0.2), (15.0, 3.0), (600.0, 3.0)])
def test_the_driver_gives_five_signs_of_life_a_lease_but_at_least_one_every_three_seconds(lease_s, beat_s):
    assert Lease(lease_s).beat_s == beat_s


def test_codes_of_our_own_stay_clear_of_those_that_shells_and_signals_take():
    own = set(ExitCode) - {ExitCode.OK, ExitCode.CRASH}
    assert all(79 < code < 126 for code in own)  # 64 to 78: sysexits; 126 and more: shells


def test_last_words_say_how_long_the_silence_was_and_what_makes_it_longer():
    assert Lease(2.5).last_words == (
        "the driver was silent for 2.5 s (lease_s=2.5): it was stopped, or a native call in it holds "
        "Python's GIL; a longer lease_s= of RemoteMesh waits for that"
    )
