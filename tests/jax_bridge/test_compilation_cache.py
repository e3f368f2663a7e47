"""The compilation cache: what actors of one mesh have compiled, those of the next load, small ones too."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import faults
import jax
import numpy as np
import pytest
from jax._src import compilation_cache
from jax._src.lru_cache import LRUCache
from models import grads_step, mlp
from resources import inspect_actors

import jaxpp_async as jpp
from jaxpp_async.base import private_folder
from jaxpp_async.errors import MeshError
from jaxpp_async.jax_bridge import jax_config
from jaxpp_async.jax_bridge.compilation_cache import DEFAULT, cache_hits, default_folder, make_cache
from jaxpp_async.launch import LocalLauncher

MODEL = mlp(2)


async def test_a_folder_that_cannot_be_is_named():
    said = r"^actor 0 .*: compilation_cache='/proc/x': host .* has no such folder, "
    said += r"and it cannot be made \(No such"
    with pytest.raises(MeshError, match=said):
        async with jpp.RemoteMesh(1, compilation_cache="/proc/x"):
            raise AssertionError("it has started")


async def losses_of_one_step(cache: Path) -> tuple[np.ndarray, Counter[str], int]:
    """On a new mesh: the losses, how often each event of the cache happened, and how many executables there
    were."""
    events: Counter[str] = Counter()
    launcher = LocalLauncher(forward=lambda line: events.update([line.rpartition("/")[2]]))
    options = {"setup": "faults:report_compilations", "env": {"PYTHONPATH": faults.HERE}}
    async with jpp.RemoteMesh(2, launcher=launcher, compilation_cache=str(cache), **options) as mesh:
        step = mesh.distributed(grads_step(MODEL, jpp.Std1F1B(2)), donate_argnums=0)
        _, _, losses = await mesh.run(step, MODEL.init(0), MODEL.batch(0, 4))
        numbers = await inspect_actors(mesh._running())
        return await losses, events, sum(n["compilations"] for n in numbers.values())


async def test_a_second_mesh_compiles_nothing(tmp_path):
    cache = tmp_path / "new" / "folder"
    first, events, executables = await losses_of_one_step(cache)
    files = sorted(os.listdir(cache))
    assert events["cache_misses"] >= executables > 4
    second, events, _ = await losses_of_one_step(cache)
    assert events["cache_misses"] == 0
    assert events["cache_hits"] == events["compile_requests_use_cache"] >= executables
    assert sorted(f for f in os.listdir(cache) if not f.endswith("-atime")) == [
        f for f in files if not f.endswith("-atime")
    ]
    np.testing.assert_array_equal(first, second)


async def test_inline_actors_use_it_until_their_mesh_closes(tmp_path, monkeypatch):
    names = list(jax_config.cache_settings(""))
    own = {name: getattr(jax.config, name) for name in names}
    loaded, get = list[str](), LRUCache.get
    monkeypatch.setattr(
        LRUCache,
        "get",
        lambda self, key: (found := get(self, key)) and (loaded.append(str(self.path)), found)[1],
    )

    async def compile_a_step() -> None:
        async with jpp.RemoteMesh(2, launcher="inline", compilation_cache=str(tmp_path / "mesh")) as mesh:
            await mesh.distributed(grads_step(MODEL, jpp.Std1F1B(2))).compile(
                MODEL.init(0), MODEL.batch(0, 4)
            )

    def files() -> list[str]:
        return sorted(path.name for path in (tmp_path / "mesh").glob("*-cache"))

    try:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
        jax.jit(lambda x: x + 1)(1)  # JAX has decided that it has none
        before = {name: getattr(jax.config, name) for name in names}
        await compile_a_step()
        assert len(kept := files()) > 4 and {name: getattr(jax.config, name) for name in names} == before
        jax.jit(lambda x: x + 2)(1)
        assert files() == kept and not loaded, "behind the mesh nothing is kept"
        await compile_a_step()
        assert files() == kept and loaded == [str(tmp_path / "mesh")] * len(loaded) and len(loaded) > 4
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
        compilation_cache.reset_cache()
        await compile_a_step()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own") and list(
            (tmp_path / "own").iterdir()
        )
        assert files() == kept
    finally:
        for name, value in own.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture
def home(monkeypatch) -> Iterator[Path]:
    """Not below pytest's own folder, which nobody else gets into anyway."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setenv("HOME", f"{folder}/home")
        (path := Path(folder, "home")).mkdir(mode=0o755)
        yield path


def test_the_default_is_a_folder_of_this_host_in_the_users_cache_and_nobody_elses(home, monkeypatch):
    folder = Path(make_cache(DEFAULT))
    assert (
        home / ".cache" / "jaxpp_async" / socket.gethostname() == folder.parent
        and jax.__version__ in folder.name
    )
    made = (folder, *folder.parents[:3])
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 4
    assert make_cache(DEFAULT) == str(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "other"))
    assert home / "other" in Path(make_cache(DEFAULT)).parents
    assert jpp.RemoteMesh(1)._options.actors.cache_dir == DEFAULT
    assert jpp.RemoteMesh(1, compilation_cache=None)._options.actors.cache_dir is None


def test_a_named_folder_may_be_shared(home, tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert make_cache(str(shared)) == str(shared)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(shared))
    assert make_cache(DEFAULT) == str(shared) and not (home / ".cache").exists()


def open_to_others(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o777)


def behind_a_link(home: Path, mode: int) -> None:
    """The user's cache folder is elsewhere, below a folder of this mode."""
    (home.parent / "scratch" / "me").mkdir(parents=True)
    (home / ".cache").symlink_to(home.parent / "scratch" / "me")
    (home.parent / "scratch").chmod(mode)


REFUSED = {
    "the folder": lambda home: open_to_others(Path(default_folder())),
    "one above it": lambda home: open_to_others(home / ".cache" / "jaxpp_async"),
    "the home": lambda home: home.chmod(0o757),
    "where a link leads": lambda home: behind_a_link(home, 0o777),
    "itself, though sticky": lambda home: (open_to_others(p := Path(default_folder())), p.chmod(0o1777)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_default_is_refused_where_others_can_write(home, what):
    REFUSED[what](home)
    with pytest.raises(
        MeshError, match=r"the compilation cache .* can write (.*); `chmod go-w \1` .* may be shared"
    ):
        make_cache(DEFAULT)


TAKEN = {
    "a sticky folder above": lambda home: home.parent.chmod(0o1777),
    "a link": lambda home: behind_a_link(home, 0o755),
    "modes that nobody gets to": lambda home: (open_to_others(home / ".cache"), home.chmod(0o700)),
}


@pytest.mark.parametrize("what", TAKEN)
def test_the_default_is_taken_where_nobody_else_can_write(home, what):
    TAKEN[what](home)
    assert make_cache(DEFAULT) == default_folder()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to other users: needs root")
@pytest.mark.parametrize("what", ["folder", "link"])
def test_the_default_is_refused_where_another_user_owns_it(home, what):
    if what == "folder":
        Path(default_folder()).mkdir(parents=True)
        os.chown(default_folder(), 12345, -1)
    else:
        behind_a_link(home, 0o755)
        os.chown(home / ".cache", 12345, -1, follow_symlinks=False)
    with pytest.raises(MeshError, match=r"belongs to the user 12345"):
        make_cache(DEFAULT)


@pytest.mark.parametrize(
    ("name", "members", "others", "is_taken"),
    [
        ("me", [], [], True),
        ("me", ["me"], [], True),
        ("me", ["you"], [], False),
        ("me", [], ["you"], False),
        ("users", [], [], False),
    ],
)
def test_a_group_of_the_users_own_may_write(home, monkeypatch, name, members, others, is_taken):
    """Where each user has one, folders are made so (umask 002): those of an older version were, in every
    home."""
    gid = os.getegid() or 12345
    os.chown(home, -1, gid)
    home.chmod(0o775)
    users = [SimpleNamespace(pw_name=user, pw_gid=gid) for user in ("me", *others)]
    monkeypatch.setattr(pwd, "getpwall", lambda: users)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: users[0])
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=name, gr_mem=members))
    if is_taken:
        assert make_cache(DEFAULT) == default_folder()
    else:
        with pytest.raises(MeshError, match="other users can write"):
            make_cache(DEFAULT)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to root's group: needs root")
def test_roots_group_may_write_and_one_without_a_name_may_not(home, monkeypatch):
    """Homes in containers that run under any number are root's, for root's group to write."""
    home.chmod(0o775)
    assert make_cache(DEFAULT) == default_folder()
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name="root", gr_mem=["root", "you"]))
    with pytest.raises(MeshError, match="other users can write"):
        make_cache(DEFAULT)
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(home))
    os.chown(home, -1, 12345)
    with pytest.raises(MeshError, match="other users can write"):
        make_cache(DEFAULT)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to other users: needs root")
def test_root_may_have_another_number(home, monkeypatch):
    """In a container without rights, nobody seems to own the root folder and /home."""
    os.chown(home.parent, 65534, -1)
    with pytest.raises(MeshError, match=f"{home.parent} belongs to the user 65534"):
        make_cache(DEFAULT)
    monkeypatch.setattr(private_folder, "_root_uid", lambda: 65534)
    assert make_cache(DEFAULT) == default_folder()


async def test_an_actor_says_that_its_cache_is_refused(home):
    home.chmod(0o777)
    with pytest.raises(MeshError, match=r"^actor 0 .*: the compilation cache .* other users can write"):
        async with jpp.RemoteMesh(1):
            raise AssertionError("it has started")


def test_an_entry_is_never_seen_half_written(tmp_path, monkeypatch):
    """Actors that compile one program at once share the folder, and one of them may be killed meanwhile."""
    jax_config.write_cache_whole()
    writer, reader = (LRUCache(str(tmp_path), max_size=-1) for _ in range(2))
    entry = bytes(1 << 20)
    path_type = type(writer.path)
    write_bytes = path_type.write_bytes
    seen = []

    def torn(self, data):
        write_bytes(self, data[: len(data) // 2])
        seen.append(reader.get("key"))
        if len(seen) == 1:
            raise OSError("killed here")
        return write_bytes(self, data)

    monkeypatch.setattr(path_type, "write_bytes", torn)
    with pytest.raises(OSError, match="killed here"):
        writer.put("key", entry)
    assert seen == [None] and reader.get("key") is None
    writer.put("key", entry)
    assert seen == [None, None] and reader.get("key") == entry
    assert [path.name for path in tmp_path.iterdir()] == ["key-cache"]


def test_who_compiles_knows_whether_the_cache_had_it():
    """The suite's own cache is used; the number makes the program one that it has not yet."""
    odd = float.fromhex(os.urandom(6).hex())

    def compile_it():
        with cache_hits() as hits, cache_hits() as inner:
            jax.jit(lambda x: x * 2 + odd).lower(1.0).compile()
        assert hits == []  # of the inner context alone
        return len(inner)

    assert compile_it() == 0
    assert compile_it() == 1
