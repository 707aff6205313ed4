"""How figures look: a method's colour and marker, sizes, legends, axes of bytes, and the two files of a figure.

A method has the same colour in every figure of the project.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Colours of Okabe and Ito, which people with any common colour blindness can tell apart.
STYLES = {
    "adamw": ("#000000", "o"),
    "galore": ("#E69F00", "s"),
    "one_sided": ("#56B4E9", "^"),
    "tsr": ("#D55E00", "D"),
    "tsr_paper": ("#009E73", "v"),
    "tsr_svd": ("#CC79A7", "P"),
}
# For every other method, from the "muted" scheme of Paul Tol, which is made for the same readers.
OTHER_COLOURS = ("#332288", "#117733", "#999933", "#882255", "#AA4499", "#44AA99")
OTHER_MARKERS = ("X", "p", "h", "<", ">", "*", "d")

DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (7, 1.5, 1, 1.5, 1, 1.5)), (0, (8, 3)))
FILLS = ("full", "none")  # of markers

COLUMN_WIDTH = 3.3  # inches
PANEL_HEIGHT = 1.8  # inches
LINE_LENGTH = 48  # characters of a legend that fit into the column
LINE_HEIGHT = 0.15  # inches
FONT = {
    **{"font.size": 7.5, "axes.labelsize": 7.5, "axes.titlesize": 7.5, "legend.title_fontsize": 7},
    **{"legend.fontsize": 7, "xtick.labelsize": 7, "ytick.labelsize": 7},
}
SPINES = {"axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6}
RC: dict[Any, Any] = {  # 42: text in the PDF stays text
    **{**FONT, **SPINES, "pdf.fonttype": 42, "savefig.dpi": 300, "hatch.linewidth": 0.5},
    **{"axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.25, "grid.linewidth": 0.4},
}


@dataclass(frozen=True)
class Drawn:
    """A figure in its two files, and the text that stands below it."""

    name: str
    caption: str
    png: Path
    pdf: Path


def method_style(method: str) -> tuple[str, str]:
    """(colour, marker) of a method: from its name alone, so that it never depends on which other runs there are."""
    rest, colour = divmod(crc32(method.encode()), len(OTHER_COLOURS))
    return STYLES.get(method, (OTHER_COLOURS[colour], OTHER_MARKERS[rest % len(OTHER_MARKERS)]))


def variant_style(index: int) -> dict[str, Any]:
    """Dashes and filling of the marker for the settings of one method, in their order."""
    return {"ls": DASHES[index % len(DASHES)], "fillstyle": FILLS[index // len(DASHES) % len(FILLS)]}


def new_figure(*, panels: int = 1, rows: float = 0) -> Figure:
    """An empty figure of column width, as high as `panels` and a legend of `rows` lines (see `legend_rows`) need."""
    from matplotlib.figure import Figure

    height = 0.1 + LINE_HEIGHT * rows + PANEL_HEIGHT * panels
    return Figure(figsize=(COLUMN_WIDTH, height), layout="constrained")


def legend_columns(labels: Sequence[str]) -> int:
    """How many columns of `labels` fit side by side."""
    return max(1, min(3, LINE_LENGTH // max(map(len, labels))))


def legend_rows(labels: Sequence[str]) -> int:
    """How many lines a legend of `labels` has."""
    return math.ceil(sum(wrap(label).count("\n") + 1 for label in labels) / legend_columns(labels))


def add_legend(figure: Figure, handles: Sequence[Artist], *, title: str | None = None) -> None:
    """The legend above the panels, in as many columns as fit; long labels are wrapped."""
    labels = [str(handle.get_label()) for handle in handles]
    figure.legend(
        handles=handles,
        labels=[wrap(label) for label in labels],
        title=title,
        loc="outside upper center",
        ncols=legend_columns(labels),
        frameon=False,
        handlelength=2.2,
    )


def wrap(text: str, width: int = LINE_LENGTH) -> str:
    """`text` in lines of at most `width` characters."""
    return textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False)


def format_bytes(axis: Axis) -> None:
    """Label an axis of bytes as the tables do (10M, 1G), with two to about six labels if it is logarithmic."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axis.set_major_formatter(EngFormatter(sep=""))
    if axis.get_scale() == "log":
        low, high = axis.get_view_interval()
        decades = math.log10(high / low)
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2 else (1, 3) if decades < 3 else (1,)))
        axis.set_minor_formatter(NullFormatter())


def save(figure: Figure, out: Path, name: str, caption: str) -> Drawn:
    """Write `name`.png and `name`.pdf into `out`; the same figure gives the same files."""
    out.mkdir(parents=True, exist_ok=True)
    drawn = Drawn(name, caption, out / f"{name}.png", out / f"{name}.pdf")
    figure.savefig(drawn.png)
    figure.set_layout_engine("none")  # the same layout again, without the time to find it
    figure.savefig(drawn.pdf, metadata={"CreationDate": None})
    return drawn
