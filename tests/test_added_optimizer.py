"""An optimizer from outside the project trains, is counted and stands in tables and figures, by its name alone."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from sweep import figures, report, style
from sweep.runs import METHOD_ORDER
from tests.cli import PROJECT, run, tiny_job

MODULE = """
import tsr
from tsr.refresh import METHODS
from tsr.subspace import Basis, orthonormalise

def half_sketch(tasks, rule, average):
    rights = [orthonormalise(task.start[:, : task.rank]) for task in tasks]
    images = average([task.gradient @ right for task, right in zip(tasks, rights)], "sketch")
    return [Basis(orthonormalise(image), right) for image, right in zip(images, rights)]

METHODS["half_sketch"], build = half_sketch, tsr.build
"""
CHOICES = """
# @package _global_
defaults: [tsr]
optimizer: {name: half_sketch, _target_: half_sketch.build}
refresh: {method: half_sketch}
"""


@pytest.mark.distributed
def test_it_shows_up_everywhere_without_a_change_to_the_project(tmp_path: Path) -> None:
    (tmp_path / "half_sketch.py").write_text(MODULE)
    (tmp_path / "conf" / "optimizer").mkdir(parents=True)
    (tmp_path / "conf" / "optimizer" / "half_sketch.yaml").write_text(CHOICES)
    assert len(MODULE.strip().splitlines()) <= 10 and "half_sketch" not in METHOD_ORDER
    assert not [path for path in (PROJECT / "sweep").glob("*.py") if "half_sketch" in path.read_text()]

    results = tmp_path / "results.csv"
    status, text = run(
        *("-m", *tiny_job(tmp_path), "optimizer=adamw,tsr,half_sketch", f"hydra.searchpath=[file://{tmp_path}/conf]"),
        f"results={results}",
        PYTHONPATH=str(tmp_path),
    )
    assert status == 0, text

    for source, out in ((tmp_path / "runs", tmp_path / "report"), (results, tmp_path / "from_csv")):
        assert report.main([str(source), "--out", str(out)]) == 0
        table = pd.read_csv(out / "table.csv").set_index("method")
        sent = table["comm/bytes_per_step"]
        assert set(table.index) == {"adamw", "tsr", "half_sketch"}
        assert sent["half_sketch"] < sent["tsr"] < sent["adamw"], "half a sketch is less than a whole one"
        for name in ("table.md", "table.tex", "report.html"):
            assert "half" in (out / name).read_text(encoding="utf-8")

    shown: dict[str, str] = {}

    def save(figure: Figure, out: Path, name: str, caption: str) -> style.Drawn:
        shown[name] = " ".join(text.get_text() for text in figure.findobj(Text) if isinstance(text, Text))
        return style.save(figure, out, name, caption)

    with mock.patch.object(figures, "save", save):
        assert figures.main([str(tmp_path / "runs"), "--out", str(tmp_path / "figures")]) == 0
    expected = {"loss_vs_bytes", "loss_vs_tokens", "loss_vs_seconds", "loss_vs_bytes_per_step", "bytes_by_kind"}
    assert expected <= set(shown)
    assert all("half_sketch" in text for name, text in shown.items() if name in expected)
