"""A table says the same in Markdown, LaTeX and HTML, and never shows a mean without its number of values."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sweep.tables import Cell, Table
from tests.renderings import READERS

TABLE = Table(
    title="model=llama_9m, 50 % & #1",
    columns=("method", "n", "eval loss", "bytes/step, paper (MB)", "÷ adamw"),
    rows=(
        ("adamw", "3", Cell("4.100 ± 0.020", best=True), "4.260", "-"),
        ("tsr_paper", "2 of 3", "12.3 ± 0.1", "0.1992", "0.0468"),
        ("a|b <c>\nd", "3", "−1.5", "1", "-"),
    ),
    notes=("Bytes `all_x` ± − × ² ≤ … ∈ {0.1, 0.3} é ☃.", "A second one: x < y, a_b^c ~ \\d $5."),
)


@pytest.mark.parametrize("rendering", READERS)
def test_every_rendering_says_the_same(rendering: str) -> None:
    columns, rows = READERS[rendering](getattr(TABLE, rendering)())
    assert columns == list(TABLE.columns)
    assert rows[0] == [("adamw", False), ("3", False), ("4.100 ± 0.020", True), ("4.260", False), ("-", False)]
    assert [text for text, _ in rows[1]] == ["tsr_paper", "2 of 3", "12.3 ± 0.1", "0.1992", "0.0468"]
    assert [text for text, _ in rows[2]] == ["a|b <c> d", "3", "−1.5", "1", "-"]
    assert sum(best for row in rows for _, best in row) == 1


@pytest.mark.parametrize("title", ["N", "number", "loss n"])
def test_a_mean_needs_its_n(title: str) -> None:
    with pytest.raises(ValueError, match="needs a column 'n'"):
        Table("", (title, "loss"), (("3", "4.1 ± 0.2"),))
    with pytest.raises(ValueError, match="needs a column 'n'"):
        Table("", (title, "loss"), (("3", "4.1"), ("3", Cell("4.1 ± 0.2"))))
    assert "± 0.2" in Table("", ("n", "loss"), (("3", "4.1 ± 0.2"),)).markdown()


def test_rows_are_as_long_as_the_header() -> None:
    with pytest.raises(ValueError, match="a row has 1 cells for 2 columns"):
        Table("", ("a", "b"), (("1", "2"), ("1",)))


def test_markdown_is_padded_and_aligned() -> None:
    table = Table("Title <b>", ("method", "lr", "x"), (("tsr", "0.01", "a"), ("adamw", Cell("1", best=True), "2")))
    assert table.markdown() == (
        "Title \\<b>\n\n"
        "| method |    lr | x   |\n"
        "| ------ | ----: | --- |\n"
        "| tsr    |  0.01 | a   |\n"
        "| adamw  | **1** | 2   |\n"
    )
    assert TABLE.markdown().endswith("é ☃.\n\nA second one: x \\< y, a_b^c ~ \\d $5.\n")


def test_html_is_escaped() -> None:
    text = TABLE.html()
    assert "<code>all_x</code>" in text and "x &lt; y" in text and "50 % &amp; #1</caption>" in text
    assert "<c>" not in text


def test_latex_is_escaped() -> None:
    text = Table("a_b < 50 % & {#} $ ~ ^ \\ |", ("`x_y` ±",), (("×²",),), ("☃",)).latex()
    for part in (
        r"a\_b \textless{} 50 \% \& \{\#\} \$ \textasciitilde{} \textasciicircum{} \textbackslash{} \textbar{}}",
        *(r"\texttt{x\_y}", r"$\pm$", r"$\times$$^2$", r"\par \texttt{U+2603}"),
    ):
        assert part in text


def test_a_long_latex_title_is_no_wider_than_its_column() -> None:
    assert r"\shortstack[r]{bytes/step,\\paper (MB)}" in TABLE.latex()
    long = Table("", ("what",), (("a cell of more than thirty characters",),)).latex()
    assert r"\begin{tabular}{p{4cm}}" in long and "\\raggedright a cell of more" in long
    assert r"\shortstack" not in Table("", ("eval loss", "n"), (("4.100 ± 0.020", "3"),)).latex()


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs pdflatex: apt-get install texlive-latex-recommended")
def test_latex_compiles(tmp_path: Path) -> None:
    ascii_text = "".join(map(chr, range(32, 127))).replace("`", "")
    symbols = "±÷×·−≤≥≈≠∈→√∞²³Σσαβ½¼¾§…–—’‘“”éßŁ☃"
    every = Table(
        ascii_text + symbols, ("n", ascii_text), (("1", Cell(symbols, best=True)), ("`a_b`", symbols)), (symbols,)
    )
    document = "\n".join(
        (
            *(r"\documentclass{article}", r"\usepackage[T1]{fontenc}", r"\usepackage{booktabs}", r"\begin{document}"),
            *(TABLE.latex(), every.latex(), Table("", ("n",), ()).latex(), r"\end{document}"),
        )
    )
    (tmp_path / "t.tex").write_text(document, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    home = {**os.environ, "TEXMFVAR": str(tmp_path / "fonts")}
    done = subprocess.run(
        command, cwd=tmp_path, env=home, capture_output=True, text=True, errors="replace", timeout=120
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "t.pdf").stat().st_size > 1000
    assert "Missing character" not in (tmp_path / "t.log").read_text(errors="replace")
