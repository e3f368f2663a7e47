"""Tests of `view/table.py`: facts as HTML, and tables as text."""

from rich.table import Table

from jaxpp_async.view.table import table_as_text, to_html_table


def test_a_table_of_rich_is_plain_text_without_spaces_at_the_ends_of_lines():
    table = Table(box=None, pad_edge=False)
    table.add_column("name")
    table.add_column("bytes", justify="right")
    table.add_row("[red]x[/red]", "12")
    table.add_row("a long name", "")
    assert table_as_text(table, 40) == "name          bytes\n[red]x[/red]     12\na long name"


def test_a_table_has_its_title_header_and_rows_escaped():
    html = to_html_table("a <mesh>", ("actor", "state"), [(0, "ready"), (1, "<lost>")])
    assert "<b>a &lt;mesh&gt;</b>" in html
    assert html.count("<th") == 2 + 1  # and thead
    assert html.count("<tr>") == 3 and "&lt;lost&gt;" in html


def test_facts_need_no_header():
    assert "<thead>" not in to_html_table("array", (), [("shape", (2, 3))])
