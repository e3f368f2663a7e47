"""The page of a real mesh, whose actors live in this process."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import re
import socket
import weakref

import pytest
from http_client import get, with_path
from uneven_model import arguments, uneven_step

import jaxpp_async as jpp
from jaxpp_async.errors import InstallError, MeshError, PageError
from jaxpp_async.page.answers import QUESTIONS
from jaxpp_async.page.run_page import RunPage
from jaxpp_async.page.sections import SECTIONS

has_aiohttp = pytest.importorskip("aiohttp", reason="the extra 'page' is not installed")
assert RunPage


def inline(**options):
    return jpp.RemoteMesh(2, launcher="inline", **options)


def train_step():
    return uneven_step(1, 1, jpp.Std1F1B(2))


async def train(mesh, num_steps=3):
    step, (params, batch) = mesh.distributed(train_step()), arguments(1, 1)
    for number in range(num_steps):
        params, losses = await mesh.run(step, params, batch)
        mesh.log(number, {"loss": float((await losses).mean())})
    return params


def text_of(html: str, answer: str) -> str:
    found = re.search(rf'data-answer="{answer}"[^>]*>(.*?)</dd>', html)
    assert found, answer
    return re.sub(r"<[^>]+>", "", found[1])


async def test_the_live_page_shows_the_run_and_ends_with_the_mesh():
    mesh = inline(page=True)
    assert mesh.page_url is None
    async with mesh:
        url = mesh.page_url
        assert url is not None and url in mesh._repr_html_().replace("&amp;", "&")
        await train(mesh)
        reply = await get(url)
        assert reply.status == 200
        for question in QUESTIONS:
            assert text_of(reply.body, question.id)
        assert text_of(reply.body, "step").startswith("step 2 ")
        assert text_of(reply.body, "alive") == "yes all 2 actors are ready" or "2 actors" in reply.body
        assert text_of(reply.body, "logged").startswith("loss ")
        metrics = await get(url, with_path(url, "metrics"))
        assert 'jaxpp_steps_total{name="train_step"} 3.0' in metrics.body
        bill = mesh.last_step_timeline().bill
        assert f"jaxpp_bubble_ratio {bill.schedule_s / bill.total_s}\n" in metrics.body
    assert mesh.page_url is None
    with pytest.raises(OSError):
        await get(url)


async def test_a_browser_gets_what_has_changed_and_the_end():
    async with inline(page=True) as mesh:
        url, version = mesh.page_url, jpp.__version__
        await train(mesh, 1)
        first = json.loads((await get(url, with_path(url, "state", seen=0, version=version))).body)
        assert {"title", "grid", "answers-state"} <= set(first["sections"]) and not first["over"]
        asking = asyncio.create_task(get(url, with_path(url, "state", seen=first["seen"], version=version)))
        await asyncio.sleep(0.05)
    last = json.loads((await asking).body)
    assert last["over"] and "closed" in last["sections"]["title"]


async def test_the_file_is_the_same_page_also_without_a_live_one(tmp_path):
    mesh = inline()
    mesh.write_page(tmp_path / "before.html")
    async with mesh:
        await train(mesh)
        mesh.write_page(tmp_path / "during.html")
    mesh.write_page(tmp_path / "after.html")
    before, during, after = (
        (tmp_path / f"{name}.html").read_text() for name in ("before", "during", "after")
    )
    assert text_of(before, "step") == "not known yet no step has ended"
    assert text_of(during, "step") == text_of(after, "step")
    assert text_of(after, "stopped").startswith("it was closed")
    assert "<script" not in after and "loss" in after
    assert text_of(during, "memory").startswith("actor ") and "on each device" in text_of(during, "memory")


async def test_an_error_of_the_users_own_is_why_the_run_stopped(tmp_path):
    mesh = inline()
    with pytest.raises(ZeroDivisionError):
        async with mesh:
            await train(mesh, 1)
            print(1 / 0)
    mesh.write_page(tmp_path / "run.html")
    assert text_of((tmp_path / "run.html").read_text(), "stopped").startswith(
        "ZeroDivisionError: division by zero"
    )


async def test_a_tab_of_an_earlier_run_gets_all_sections(monkeypatch):
    monkeypatch.setenv("JAXPP_PAGE_TOKEN", "a-token-of-both-runs")
    async with inline(page=True) as mesh:
        await train(mesh, 1)
        url, version = mesh.page_url, jpp.__version__
        earlier = re.search(r'data-run="(\w+)"', (await get(url)).body)
    async with inline(page=True) as mesh:
        url = mesh.page_url
        run = re.search(r'data-run="(\w+)"', (await get(url)).body)
        assert earlier and run and earlier[1] != run[1]
        asked = with_path(url, "state", seen=1, run=earlier[1], version=version)
        state = json.loads((await get(url, asked)).body)
        assert state["run"] == run[1] and set(state["sections"]) == {section.id for section in SECTIONS}


async def test_a_second_start_that_succeeds_clears_the_failure_of_the_first():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        mesh = inline(page=taken.getsockname()[1])
        with pytest.raises(PageError):
            await mesh.start()
    try:
        await mesh.start()
        page = (await get(mesh.page_url)).body
        assert '<span class="status running">' in page and "Why it stopped</h2>" not in page
        metrics = (await get(mesh.page_url, with_path(mesh.page_url, "metrics"))).body
        assert "jaxpp_up 1.0" in metrics
    finally:
        await mesh.aclose()


async def test_of_two_starts_at_once_the_second_is_refused():
    mesh = inline(page=True)
    first, second = await asyncio.gather(mesh.start(), mesh.start(), return_exceptions=True)
    try:
        assert first is mesh and isinstance(second, MeshError) and "being started already" in str(second)
    finally:
        url = mesh.page_url
        await mesh.aclose()
    with pytest.raises(OSError):
        await get(url)


@pytest.mark.parametrize(
    ("error", "status", "answer"),
    [
        (SystemExit(0), "closed", "it was closed"),
        (SystemExit(), "closed", "it was closed"),
        (asyncio.CancelledError(), "cancelled", "it was cancelled"),
        (KeyboardInterrupt(), "cancelled", "it was cancelled"),
        (SystemExit(3), "failed", "SystemExit: 3"),
    ],
)
async def test_ways_to_end_a_run_that_are_no_failures(error, status, answer, tmp_path):
    mesh = inline()
    with pytest.raises(type(error)):
        async with mesh:
            raise error
    mesh.write_page(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert f'<span class="status {status}">' in page and text_of(page, "stopped").startswith(answer)
    assert ("Why it stopped</h2>" in page) == (status == "failed")


async def fail(error: BaseException, **options) -> None:
    """Train a step, and leave the mesh with an error."""
    with pytest.raises(type(error)):
        async with inline(**options) as mesh:
            await train(mesh, 1)
            raise error


async def test_a_run_that_failed_leaves_its_page(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    await fail(ZeroDivisionError("no samples"), page=True)
    (kept,) = (tmp_path / "jaxpp_async" / "failed_runs").iterdir()
    assert text_of(kept.read_text(), "stopped").startswith("ZeroDivisionError: no samples")
    assert text_of(kept.read_text(), "memory").startswith("actor ") and "<script" not in kept.read_text()
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    (told,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert told.levelname == "ERROR" and told.getMessage() == f"the run has failed; its page is {kept}"


async def test_a_page_that_cannot_be_kept_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    await fail(ZeroDivisionError("no samples"), page=True)
    (told,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert told.getMessage().startswith("the page of the failed run could not be kept: ")


async def test_no_page_is_kept_of_a_run_that_was_interrupted_closed_or_has_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    await fail(asyncio.CancelledError(), page=True)
    await fail(ZeroDivisionError("no samples"))
    async with inline(page=True) as mesh:
        await train(mesh, 1)
    assert list(tmp_path.iterdir()) == []


async def test_a_mesh_that_does_not_start_leaves_no_server(tmp_path):
    mesh = jpp.RemoteMesh(1, page=True, setup="no_such_module:function", launch_timeout_s=60)
    with pytest.raises(InstallError):
        async with mesh:
            pass
    assert mesh.page_url is None
    mesh.write_page(tmp_path / "run.html")
    assert "no_such_module" in (tmp_path / "run.html").read_text()


async def test_a_port_that_is_taken_starts_nothing():
    async with inline(page=True) as first:
        port = int(first.page_url.split(":")[2].partition("/")[0])
        second = inline(page=port)
        with pytest.raises(PageError, match="another program listens"):
            async with second:
                pass
        assert second.is_closed
    async with inline(page=port) as third:
        assert f":{port}/" in third.page_url


def test_wrong_options_and_missing_packages_are_named(monkeypatch):
    for wrong in ("yes", 0, 70000, 80.5, -1):
        with pytest.raises(MeshError, match="give True for any free port"):
            inline(page=wrong)
    monkeypatch.setattr("jaxpp_async.page.server.find_spec", lambda name: None)
    with pytest.raises(InstallError, match="page=8471 needs aiohttp"):
        inline(page=8471)
    inline()


async def test_a_mesh_with_a_page_that_is_dropped_still_ends():
    mesh = await inline(page=True).start()
    url, gone = mesh.page_url, weakref.ref(mesh)
    controller = mesh._controller
    del mesh
    gc.collect()
    assert gone() is None
    async with asyncio.timeout(20):
        await controller.aclose()
        while True:
            try:
                await get(url)
            except OSError:
                break
            await asyncio.sleep(0.05)


async def test_a_cpu_has_an_equal_part_of_its_hosts_memory():
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    async with inline(spmd_mesh={"data": 2}) as mesh:
        controller = mesh._controller
        assert controller is not None
        assert [controller.device_bytes(actor) for actor in range(2)] == [host_bytes // 4] * 2
        assert controller.device_bytes(0) == host_bytes // sum(len(a.devices) for a in mesh.actors)


async def test_two_meshes_have_pages_of_their_own():
    async with inline(page=True) as first, inline(page=True) as second:
        assert first.page_url != second.page_url
        await train(first, 1)
        assert text_of((await get(second.page_url)).body, "step").startswith("not known")
        other = second.page_url.partition("token=")[2]
        assert (await get(first.page_url, f"/?token={other}")).status == 403


async def test_a_loss_of_nan_is_told_at_the_top_of_the_page(tmp_path):
    async with inline() as mesh:
        await train(mesh, 1)
        for number in (1, 2):
            mesh.log(number, {"loss": float("nan")})
        mesh.write_page(tmp_path / "run.html")
    assert "loss is not finite since step 1<" in (tmp_path / "run.html").read_text()
