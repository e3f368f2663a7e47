"""The command `schedule` (`jaxpp_async.commands.schedule`): pictures and comparisons."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from jaxpp_async.commands.app import app
from jaxpp_async.schedules import NAMED, Std1F1B, ZeroBubbleH1, peak_activations


def run(*arguments: str, width: int = 100):
    return CliRunner().invoke(app, ["schedule", *arguments], env={"COLUMNS": str(width)})


def test_a_schedule_is_drawn_and_written(tmp_path):
    svg, html = tmp_path / "s.svg", tmp_path / "s.html"
    done = run("show", "GPipe(2)", "--microbatches", "3", "--svg", str(svg), "--html", str(html))
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "GPipe(num_stages=2): 3 microbatches on 2 actors, bubble 25%"
    assert lines[1].split()[:2] == ["actor", "0"] and lines[1].endswith("3 activations")
    assert lines[-2].endswith(svg.as_uri()) and lines[-1].endswith(html.as_uri())
    assert svg.read_text().startswith("<svg") and html.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_drawing_fits_the_terminal(width):
    done = run("show", "VHalf(8)", "--microbatches", "20", width=width)
    assert max(map(len, done.stdout.splitlines()[1:])) <= width


def test_all_schedules_are_compared():
    done = run("compare", "--actors", "3", "--microbatches", "9")
    assert done.exit_code == 0, done.output
    assert "9 microbatches on 3 actors" in done.stdout
    assert all(f"{schedule.__name__}(num_stages=" in done.stdout for schedule in NAMED)


def test_more_memory_for_the_same_bubble_is_explained():
    assert "ZeroBubbleH2 holds more than ZeroBubbleH1" in run("compare", "ZeroBubbleH2(4)").stdout
    assert "holds more" not in run("compare", "ZeroBubbleH1(4)").stdout


def test_figures_as_json_are_those_of_the_schedules():
    found = json.loads(
        run("compare", "Std1F1B(4)", "ZeroBubbleH1(8)", "--microbatches", "6", "--json").stdout
    )
    assert [each["schedule"] for each in found] == ["Std1F1B(num_stages=4)", "ZeroBubbleH1(num_stages=8)"]
    assert found[0]["of_1f1b"] == 1 and found[0]["sent"] == 2 * 3 * 6
    assert found[0]["activations"] == max(peak_activations(Std1F1B(4).tasks(6, 4)))
    assert found[1]["activations"] == max(peak_activations(ZeroBubbleH1(8).tasks(6, 4))) / 2


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("show", "Nope(4)"), 2, "there is no schedule 'Nope'"),
        (("show", "Std1F1B(4)", "--actors", "0"), 2, "--actors"),
        (("show", "Auto()"), 1, "no stages before a step is planned"),
        (("compare", "Auto()"), 1, "no stages before a step is planned"),
        (("show", "Std1F1B(1000000)"), 1, "at most 500,000 are drawn"),
        (("compare", "--actors", "5000"), 1, "at most 500,000 are drawn; give 50 microbatches or fewer"),
        (
            ("compare", "Std1F1B(2)", "--actors", "4"),
            2,
            "fewer stages than there are actors; give --actors",
        ),
    ],
)
def test_wrong_use_is_told(arguments, status, message):
    done = run(*arguments)
    assert done.exit_code == status
    assert message in done.stderr.replace("\n", " ")
