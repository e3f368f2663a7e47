"""Make folders to which only their owner can write, for files that this package trusts as much as its own
code.

A folder is judged as sshd judges `~/.ssh` (StrictModes): by the permissions of the folder itself and of every
folder above it, including the folders that symbolic links lead through, since a user who can write to one of
these folders can put another folder in the place of the private one. As with Debian's sshd, a group may have
write permission if it has no other member, because systems where each user has a group of his own create such
folders (umask 002).
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections import deque

_MOST_LINKS = 40
_GROUP_OR_OTHERS_ENTER = 0o011


class NotPrivateError(Exception):
    """A folder that has to be private is not: another user has permission to write to it or to replace it.
    The message names the folder and says what to do.
    """


def make_private_folder(folder: str) -> None:
    """Create a folder to which only this user can write, and its missing parents, with mode 0700. Check also
    that the folders on its path that exist already are private.

    Args:
        folder: an absolute path.

    Raises:
        NotPrivateError: a user who is neither this user nor root could write to the folder or replace it.
        OSError: the folder cannot be created.
    """
    missing: list[str] = []
    above = folder
    while not os.path.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    for path in reversed(missing):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            # Another process, of any user, has created it meanwhile; `_check_path` checks it.
            continue
    _check_path(folder)


def _check_path(folder: str) -> None:
    """Check that no other user can write to or replace any folder on the path from the root folder to
    `folder`. Symbolic links are followed as the kernel follows them.

    Raises:
        NotPrivateError: another user could write to or replace one of these folders.
        OSError: there are too many links, or a part of the path is missing or is not a folder.
    """
    left, here, num_links = deque(folder.strip("/").split("/")), "/", 0
    is_hidden = False  # others cannot enter a folder above, so that modes below do not matter
    while left:
        path = os.path.normpath(os.path.join(here, left.popleft()))
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            num_links += 1
            if num_links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), folder)
            if not _is_trusted(found.st_uid) and not is_hidden:
                raise NotPrivateError(f"the link {path} belongs to {_user(found)}; remove it")
            target = os.readlink(path)
            here = "/" if target.startswith("/") else here
            left.extendleft(reversed(target.strip("/").split("/")))
            is_hidden = False
            continue
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if not is_hidden:
            _check_folder(path, found, is_last=not left)
        is_hidden = path.startswith(here) and (is_hidden or not found.st_mode & _GROUP_OR_OTHERS_ENTER)
        here = path


def _check_folder(path: str, found: os.stat_result, *, is_last: bool) -> None:
    if not _is_trusted(found.st_uid):
        raise NotPrivateError(f"{path} belongs to {_user(found)}, who can put anything in its place")
    # With the sticky bit, as in /tmp, only the owner of an entry can replace it. The owner of the next folder
    # on the way is checked when the walk comes to that folder.
    is_sticky = found.st_mode & stat.S_ISVTX and not is_last
    is_open = found.st_mode & stat.S_IWOTH or (
        found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)
    )
    if is_open and not is_sticky:
        raise NotPrivateError(
            f"other users can write {path}; `chmod go-w {path}` if what lies there can be trusted"
        )


def _is_trusted(uid: int) -> bool:
    return uid in (0, os.geteuid(), _root_uid())


def _root_uid() -> int:
    """Return the user id of root, taken from the owner of the root folder: in a container without privileges,
    root has another id than 0.
    """
    return os.stat("/").st_uid


def _is_own_group(gid: int) -> bool:
    """Return whether this process's user is the only member of a group, so that the group may have write
    permission.

    The group must also have the user's name, because a directory service may not list all users whose primary
    group this is. Root's group is treated differently: the result is whether the group lists no member
    besides root. Users whose primary group is root's group are ignored there, since they are system accounts.
    """
    try:
        group = grp.getgrgid(gid)
        if gid == 0:
            return {*group.gr_mem} <= {"root"}
        user = pwd.getpwuid(os.geteuid())
    except KeyError:  # the group or the user has no name
        return False
    members = {*group.gr_mem, *(one.pw_name for one in pwd.getpwall() if one.pw_gid == gid)}
    return (group.gr_name, gid) == (user.pw_name, user.pw_gid) and members <= {user.pw_name}


def _user(found: os.stat_result) -> str:
    return f"the user {found.st_uid}"
