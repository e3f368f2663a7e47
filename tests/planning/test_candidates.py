from dataclasses import replace
from types import SimpleNamespace

from jaxpp_async.planning.candidates import Case, Option, in_order_of_stages
from jaxpp_async.planning.layers import LayerCosts
from jaxpp_async.planning.named import on_equal_cut
from jaxpp_async.planning.problem import Layer
from jaxpp_async.planning.verdicts import ranked_candidates


def option(cap=1e9):
    layers = LayerCosts((Layer(1, 1, 1, 1, 1),) * 4, (), 0.0, 0.0, 1e9, 7.0, (0.0,) * 4, ())
    machine = SimpleNamespace(actors=2, spmd_mesh={})
    case = Case(machine, None, [], 4, cap, None, layers)
    return Option(case, on_equal_cut(case.problem)[0])


def test_an_estimate_has_the_reserve_and_gives_way_to_the_compiled_form():
    found = option()
    assert found.peak_bytes == max(found.timed.peak_bytes) + 7 and found.fits
    assert found.step_s == found.timed.step_s and found.schedule.num_stages == len(found.schedule.stages) + 1
    found.needs = (SimpleNamespace(total_bytes=50), SimpleNamespace(total_bytes=20))
    assert found.peak_bytes == 50
    first, second = found.timed.peak_bytes
    assert found.unestimated_bytes() == (50 - first, 20 - second)


def test_a_case_without_a_candidate_says_why():
    best = option()
    slower = Case(best.case.machine, None, [], 400, 1e9, None, best.case.layers)
    smaller = Case(best.case.machine, None, [], 2, 1e9, None, best.case.layers)
    chosen, *lost = ranked_candidates(best, [best], [best.case, slower, smaller])
    assert chosen.verdict == "chosen"
    assert [c.verdict for c in lost if c.name == "any schedule"] == [
        "no schedule takes less, by a proof",
        "no named schedule fits on any cut",
    ]


def test_actors_are_numbered_in_the_order_of_their_first_stages():
    timed = option().timed
    rows = timed.assignment.rows
    mirrored = replace(
        timed,
        assignment=replace(timed.assignment, rows=(*rows[::-1], ())),
        peak_bytes=(*timed.peak_bytes[::-1], 0.0),
    )
    found, order = in_order_of_stages(mirrored)
    assert found.assignment.rows == (*rows, ()) and order == (1, 0, 2)
    assert found.peak_bytes == (*timed.peak_bytes, 0.0) and found.step_s == timed.step_s
