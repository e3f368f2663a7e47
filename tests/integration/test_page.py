"""The page of real runs: it answers in a real browser, and looking at it harms nobody."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from dataclasses import dataclass

import faults
import numpy as np
import pytest
from browser import CHROMIUM, NO_CHROMIUM, Page, opened
from http_client import get, request_text, send, with_path
from resources import nothing_left
from uneven_model import arguments, uneven_step

import jaxpp_async as jpp
from jaxpp_async.errors import ActorDiedError, RemoteError
from jaxpp_async.page.answers import QUESTIONS
from jaxpp_async.page.server import MOST_CONNECTIONS
from jaxpp_async.planning.memory import memory_needs

pytest.importorskip("aiohttp", reason="the extra 'page' is not installed")
in_browser = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)

SLOW_S, QUICK_S = 0.02, 0.004


@dataclass
class SlowSecondStage:
    """A device on which the second of two stages is slow, by the number of its operations."""

    def task_s(self, work) -> float:
        return 0.0 if work.flops < 100 else SLOW_S if work.flops > 15_000 else QUICK_S


def train_step():
    return uneven_step(1, 3, jpp.Std1F1B(2))


def mesh_of(launcher="inline", **options):
    return jpp.RemoteMesh(2, launcher=launcher, page=True, device_model=SlowSecondStage(), **options)


async def train(mesh, num_steps, params=None):
    """Train some steps, log the losses, and return them."""
    step, (first, batch) = mesh.distributed(train_step()), arguments(1, 3)
    params, losses = params or first, []
    for number in range(num_steps):
        params, loss = await mesh.run(step, params, batch)
        losses.append(await loss)
        mesh.log(number, {"loss": float(losses[-1].mean())})
    return np.stack(losses)


async def answers_of(page: Page) -> dict[str, str]:
    """Return the text of each answer that a page shows, by its id."""
    found = "[...document.querySelectorAll('[data-answer]')].map(e => [e.dataset.answer, e.textContent])"
    return {
        name: " ".join(text.split())
        for name, text in json.loads(await page.evaluate(f"JSON.stringify({found})"))
    }


@in_browser
async def test_a_newcomer_finds_the_answers():
    async with mesh_of("local", max_restarts=2, backup_every=2) as mesh:
        losses = await train(mesh, 6)
        compiled = await mesh.distributed(train_step()).compile(*arguments(1, 3))
        async with opened(mesh.page_url) as page:
            found = await answers_of(page)
            assert set(found) == {question.id for question in QUESTIONS}
            timeline = mesh.last_step_timeline()
            assert found["step"].startswith("step 5 of 'train_step'")
            assert float(found["rate"].split()[0]) < 1 / (6 * SLOW_S)
            assert found["slow-stage"].startswith("stage 1 ")
            assert found["busy-actor"].startswith("actor 1 ")
            assert found["idle-actor"].startswith("actor 0 ") and "for other actors" in found["idle-actor"]
            assert found["balance"].startswith("no, ") and "stage 1" in found["faster"]
            assert found["bubble"].startswith(f"{timeline.bill.schedule_s / timeline.bill.total_s:.0%} ")
            sent = sum(t.send.size_bytes for t in timeline.transfers)
            assert f"{len(timeline.transfers)} transfers" in found["network"]
            assert found["sent"].startswith(f"{sent / 1e3:.3g} kB a step")
            assert found["fits"].startswith("yes ")
            most = max(memory_needs(compiled), key=lambda actor: actor.total_bytes)
            assert found["memory"].startswith(f"actor {most.actor} ")
            assert found["alive"].startswith("yes ") and found["where"].startswith("1 host ")
            assert all(f"pid {actor.pid}" in found["where"] for actor in mesh.actors)
            assert found["stopped"].startswith("it has not stopped")
            assert found["restarts"].startswith("0 ") and found["lost-restarts"].startswith("0 ")
            assert found["happened"].startswith("compiled ") and found["compiled"].startswith("2 times ")
            assert found["logged"].startswith(f"loss {losses[-1].mean():.5g} ")
            for name in ("goodput", "lost-start", "lost-compile", "lost-between"):
                assert re.match(r"[\d.]+( h| min| s| ms| us|%) ", found[name]), found[name]
            await page.evaluate("document.title = ''")

            # the page follows the run, without being loaded again
            os.kill(mesh.actors[1].pid, signal.SIGKILL)
            await train(mesh, 3)
            await page.wait_for(
                "document.querySelector('[data-answer=restarts]').textContent.startsWith('1')"
            )
            found = await answers_of(page)
            assert "killed by SIGKILL" in found["restarts"]
            assert not found["lost-restarts"].startswith("0 ")
            assert (await page.text("#events")).count("restarted") == 1
            assert await page.evaluate("document.querySelectorAll('#grid svg').length") == 1
            await mesh.aclose()
            await page.wait_for("document.querySelector('.status').textContent === 'closed'")
            assert "has ended" in await page.text("#connection")


@in_browser
async def test_a_run_that_failed_shows_its_first_cause_at_once(tmp_path):
    async with mesh_of("local") as mesh:
        await train(mesh, 2)
        async with opened(mesh.page_url) as page:
            os.kill(mesh.actors[0].pid, signal.SIGKILL)
            with pytest.raises(ActorDiedError):
                await train(mesh, 1)
            await page.wait_for("!!document.querySelector('.failure')")
            assert "actor 0" in await page.text(".cause") and "SIGKILL" in await page.text(".cause")
            top = await page.evaluate("document.querySelector('.failure').getBoundingClientRect().bottom")
            assert top < 800  # in the window, without scrolling
    mesh.write_page(tmp_path / "run.html")
    async with opened(tmp_path / "run.html") as page:
        found = await answers_of(page)
        assert found["stopped"].startswith("ActorDiedError: actor 0") and "SIGKILL" in found["stopped"]
        assert found["alive"].startswith("no ") and set(found) == {question.id for question in QUESTIONS}


@in_browser
async def test_a_section_with_selected_text_changes_when_the_selection_ends():
    async with mesh_of("local") as mesh:
        await train(mesh, 2)
        async with opened(mesh.page_url) as page:
            await page.wait_for("document.querySelector('.status').textContent === 'running'")
            await page.evaluate("getSelection().selectAllChildren(document.querySelector('#title h1'))")
            os.kill(mesh.actors[0].pid, signal.SIGKILL)
            with pytest.raises(ActorDiedError):
                await train(mesh, 1)
            await page.wait_for("!!document.querySelector('.failure')")
            await mesh.aclose()
            await page.wait_for("document.getElementById('connection').textContent.includes('has ended')")
            assert await page.evaluate("String(getSelection())") == "2 actors, LocalLauncher"
            assert await page.text(".status") == "running"
            await page.evaluate("getSelection().removeAllRanges()")
            await page.wait_for("document.querySelector('.status').textContent === 'failed'")


@in_browser
async def test_the_page_follows_a_run_without_timers():
    """Browsers let timers of a tab in the background fire once a minute; here they never fire."""
    async with mesh_of() as mesh:
        await train(mesh, 1)
        async with opened(mesh.page_url, before="window.setTimeout = () => 0") as page:
            await train(mesh, 2)
            await page.wait_for("document.querySelector('[data-answer=step]').textContent.includes('step 2')")
            await mesh.aclose()
            await page.wait_for("document.querySelector('.status').textContent === 'closed'")


@in_browser
async def test_the_page_runs_no_script_but_its_own_and_fits_a_narrow_window():
    async with mesh_of() as mesh:
        await train(mesh, 2)
        async with opened(mesh.page_url, size=(380, 800)) as page:
            await page.evaluate(
                "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.evil = 1\">')"
            )
            await asyncio.sleep(0.2)
            assert await page.evaluate("window.evil === undefined")
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@in_browser
async def test_a_page_of_an_earlier_run_says_so():
    async with mesh_of() as first:
        port = int(first.page_url.split(":")[2].partition("/")[0])
        async with opened(first.page_url) as page:
            await first.aclose()
            async with jpp.RemoteMesh(1, launcher="inline", page=port):
                # the page has stopped to ask when it saw the end, unless it had not asked yet
                await page.evaluate("failures = 0; seen = 0; ask()")
                await page.wait_for(
                    "document.getElementById('connection').textContent.includes('another run')"
                )


async def test_the_page_of_a_failed_step_has_the_actors_traceback(tmp_path):
    env = faults.at(1, "fwd_bwd(stage 1, mb 2)", "raise")
    async with jpp.RemoteMesh(2, setup="faults:install", env=env) as mesh:
        step = mesh.distributed(uneven_step(1, 1, jpp.Std1F1B(2)))
        with pytest.raises(RemoteError):
            for _ in range(3):
                await mesh.run(step, *arguments(1, 1))
        mesh.write_page(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert "ValueError: this executable fails" in page and "in _raise" in page


async def test_looking_and_attacking_change_no_number():
    """A thousand requests, browsers that never read, and wrong ones, while a run trains."""
    async with jpp.RemoteMesh(2, launcher="inline", device_model=SlowSecondStage()) as mesh:
        expected = await train(mesh, 12)
    before = len(os.listdir("/proc/self/fd"))
    async with mesh_of() as mesh:
        url = mesh.page_url
        port = int(url.split(":")[2].partition("/")[0])
        await train(mesh, 1)
        stuck = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
        for each in stuck:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            each.sendall(request_text(url))
        kinds = [
            request_text(url),
            request_text(url, with_path(url, "metrics")),
            request_text(url, with_path(url, "state", seen=0, version=jpp.__version__)),
            request_text(url, "/?token=wrong"),
            request_text(url, Host="evil.example"),
            request_text(url, method="POST"),
            request_text(url, Cookie="x" * 50_000),
            b"GARBAGE\r\n\r\n",
        ]

        async def ask(first: int) -> list[int]:
            found = []
            for number in range(first, 1000, MOST_CONNECTIONS // 2):
                try:
                    found.append((await send(url, kinds[number % len(kinds)])).status)
                except ConnectionError:
                    found.append(0)
            return found

        attacks = [asyncio.create_task(ask(first)) for first in range(MOST_CONNECTIONS // 2)]
        losses = await train(mesh, 12)
        statuses = [status for each in await asyncio.gather(*attacks) for status in each]
        assert len(statuses) == 1000 and statuses.count(200) > 0 and statuses.count(403) > 0
        np.testing.assert_array_equal(losses, expected)
        for each in stuck:
            each.close()
        assert (await get(url)).status == 200
    async with asyncio.timeout(10):
        while len(os.listdir("/proc/self/fd")) > before:  # noqa: ASYNC110 # sockets that the system still closes
            await asyncio.sleep(0.02)


async def test_a_mesh_with_a_page_leaves_nothing_behind(caplog):
    async with nothing_left(caplog), mesh_of("local") as mesh:
        await train(mesh, 2)
        assert (await get(mesh.page_url)).status == 200
