"""The paper's tables beside ours: `python -m sweep.paper --out DIR`, from dry runs, without any training.

Writes table3, table4 and table6 as Markdown, CSV and LaTeX, every analytic cell into cells.csv, and all of it into one
page, tables.html. Loss, metrics and update time are printed figures only: a dry run has none.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from sweep.cells import (
    QUANTITIES,
    STATUSES,
    UNEXPLAINED,
    UNITS,
    AnalyticCell,
    HeadRatio,
    PrintedTable,
    Published,
    analytic_cells,
    counter,
    head_ratios,
    published,
)
from sweep.fits import FITS
from sweep.page import Section, page
from sweep.tables import Table

NOTHING = "-"
NOT_RUN = "not run here"

SENT_NOTE = (
    "By definition: a dry run of the optimizer's own code, in the count that the paper's AdamW cells show: linears and "
    "token embedding, 4 bytes an element; without the head, though by section 3.1 it would belong to it, and without "
    "norms, positions and token types. Two things that the paper leaves open are set: sketches "
    "have k = r columns (p = 0; the scripts' p = 5 is in a column of its own), and embeddings are refreshed as in the "
    "released scripts, every 2 steps (Table 4: 200). All tensors: the same run with everything that is synchronised, "
    "in fp32."
)
OTHER_NOTE = (
    "{method} has two readings. By definition it is `{optimizer}`, which projects before the reduction, as the formula "
    "r max(m, n) has it, and sends whole gradients on refresh steps only. The second reading is `{other}`, as the "
    "released code does it: whole gradients on every step."
)
MEMORY_NOTE = (
    "By definition: weights and optimizer state by the paper's Table 2 to the letter, at 2 bytes an element. All "
    "tensors: weights and optimizer state of every parameter as this harness keeps them, moments and bases in fp32."
)
METRICS_NOTE = "Printed figures only: these need training, and a dry run takes no time. README.md has the commands."


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1, with the reason on stderr, if a value is wrong."""
    parser = argparse.ArgumentParser(prog="python -m sweep.paper", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the tables go")
    parser.add_argument(
        "--world-size", type=int, default=8, metavar="N", help="workers of the dry runs; changes no byte"
    )
    options = parser.parse_args(arguments)
    try:
        facts = published()
        cells = analytic_cells(facts, counter(world_size=options.world_size))
        write(facts, cells, options.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join((tally(cells).markdown(), head_table(head_ratios(facts, cells)).markdown(), f"in {options.out}")))
    return 0


def write(facts: Published, cells: Sequence[AnalyticCell], out: Path) -> None:
    """Write every file into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    sections = []
    for table in facts.tables:
        mine = [cell for cell in cells if cell.table == table.name]
        tables = paper_tables(table, mine, facts)
        sections.append(Section(table.title, tables))
        (out / f"{table.name}.md").write_text("\n".join(each.markdown() for each in tables), encoding="utf-8")
        (out / f"{table.name}.tex").write_text("\n".join(each.latex() for each in tables), encoding="utf-8")
        _write_csv(out / f"{table.name}.csv", _wide(table, mine))
    _write_csv(out / "cells.csv", [_record(cell) for cell in cells])
    first = Section("What is found", (tally(cells), head_table(head_ratios(facts, cells))))
    (out / "tables.html").write_text(
        page("The tables of arXiv 2602.08007, printed and recomputed", [first, *sections]), encoding="utf-8"
    )


def paper_tables(table: PrintedTable, cells: Sequence[AnalyticCell], facts: Published) -> tuple[Table, ...]:
    """One table for each checked column of the paper's, and one of the columns that nothing here counts."""
    columns = dict.fromkeys(cell.column for cell in cells)
    checked = [
        quantity_table(table, [cell for cell in cells if cell.column == column], facts, title=column)
        for column in columns
    ]
    return (*checked, metrics_table(table))


def quantity_table(table: PrintedTable, cells: Sequence[AnalyticCell], facts: Published, *, title: str) -> Table:
    """Printed, by definition, over all tensors, and a verdict for each row; a reading that no row has is left out."""
    marks = _marks(cells)
    columns = {
        "row": [cell.row.name for cell in cells],
        "rank": [cell.row.rank for cell in cells],
        "K": [cell.row.interval for cell in cells],
        "printed": [cell.printed for cell in cells],
        "by definition": [cell.show(cell.by_definition) for cell in cells],
        "all tensors": [cell.show(cell.all_tensors) for cell in cells],
        "p = 5": [cell.show(cell.oversampled) for cell in cells],
        "second reading": [cell.show(cell.other) for cell in cells],
        "fitted": [cell.show(cell.verdict.fitted) for cell in cells],
        "status": [f"{cell.verdict.status} {marks.get(_reason(cell), '')}" for cell in cells],
    }
    kept = {name: values for name, values in columns.items() if set(values) != {NOTHING}}
    return Table(
        title=f"{table.title}: {title} ({_unit(table)})",
        columns=tuple(kept),
        rows=tuple(zip(*kept.values(), strict=True)),
        notes=tuple(filter(None, (*_notes(cells, marks, facts), table.note))),
    )


def _reason(cell: AnalyticCell) -> str | None:
    """What a footnote explains: a fit, once for all cells, or the cell that nothing explains."""
    return cell.row.name if cell.verdict.status == UNEXPLAINED else cell.verdict.fit


def _marks(cells: Sequence[AnalyticCell]) -> dict[str | None, str]:
    reasons = dict.fromkeys(reason for cell in cells if (reason := _reason(cell)))
    return {reason: f"({chr(ord('a') + index)})" for index, reason in enumerate(reasons)}


def _notes(cells: Sequence[AnalyticCell], marks: dict[str | None, str], facts: Published) -> Iterable[str]:
    memory = cells[0].column == QUANTITIES["memory"].title
    yield MEMORY_NOTE if memory else SENT_NOTE
    for name in dict.fromkeys(cell.row.method for cell in cells if cell.other is not None):
        method = facts.methods[name]
        yield OTHER_NOTE.format(method=name, optimizer=method.optimizer, other=method.other)
    for reason, mark in marks.items():
        first = next(cell for cell in cells if _reason(cell) == reason)
        if first.verdict.fit:
            yield f"{mark} Fits if {FITS[first.verdict.fit].text}."
        else:
            yield f"{mark} {reason}: {first.verdict.explanation}."


def metrics_table(table: PrintedTable) -> Table:
    """The printed columns that training would give, beside ours, which are not here."""
    titles = dict.fromkeys(title for row in table.rows for title in row.metrics)
    columns = ["row", *(column for title in titles for column in (title, f"{title}, here"))]
    rows = []
    for row in table.rows:
        printed = [(row.metrics.get(title, NOTHING), NOT_RUN) for title in titles]
        rows.append((row.name, *(text for pair in printed for text in pair)))
    return Table(f"{table.title}: measured by training", tuple(columns), tuple(rows), (METRICS_NOTE,))


def tally(cells: Sequence[AnalyticCell]) -> Table:
    """How many cells of each table have which status."""
    counts = Counter((cell.table, cell.verdict.status) for cell in cells)
    tables = dict.fromkeys(cell.table for cell in cells)
    rows = [(status, *(str(counts[table, status]) for table in tables)) for status in STATUSES]
    totals = [str(sum(counts[table, status] for table in tables)) for status in STATUSES]
    return Table(
        "Analytic cells of the paper's tables, by what a recomputation finds",
        ("status", *tables, "all"),
        tuple((*row, total) for row, total in zip(rows, totals, strict=True)),
    )


def head_table(ratios: Sequence[HeadRatio]) -> Table:
    """Ratios of bytes per step without and with the head."""
    return Table(
        "Bytes per step, ratio of the dense method to the low-rank one",
        ("model", "ratio of", "by definition", "all tensors"),
        tuple(
            (ratio.scale, f"{ratio.first} ÷ {ratio.second}", f"{ratio.by_definition:.1f}", f"{ratio.all_tensors:.1f}")
            for ratio in ratios
        ),
        (
            "The head is dense in the released code, as large as the embedding, and in no table of the paper: leaving "
            "it out is what makes the ratio grow.",
        ),
    )


def _unit(table: PrintedTable) -> str:
    return f"{table.unit} = {UNITS[table.unit]:.0e} bytes".replace("e+0", "e")


def _record(cell: AnalyticCell) -> dict[str, str]:
    """A line of cells.csv, in the unit of the printed figure; empty where there is no such value."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value / UNITS[cell.unit]:.6g}"

    verdict = cell.verdict
    return {
        "table": cell.table,
        "row": cell.row.name,
        "column": cell.column,
        "printed": cell.printed,
        "by_definition": number(cell.by_definition),
        "all_tensors": number(cell.all_tensors),
        "status": verdict.status,
        "unit": cell.unit,
        "with_oversampling": number(cell.oversampled),
        "second_reading": number(cell.other),
        "fitted": number(verdict.fitted),
        "fit": verdict.fit or "",
        "explanation": verdict.explanation,
    }


def _wide(table: PrintedTable, cells: Sequence[AnalyticCell]) -> list[dict[str, str]]:
    """A line for each row of the paper's table, with every reading of every checked column."""
    lines = []
    for row in table.rows:
        line = {"row": row.name, "method": row.method, "rank": row.rank, "interval": row.interval}
        line |= {f"{title}, printed": text for title, text in row.metrics.items()}
        for cell in (cell for cell in cells if cell.row == row):
            record = _record(cell)
            readings = ("printed", "by_definition", "all_tensors", "status")
            line |= {f"{cell.column}, {reading}": record[reading] for reading in readings}
        lines.append(line)
    return lines


def _write_csv(path: Path, lines: Sequence[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


if __name__ == "__main__":
    sys.exit(main())
