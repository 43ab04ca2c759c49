"""The suite of benchmarks: commands in processes of their own, resuming, and RESULTS.md, the page of the stored tables."""

import re

import pytest
import suite
import tables

TABLE = "print('progress')\nprint('| a | b |\\n|---|---|\\n| 1 | 2 |')\nprint('median 3 %')"


@pytest.fixture
def benchmarks(monkeypatch, tmp_path):
    """Three benchmarks in a folder, of which the second fails; the results, the page and the record are there too."""
    scripts = {"good": TABLE, "bad": "raise SystemExit('no')", "late": TABLE.replace("1 | 2", "3 | 4")}
    for name, code in scripts.items():
        script = f"open({str(tmp_path / 'runs')!r}, 'a').write('{name}\\n')\n{code}"
        (tmp_path / f"{name}.py").write_text(script)
    chosen = tuple(
        suite.Benchmark(name, level, f"python {tmp_path / name}.py", 1, f"python {tmp_path / name}.py", title=name)
        for name, level in zip(scripts, ("op", "step", "growth"), strict=True)
    )
    monkeypatch.setattr(suite, "BENCHMARKS", chosen)
    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    monkeypatch.setattr(suite, "PAGE", tmp_path / "RESULTS.md")
    monkeypatch.setattr(suite, "RECORDS", tmp_path)
    monkeypatch.setattr(suite, "commit", lambda: "abc1234")
    return tmp_path


def runs(folder):
    return (folder / "runs").read_text().split()


def test_the_page_is_that_of_the_stored_results():
    assert suite.PAGE.read_text() == suite.page()
    assert len(suite.page().splitlines()) <= suite.MAX_PAGE_LINES


def test_every_stored_table_is_on_the_page_or_linked():
    text = suite.page()
    names = [path.stem for path in suite.RESULTS.glob("*.md")]
    assert set(names) <= {b.name for b in suite.BENCHMARKS}
    for name in names:
        assert suite.Stored.read(name).command.replace("|", "\\|") in text
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (suite.PAGE.parent / target).exists(), target


def test_the_quick_tables_are_of_one_version():
    header, outcomes = suite.read_record(suite.RESULTS / "quick.jsonl")
    assert re.fullmatch(r"[0-9a-f]{9}", header["commit"])
    assert set(outcomes) == {b.name for b in suite.BENCHMARKS if b.quick}
    assert {b.level for b in suite.BENCHMARKS if b.quick} == set(suite.LEVELS)


def test_benchmarks_have_levels_and_commands_of_scripts_that_exist():
    assert len({b.name for b in suite.BENCHMARKS}) == len(suite.BENCHMARKS)
    for b in suite.BENCHMARKS:
        assert b.level in suite.LEVELS
        for command in filter(None, (b.command, b.quick)):
            assert (suite.ROOT / command.split()[1]).exists()


def test_a_benchmark_that_fails_costs_only_itself(benchmarks, capsys):
    (benchmarks / "bad.md").write_text("# `python bad.py`\n\n2026-01-01, jax 0\n\n| old |\n|---|\n")
    assert suite.main([]) == 1
    stored = suite.Stored.read("good")
    assert stored.body == "| a | b |\n|---|---|\n| 1 | 2 |"
    assert "commit abc1234" in stored.conditions
    assert suite.Stored.read("bad").body == "| old |\n|---|"
    assert "| 3 | 4 |" in suite.Stored.read("late").body
    assert suite.PAGE.read_text() == suite.page()
    assert suite.PAGE.read_text() in capsys.readouterr().out
    _, outcomes = suite.read_record(benchmarks / "abc1234.jsonl")
    assert {name: o.status for name, o in outcomes.items()} == {"good": "ok", "bad": "failed", "late": "ok"}
    assert "no" in outcomes["bad"].message


def test_a_command_that_was_killed_resumes(benchmarks):
    suite.main(["--only", "late"])
    with (benchmarks / "abc1234.jsonl").open("a") as file:
        file.write('{"id": "good", "sta')  # a line that was cut off
    suite.main([])
    suite.main([])
    assert runs(benchmarks) == ["late", "good", "bad"]


def test_a_quick_run_is_stored_when_it_is_complete(benchmarks):
    suite.main(["--quick", "--only", "good", "late"])
    assert not (benchmarks / "quick.jsonl").exists()
    suite.main(["--quick"])
    header, outcomes = suite.read_record(benchmarks / "quick.jsonl")
    assert header["commit"] == "abc1234"
    assert len(outcomes) == 3
    assert not (benchmarks / "good.md").exists()
    text = suite.PAGE.read_text()
    assert re.search(r"\| bad \| step \| failed: .*no.* \| 0 \|", text)
    assert text.index("| 1 | 2 |") < text.index("## Level: growth") < text.index("| 3 | 4 |")


def test_a_table_is_printed_row_by_row(capsys):
    table = tables.Table("a", "b", title="Numbers")
    assert tables.tables_of(capsys.readouterr().out) == [["| a | b |", "|---|---|"]]
    table.add_row("1")
    table.add_row("x|y", "two\nlines")
    assert capsys.readouterr().out.splitlines() == ["| 1 |  |", "| x\\|y | two lines |"]
    with pytest.raises(ValueError, match="3 cells for 2 columns"):
        table.add_row("1", "2", "3")
