"""One HTML page with tables and figures in it, which needs no other file and no network."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sweep.tables import Table, rich

STYLE = """
body { max-width: 96rem; margin: 0 auto; padding: 1rem; color: #111; background: #fff;
       font: 16px/1.5 system-ui, sans-serif; }
p { max-width: 60rem; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.25rem; margin-top: 2.5rem; }
.scroll { overflow-x: auto; margin: 1rem 0 0.5rem; }
table { border-collapse: collapse; border-block: 2px solid; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: 0.4rem; overflow-wrap: anywhere; }
th, td { padding: 0.2rem 0.5rem; text-align: left; vertical-align: top; }
th { vertical-align: bottom; } thead { border-bottom: 1px solid; } tbody tr:nth-child(even) { background: #f3f3f3; }
.number { text-align: right; } td.number { white-space: nowrap; }
.note { margin: 0.3rem 0; font-size: 0.85rem; color: #333; overflow-wrap: anywhere; }
.figures { display: flex; flex-wrap: wrap; gap: 1.5rem; align-items: flex-start; }
figure { margin: 1rem 0; flex: 0 1 26rem; } figure img { width: 100%; height: auto; }
figcaption { font-size: 0.85rem; }
@page { size: landscape; margin: 1cm; }
@media print { body { max-width: none; padding: 0; font-size: 11px; } .scroll { overflow: visible; }
               table, .note, figcaption { font-size: 8px; } th, td { padding: 0.1rem 0.25rem; }
               figure { flex-basis: 8.4cm; } figure, tr { break-inside: avoid; } h2 { break-after: avoid; } }
""".strip()


@dataclass(frozen=True)
class Figure:
    """A PNG file and what it shows, which is also its text for readers who do not see it."""

    path: Path
    caption: str


@dataclass(frozen=True)
class Section:
    """A heading and below it tables and figures."""

    title: str
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()


def page(title: str, sections: Sequence[Section]) -> str:
    """The whole document: style and pictures are inside it. The same input gives the same text.

    Raises:
        ValueError: a figure's file is missing or is no PNG.
    """
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>",
            f"<h1>{rich(title)}</h1>",
            *(_section(section) for section in sections),
            "</body>\n</html>\n",
        )
    )


def _section(section: Section) -> str:
    tables = [table.html() for table in section.tables]
    figures = ['<div class="figures">', *map(_figure, section.figures), "</div>"] if section.figures else []
    return "\n".join(("<section>", f"<h2>{rich(section.title)}</h2>", *tables, *figures, "</section>"))


def _figure(figure: Figure) -> str:
    content = figure.path.read_bytes() if figure.path.is_file() else b""
    if not content.startswith(b"\x89PNG"):
        raise ValueError(f"figure '{figure.path}' {'is no PNG' if content else 'is missing or empty'}")
    image = f"data:image/png;base64,{base64.b64encode(content).decode('ascii')}"
    alternative = html.escape(figure.caption.replace("`", ""))
    return f'<figure><img alt="{alternative}" src="{image}"><figcaption>{rich(figure.caption)}</figcaption></figure>'
