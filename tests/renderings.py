"""Read back what `sweep.tables.Table` writes: the titles of the columns, and rows of (text, whether it is in bold)."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser

Read = tuple[list[str], list[list[tuple[str, bool]]]]


def read_markdown(text: str) -> Read:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    header, _, *body = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    cells = [[(cell.replace("\\", "").strip("*"), cell.startswith("**")) for cell in row] for row in body]
    return header, cells


def read_latex(text: str) -> Read:
    ((header, body),) = re.findall(r"\\toprule\n(.*) \\tabularnewline\n\\midrule\n(.*)\n\\bottomrule", text, re.DOTALL)
    titles = [
        re.sub(r"\\shortstack\[.\]\{(.*)\}", lambda found: found[1].replace(r"\\", " "), cell)
        for cell in _split(header)
    ]
    rows = [
        [(_plain(cell), cell.startswith(r"\textbf")) for cell in _split(line)]
        for line in body.split(" \\tabularnewline\n")
    ]
    return [_plain(title) for title in titles], rows


def _split(line: str) -> list[str]:
    return line.removesuffix(r" \tabularnewline").split(" & ")


def _plain(text: str) -> str:
    text = re.sub(r"\\textbf\{\\boldmath (.*)\}", r"\1", text)
    for code, character in [
        (r"$\pm$", "±"),
        (r"$\div$", "÷"),
        ("$-$", "−"),
        (r"\textbar{}", "|"),
        (r"\_", "_"),
        (r"\raggedright ", ""),
    ]:
        text = text.replace(code, character)
    return text.replace(r"\textless{}", "<").replace(r"\textgreater{}", ">")


class _Rows(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[tuple[str, bool]]] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append(("", False))
            self.inside = True
        elif tag == "strong":
            self.rows[-1][-1] = ("", True)

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            text, bold = self.rows[-1][-1]
            self.rows[-1][-1] = (text + data, bold)


def read_html(text: str) -> Read:
    parser = _Rows()
    parser.feed(text)
    header, *rows = parser.rows
    return [title for title, _ in header], rows


READERS: dict[str, Callable[[str], Read]] = {"markdown": read_markdown, "latex": read_latex, "html": read_html}
