"""The metrics are what Prometheus reads."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from paths import ROOT
from run_states import actors, new_record, state_of, trained_record

pytest.importorskip("prometheus_client", reason="the extra 'page' is not installed")
from prometheus_client.parser import text_string_to_metric_families

from jaxpp_async.page.prometheus import METRICS, write_metrics
from jaxpp_async.protocol.actor_info import ACTOR_STATES
from jaxpp_async.session.logger_delivery import LoggerState


def read(run):
    families = text_string_to_metric_families(write_metrics(run).decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_metrics_of_a_run():
    found = read(state_of(trained_record()))
    assert found["jaxpp_steps_total", "train"] == 4
    assert found["jaxpp_step_seconds_count",] == 4
    assert found["jaxpp_step_seconds_sum",] == pytest.approx(4.0)
    assert found["jaxpp_step_seconds_bucket", "+Inf"] == 4
    assert found["jaxpp_goodput_ratio",] == pytest.approx(0.4)
    assert found["jaxpp_idle_ratio",] == pytest.approx(0.25)
    assert ("jaxpp_bubble_ratio",) not in found  # no timeline was read
    assert found["jaxpp_run_seconds_total", "compile"] == 2
    assert found["jaxpp_restarts_total",] == 0 and found["jaxpp_up",] == 1
    assert found["jaxpp_sent_bytes_total",] == 4_000_000
    assert found["jaxpp_peak_bytes", "1"] == 4096
    assert found["jaxpp_actors", "ready"] == 2
    assert found["jaxpp_logged", "loss"] == 2.5


def test_counters_do_not_count_time_whose_use_may_turn_out_to_be_another():
    """The time since the last step may be a compilation or a step under way: it is a gauge of its own."""
    record = trained_record()
    found = [read(state_of(record, at_s=at)) for at in (10.0, 60.0)]
    between = [metrics["jaxpp_run_seconds_total", "between"] for metrics in found]
    assert between[0] == between[1] == pytest.approx(0.4)
    assert found[1]["jaxpp_run_undecided_seconds",] == pytest.approx(60.0 - 8.4)


def test_what_loggers_did_not_get():
    loggers = (LoggerState("Files", num_dropped=7), LoggerState("Cloud", num_failed=2))
    found = read(state_of(trained_record(), loggers=loggers))
    assert found["jaxpp_logger_dropped_total", "Files"] == 7
    assert found["jaxpp_logger_dropped_total", "Cloud"] == 0
    assert found["jaxpp_logger_errors_total", "Cloud"] == 2


def test_metrics_before_the_first_step_and_after_the_end():
    assert read(state_of(new_record(), actors=(), memory={}))["jaxpp_step_seconds_count",] == 0
    assert read(state_of(trained_record(), error=ValueError("x"), is_closed=True))["jaxpp_up",] == 0
    assert read(replace(state_of(trained_record()), bubble=0.125))["jaxpp_bubble_ratio",] == 0.125


def test_docs_list_the_metrics():
    listed = re.findall(r"^\| `(jaxpp_[^`]+)` \|", (ROOT / "docs" / "page.md").read_text(), re.MULTILINE)
    assert listed == [row.shown_name for row in METRICS]


def test_every_state_of_an_actor_is_counted():
    found = read(state_of(trained_record(), actors=tuple(actors(1, s)[0] for s in ACTOR_STATES)))
    assert all(found["jaxpp_actors", state] == 1 for state in ACTOR_STATES)


def test_odd_names_and_values_stay_readable():
    found = read(state_of(trained_record(), logged={'a "b"\n\\c': (1, float("nan")), "x": (1, float("inf"))}))
    assert found["jaxpp_logged", "x"] == float("inf")
    assert sum(name[0] == "jaxpp_logged" for name in found) == 2
