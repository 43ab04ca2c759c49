"""RESULTS.md: it is the page of the stored tables, short, and its links exist."""

import re

import pytest
import report
import tables


def test_the_page_is_that_of_the_stored_tables():
    assert report.PAGE.read_text() == report.page()
    assert len(report.page().splitlines()) <= report.MAX_PAGE_LINES


def test_every_stored_table_is_on_the_page_or_linked():
    text = report.page()
    for name in report.names():
        assert report.Stored.read(name).command in text
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (report.PAGE.parent / target).exists(), target


def test_rows_of_a_table_are_as_wide_as_its_head():
    for name in report.names():
        for table in tables.tables_of(report.Stored.read(name).body):
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table}) == 1, name


def test_a_run_stores_the_tables_that_the_command_prints(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    script = tmp_path / "print.py"
    script.write_text("print('progress')\nprint('| a | b |\\n|---|---|\\n| 1 | 2 |')\nprint('median 3 %')")
    report.Stored(f"python {script}", "2026-01-01, jax 0", "| old |\n|---|").write("one")
    report.run("one")
    stored = report.Stored.read("one")
    assert stored.body == "| a | b |\n|---|---|\n| 1 | 2 |"
    assert "2026-01-01" not in stored.conditions
    script.write_text("raise SystemExit('no')")
    with pytest.raises(SystemExit, match="exit status 1"):
        report.run("one")
    assert report.Stored.read("one") == stored


def test_a_table_is_printed_row_by_row(capsys):
    table = tables.Table("a", "b", title="Numbers")
    assert tables.tables_of(capsys.readouterr().out) == [["| a | b |", "|---|---|"]]
    table.add_row("1")
    table.add_row("x|y", "two\nlines")
    assert capsys.readouterr().out.splitlines() == ["| 1 |  |", "| x\\|y | two lines |"]
    with pytest.raises(ValueError, match="3 cells for 2 columns"):
        table.add_row("1", "2", "3")
