"""Show the findings of the doctor (the command that checks whether a run would work) as tables or lines for a
person, or as JSON for a program.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxpp_async.doctor.facts import SECTIONS, Examination, Finding
from jaxpp_async.doctor.judge import would_work

_MARKS = {
    "ok": ("OK", "green"),
    "note": ("note", "cyan"),
    "warning": ("warning", "yellow"),
    "error": ("ERROR", "red"),
}
_MARK_WIDTH, _MAX_NAME_WIDTH = 7, 32
_OPTION: Final = re.compile(
    r"(?<![-/\w])"
    r"(hosts|python|interface|ports|devices|control_address|ssh_options|processes_per_actor|platform)"
    r"=(\S?)"
)
"""A pattern for an option of `RemoteMesh` in an error or a remedy, with the character after the `=`. Flags of
the command line and parts of paths do not match.
"""

_OTHER_SPELLINGS: Final = (
    (
        r"give spmd_mesh a product that is a multiple of (\d+), for example \{.*?\}",
        r"give --devices-per-actor a multiple of \1",
    ),
    (r"\bspmd_mesh\b", "--devices-per-actor"),
    (r"launcher='slurm'", "--slurm"),
    (
        r"with launcher='local', whose actors run on this machine",
        "on this machine alone (without --hosts and --slurm)",
    ),
)
"""Patterns for phrases about options of `RemoteMesh` which the doctor spells differently, each with the
doctor's spelling.
"""


def as_json(found: Examination, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the examination and its findings as a dictionary that `json.dumps` accepts."""
    return {
        "would_work": would_work(findings),
        "findings": msgspec.to_builtins(findings),
        **msgspec.to_builtins(found),
    }


def as_flags(text: str) -> str:
    """Rewrite a text that names options of `RemoteMesh` so that it names the doctor's command-line flags
    instead, such as `--interface` for `interface=`.
    """

    def flag(match: re.Match[str]) -> str:
        gap = " " if match[2].isalnum() or match[2] in ("'", '"', "<") else ""
        return f"--{match[1].replace('_', '-')}{gap if match[2] else ''}{match[2]}"

    for ours, theirs in _OTHER_SPELLINGS:
        text = re.sub(ours, theirs, text)
    return _OPTION.sub(flag, text)


def print_findings(found: Examination, findings: Sequence[Finding], console: Console) -> None:
    """Print the findings of each section, then whether the run would work. The findings are printed as tables
    on a terminal, and otherwise as lines that are not wrapped.
    """
    (_print_tables if console.is_terminal else _print_lines)(findings, console)
    console.print(_summarize(found, findings), soft_wrap=True)


def _print_lines(findings: Sequence[Finding], console: Console) -> None:
    width = max((len(finding.host) for finding in findings), default=0)
    for section, title in SECTIONS.items():
        in_section = [finding for finding in findings if finding.section == section]
        lines = [title] * bool(in_section)
        for finding in in_section:
            mark = f"{_MARKS[finding.level][0]:{_MARK_WIDTH}}  {finding.host:{width}}  "
            rest = [f"-> {finding.remedy}"] if finding.remedy else []
            lines += [mark + f"\n{' ' * len(mark)}".join([*finding.what.splitlines(), *rest])]
        for line in lines:
            console.out(line, highlight=False)


def _print_tables(findings: Sequence[Finding], console: Console) -> None:
    width = max((len(finding.host) for finding in findings), default=0)
    for section, title in SECTIONS.items():
        in_section = [finding for finding in findings if finding.section == section]
        if not in_section:
            continue
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(width=_MARK_WIDTH)
        table.add_column(width=min(width, _MAX_NAME_WIDTH), overflow="fold")
        table.add_column(overflow="fold")
        for finding in in_section:
            mark, style = _MARKS[finding.level]
            text = Text(finding.what)
            if finding.remedy:
                text.append(f"\n-> {finding.remedy}", style="bold")
            table.add_row(Text(mark, style=style), Text(finding.host), text)
        console.print(Text(title, style="bold"), table)


def _summarize(found: Examination, findings: Sequence[Finding]) -> Text:
    asked, counts = found.asked, {level: sum(f.level == level for f in findings) for level in _MARKS}
    where = (
        "on this machine" if found.is_local else f"on {len(found.hosts)} host{'s' * (len(found.hosts) != 1)}"
    )
    kind = f"A run on {asked.platform} over {asked.transport}, {where},"
    warnings = f" ({counts['warning']} warning{'s' * (counts['warning'] != 1)})" if counts["warning"] else ""
    if would_work(findings):
        return Text(f"\n{kind} would work{warnings}.", style="bold green")
    errors = f"{counts['error']} error{'s' * (counts['error'] != 1)}"
    return Text(f"\n{kind} would not work: {errors}{warnings}.", style="bold red")
