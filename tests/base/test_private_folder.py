"""Direct tests of a folder that only its user can write."""

from __future__ import annotations

import errno
import stat

import pytest

from jaxpp_async.base.private_folder import make_private_folder


@pytest.fixture
def home(tmp_path):
    """A folder that only this user can write; those above it are the system's."""
    tmp_path.chmod(0o700)
    return tmp_path


def test_a_folder_and_those_that_are_missing_above_it_are_made_for_this_user_alone(home):
    make_private_folder(str(home / "a" / "b"))
    assert [stat.S_IMODE((home / name).stat().st_mode) for name in ("a", "a/b")] == [0o700, 0o700]
    make_private_folder(str(home / "a" / "b"))  # it may be there


def test_behind_a_folder_that_nobody_else_can_enter_modes_do_not_matter(home):
    (home / "open").mkdir()
    (home / "open").chmod(0o777)
    make_private_folder(str(home / "open" / "mine"))


@pytest.mark.parametrize("mode", [0o700, 0o755], ids=oct)
@pytest.mark.parametrize("name", ["file", "link"])
def test_a_file_in_the_folders_place_is_an_error_also_where_nobody_else_can_enter(home, mode, name):
    (home / "file").touch()
    (home / "link").symlink_to("file")
    home.chmod(mode)
    with pytest.raises(NotADirectoryError) as caught:
        make_private_folder(str(home / name))
    assert caught.value.filename == str(home / "file")


def test_links_that_lead_in_a_circle_are_an_error_of_the_system(home):
    (home / "a").symlink_to("b")
    (home / "b").symlink_to("a")
    with pytest.raises(OSError) as caught:
        make_private_folder(str(home / "a"))
    assert caught.value.errno == errno.ELOOP
