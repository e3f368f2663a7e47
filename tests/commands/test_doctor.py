"""The options and the exit status of the command `doctor`, in this process."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from jaxpp_async.commands import doctor
from jaxpp_async.commands.app import app
from jaxpp_async.commands.output import WRONG_USE
from jaxpp_async.doctor.facts import UNLIMITED, Examination, HostFacts, HostReport, RequestedRun

FACTS = HostFacts("n", "/py", "3.11.7", "Linux", {}, 1, 1 << 30, 1 << 30, UNLIMITED)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hosts", "/nonesuch/hosts"], "doctor: hostfile /nonesuch/hosts does not exist; give the path"),
        (["--ports", "9"], "'9' is no range of ports such as 47000-47100"),
        (["--control-address", "10.0.0.1"], "doctor: --control-address has no effect on this machine alone"),
        (["--platform", "tpu"], "--platform"),
        (["--actors", "0"], "--actors"),
    ],
)
def test_options_that_cannot_be_are_refused_with_their_own_exit_status(arguments, says, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == WRONG_USE
    assert says in result.output


@pytest.fixture
def found(monkeypatch):
    """What the doctor finds, without looking."""

    async def look(options, asked, measures) -> Examination:
        here = HostReport("here", facts=FACTS)
        return Examination(RequestedRun(), here, (here,))

    monkeypatch.setattr(doctor, "_examine", look)


def test_a_run_that_would_not_work_is_an_exit_status_and_json_says_why(found):
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    findings = json.loads(result.stdout)["findings"]
    (ucx,) = (finding for finding in findings if finding["section"] == "ucx")
    assert (ucx["level"], ucx["what"]) == ("error", "ucxx is not installed")


def test_the_facts_of_this_machine_are_printed_without_a_judgement(monkeypatch):
    async def facts(platform: str) -> HostFacts:
        assert platform == "cuda"
        return FACTS

    monkeypatch.setattr("jaxpp_async.doctor.gather.gather", facts)
    result = CliRunner().invoke(app, ["doctor", "--facts", "--platform", "cuda"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["hostname"] == "n"
