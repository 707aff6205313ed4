"""A table as text, and the same table as Markdown, LaTeX and HTML; nothing here computes a value.

Text is plain Unicode, `code` in backticks. A table that shows a mean ± deviation cannot be made without a column `n`,
so no rendering shows a mean without the number of values behind it.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

N = "n"
"""The title of the column that says how many values a mean is of."""

NUMBER = re.compile(r"-?|[+−-]?\d[\d.,]*(e[+−-]?\d+)?(\(\d+\))?( (±|of) \d\S*)?")
LATEX_WIDTH = 30  # characters; a longer cell is set in lines
PARAGRAPH = "p{4cm}"

# What pdflatex does not read as itself.
LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''"},
    **{"±": r"$\pm$", "÷": r"$\div$", "×": r"$\times$", "·": r"$\cdot$", "−": "$-$", "≤": r"$\le$", "≥": r"$\ge$"},
    **{"≈": r"$\approx$", "≠": r"$\ne$", "∈": r"$\in$", "→": r"$\to$", "√": r"$\surd$", "∞": r"$\infty$"},
    **{"²": "$^2$", "³": "$^3$", "Σ": r"$\Sigma$", "σ": r"$\sigma$", "α": r"$\alpha$", "β": r"$\beta$"},
    **{"½": r"$\frac12$", "¼": r"$\frac14$", "¾": r"$\frac34$", "§": r"\S{}", "…": r"\dots{}", "–": "--", "—": "---"},
    **{"’": "'", "‘": "`", "“": "``", "”": "''"},
}


@dataclass(frozen=True)
class Cell:
    """One cell; `best` makes it stand out."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of as many cells as there are `columns`; `notes` are sentences below, each a paragraph.

    Raises:
        ValueError: a row has another number of cells, or a cell has a `±` and no column is called `n`.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.cells:
            if len(row) != len(self.columns):
                raise ValueError(f"table '{self.title}': a row has {len(row)} cells for {len(self.columns)} columns")
            if N not in self.columns and any("±" in cell.text for cell in row):
                raise ValueError(f"table '{self.title}': a mean ± deviation needs a column '{N}', its number of values")

    @property
    def cells(self) -> list[list[Cell]]:
        """The rows, each cell a `Cell` of one line."""
        cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.rows]
        return [[Cell(" ".join(cell.text.split()), cell.best) for cell in row] for row in cells]

    def markdown(self) -> str:
        """Title, a pipe table padded so that it reads well in a terminal too, and the notes."""
        lines = [
            [_markdown(Cell(title)) for title in self.columns],
            *([_markdown(cell) for cell in row] for row in self.cells),
        ]
        widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
        layout = list(zip(widths, self._numeric(), strict=True))
        rule = ["-" * (width - 1) + ":" if right else "-" * width for width, right in layout]
        padded = [
            [
                text.rjust(width) if right else text.ljust(width)
                for text, (width, right) in zip(line, layout, strict=True)
            ]
            for line in lines
        ]
        table = "\n".join(f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:]))
        return "\n\n".join(filter(None, (_markdown_text(self.title), table, *map(_markdown_text, self.notes)))) + "\n"

    def latex(self) -> str:
        """A `table` float with its caption, for a document that loads booktabs; many columns need a wide page."""
        numeric = self._numeric()
        head = [self._latex_head(index, right=right) for index, right in enumerate(numeric)]
        wide = [max(map(len, column), default=0) > LATEX_WIDTH for column in self._texts()]
        layout = [PARAGRAPH if long else "r" if right else "l" for long, right in zip(wide, numeric, strict=True)]
        body = [
            [rf"\raggedright {text}" if long else text for text, long in zip(row, wide, strict=True)]
            for row in ([_latex(cell.text, bold=cell.best) for cell in row] for row in self.cells)
        ]
        notes = [rf"\par {_latex(note)}" for note in self.notes]
        return "\n".join(
            (
                *(r"\begin{table}[t]", r"\centering", rf"\caption{{{_latex(self.title)}}}"),
                *(r"\footnotesize", r"\setlength{\tabcolsep}{3pt}"),
                rf"\begin{{tabular}}{{{''.join(layout)}}}",
                *(r"\toprule", rf"{' & '.join(head)} \tabularnewline", r"\midrule"),
                *(rf"{' & '.join(row)} \tabularnewline" for row in body),
                *(r"\bottomrule", r"\end{tabular}"),
                *((r"\par\smallskip", r"\begin{minipage}{\linewidth}", *notes, r"\end{minipage}") if notes else ()),
                r"\end{table}",
                "",
            )
        )

    def html(self) -> str:
        """A `table` element in a box of its own, which may scroll, and the notes."""
        kinds = ['<{0} class="number">' if right else "<{0}>" for right in self._numeric()]
        head = "".join(
            f"{kind.format('th')}{rich(title)}</th>" for kind, title in zip(kinds, self.columns, strict=True)
        )
        body = [
            "".join(f"{kind.format('td')}{_html(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
            for row in self.cells
        ]
        return "\n".join(
            (
                f'<div class="scroll"><table>\n<caption>{rich(self.title)}</caption>',
                f"<thead>\n<tr>{head}</tr>\n</thead>\n<tbody>",
                *(f"<tr>{row}</tr>" for row in body),
                "</tbody>\n</table></div>",
                *(f'<p class="note">{rich(note)}</p>' for note in self.notes),
                "",
            )
        )

    def _numeric(self) -> list[bool]:
        """Whether a column holds numbers, which are aligned at the right."""
        return [all(NUMBER.fullmatch(text) for text in column) for column in self._texts()]

    def _texts(self) -> list[list[str]]:
        """The text of each column's cells."""
        return [[row[index].text for row in self.cells] for index in range(len(self.columns))]

    def _latex_head(self, index: int, *, right: bool) -> str:
        """A column's title in as many lines as keep it from being wider than what stands below."""
        title = self.columns[index]
        width = min(LATEX_WIDTH, max(len(text) for text in (*title.split(), *self._texts()[index], "-")))
        lines = [_latex(line) for line in textwrap.wrap(title, width, break_long_words=False, break_on_hyphens=False)]
        stacked = r"\\".join(lines)
        return stacked if len(lines) == 1 else rf"\shortstack[{'r' if right else 'l'}]{{{stacked}}}"


def blocks_table(blocks: Sequence[Mapping[str, object]]) -> Table:
    """The kinds of blocks of a run, as its summary has them: what is done with each."""
    columns = ("role", "shape", "blocks", "parameters", "subspace", "rank", "refresh", "note")
    rows = tuple(tuple("-" if row[name] in (None, "") else str(row[name]) for name in columns) for row in blocks)
    return Table("Blocks by role; `refresh` is in steps", columns, rows)


def rich(text: str) -> str:
    """`text` as HTML: escaped, with `code` as an element."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def _html(cell: Cell) -> str:
    return f"<strong>{rich(cell.text)}</strong>" if cell.best else rich(cell.text)


def _markdown(cell: Cell) -> str:
    text = _markdown_text(cell.text).replace("|", r"\|")
    return f"**{text}**" if cell.best else text


def _markdown_text(text: str) -> str:
    """`text` with no HTML in it; in `code` nothing is."""
    return re.sub("(`[^`]+`)|<", lambda found: found[1] or r"\<", text)


def _latex(text: str, *, bold: bool = False) -> str:
    parts = re.split("`([^`]+)`", text)
    escaped = ["".join(map(_latex_character, part)) for part in parts]
    joined = "".join(rf"\texttt{{{part}}}" if index % 2 else part for index, part in enumerate(escaped))
    return rf"\textbf{{\boldmath {joined}}}" if bold else joined


def _latex_character(character: str) -> str:
    """What LaTeX cannot print is shown by its number, for it must neither stop the document nor vanish from it."""
    printable = character.isascii() or "À" <= character <= "ſ"
    return LATEX.get(character, character if printable else rf"\texttt{{U+{ord(character):04X}}}")
