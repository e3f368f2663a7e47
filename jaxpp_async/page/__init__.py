"""Show a run while it goes on and afterwards: a live page, its file, and metrics for Prometheus.

    RunPage             the record and the page of one mesh (`run_page`)
    RunRecord           what happened so far, in bounded memory (`run_state`)
    GoodputMeter        how the time of the run was spent (`goodput`)
    QUESTIONS           what people ask of a run, and who answers (`answers`)
    sections            the HTML of each section
    Renderer            when which section is written again (`renderer`)
    write_document      the page as one HTML document (`document`, page.css, page.js)
    keep_page           a file for a run that failed (`failed_runs`)
    write_metrics       the run in Prometheus's text format (`prometheus`)
    PageServer          HTTP on the loopback interface (`server`)

Nothing here waits but `run_page` and `server`.
"""

from jaxpp_async.page.run_page import RunPage
from jaxpp_async.page.server import check_packages

__all__ = ["RunPage", "check_packages"]
