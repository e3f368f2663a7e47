"""Where the files of a profile may lie, whatever a process reports."""

from __future__ import annotations

import pytest

from jaxpp_async.controller.profiling import _checked_name
from jaxpp_async.errors import MeshError


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", "a\0b"])
def test_a_file_outside_of_the_profile_is_refused(name):
    with pytest.raises(MeshError, match=r"it reports a file .*, outside of its profile"):
        _checked_name(name)


def test_a_file_below_the_profile_is_taken():
    assert _checked_name("plugins/profile/2026/host.xplane.pb") == "plugins/profile/2026/host.xplane.pb"
