"""Figure 6, rows of results and the report of one task, from made-up fine-tuning runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from matplotlib.lines import Line2D

from sweep.compare import comparable
from sweep.curves import COSTS, lines_by_task, task_caption, task_figure
from sweep.figures import draw_report
from sweep.glue import by_task
from sweep.results import Results
from sweep.runs import COLUMNS, find_runs, read_curves, read_runs
from sweep.style import COLUMN_WIDTH, method_style
from tests.made_up import STEPS, make_run, rows, run_report, tuned, tuned_on_two_tasks


@pytest.fixture
def two_tasks(tmp_path: Path) -> Path:
    return tuned_on_two_tasks(tmp_path / "runs")


# Figure 6.


def test_a_panel_a_task_with_the_mean_of_the_smoothed_seeds(two_tasks: Path) -> None:
    runs = read_runs(find_runs([two_tasks]))
    done = {one.task: one.done for one in by_task(runs, only_best=False, allow_edge=False, median=False)}
    curves = read_curves(runs)
    # Each run has a constant loss of its own, which no smoothing changes.
    offset = curves["run"].map(dict(zip(runs["run"], runs["seed"], strict=True))).astype(float)
    curves["train/loss"] = 1.0 + offset
    lines = lines_by_task(done)
    figure = task_figure(lines, curves, COSTS["bytes"])
    assert [panel.get_title() for panel in figure.axes] == ["stsb", "mrpc"]
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"adamw", "tsr", "beta"}
    for panel, methods, mean in zip(figure.axes, (["adamw", "beta"], ["adamw", "tsr"]), (1.5, 2.0), strict=True):
        drawn = [line for line in panel.get_lines() if line.get_linestyle() != "None"]
        assert [line.get_label() for line in drawn] == methods and panel.get_xscale() == "log"
        for line in drawn:
            assert line.get_color() == method_style(str(line.get_label()))[0]
            assert np.asarray(line.get_ydata(), dtype=float) == pytest.approx([mean] * STEPS)
        assert len(panel.collections) == len(methods)  # bands, from the lowest seed to the highest
        assert panel.collections[0].get_paths()[0].get_extents().y1 == pytest.approx(2 * mean - 1)
        markers = [line for line in panel.get_lines() if line.get_linestyle() == "None"]
        assert [len(np.asarray(line.get_xdata())) for line in markers] == [4] * len(methods)
    tsr = next(line for line in figure.axes[1].get_lines() if line.get_label() == "tsr")
    assert list(np.asarray(tsr.get_xdata(), dtype=float)) == [2_000_000 * step for step in range(1, STEPS + 1)]
    caption = task_caption(lines, COSTS["bytes"])
    assert "stsb: n = 2; mrpc: n = 3" in caption and "1/10 of its steps" in caption


def test_smoothing_is_over_a_tenth_of_a_run(tmp_path: Path) -> None:
    tuned(tmp_path / "runs" / "a")
    runs = read_runs(find_runs([tmp_path / "runs"]))
    curves = read_curves(runs)
    curves["train/loss"] = [float(step % 2) for step in curves["step"]]
    done = {"mrpc": comparable(runs, allow_mixed=False)}
    line = task_figure(lines_by_task(done), curves, COSTS["bytes"]).axes[0].get_lines()[0]
    expected = curves["train/loss"].ewm(span=STEPS / 10).mean()
    assert np.asarray(line.get_ydata(), dtype=float) == pytest.approx(expected.to_numpy())


def test_what_has_one_name_in_several_tasks_is_drawn_alike(tmp_path: Path) -> None:
    for lr in (1, 2, 3):
        tuned(tmp_path / f"m{lr}", config={"optimizer.lr": lr})
    for lr in (2, 3):
        tuned(tmp_path / f"s{lr}", task="stsb", config={"optimizer.lr": lr})
    tasks = by_task(read_runs(find_runs([tmp_path])), only_best=False, allow_edge=False, median=False)
    lines = lines_by_task({one.task: one.done for one in tasks})
    assert [len(one) for one in lines.values()] == [2, 3]
    styles = [{line.label: line.style for line in one} for one in lines.values()]
    for label, style in styles[0].items():
        assert styles[1][label] == style
    assert len({style["ls"] for style in styles[1].values()}) == 3


def test_a_method_at_its_chosen_rate_is_one_line_of_its_name_in_every_task(tmp_path: Path) -> None:
    for task, chosen in (("mrpc", 2), ("stsb", 3)):
        for lr in (1, 2, 3, 4):
            tuned(tmp_path / f"{task}{lr}", task=task, score=0.5 + (lr == chosen) / 10, config={"optimizer.lr": lr})
    tasks = by_task(read_runs(find_runs([tmp_path])), only_best=True, allow_edge=False, median=False)
    lines = lines_by_task({one.task: one.done for one in tasks})
    assert {task: [line.label for line in one] for task, one in lines.items()} == {"stsb": ["adamw"], "mrpc": ["adamw"]}
    assert [one[0].runs for one in lines.values()] == [(str(tmp_path / "stsb3"),), (str(tmp_path / "mrpc2"),)]


def test_many_tasks_stand_in_two_columns(tmp_path: Path) -> None:
    for task in ("mrpc", "stsb", "cola", "rte", "sst2"):
        tuned(tmp_path / task, task=task)
    runs = read_runs(find_runs([tmp_path]))
    tasks = by_task(runs, only_best=False, allow_edge=False, median=False)
    figure = task_figure(lines_by_task({one.task: one.done for one in tasks}), read_curves(runs), COSTS["bytes"])
    assert [panel.get_title() for panel in figure.axes] == ["cola", "stsb", "mrpc", "rte", "sst2"]
    assert figure.get_figwidth() == 2 * COLUMN_WIDTH


# Rows of results, and the report of one task.


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_of_results_names_metric_and_split_and_a_pretraining_has_no_such_column(tmp_path: Path) -> None:
    Results(str(tmp_path / "glue.csv")).add(tuned(tmp_path / "a", score=0.8))
    Results(str(tmp_path / "glue.csv")).add(tuned(tmp_path / "b", "tsr", "stsb", score=None))
    first, second = read_csv(tmp_path / "glue.csv")
    names = ("task", "eval/split", "eval/metric", "eval/score", "eval/f1", "eval/examples")
    assert [first[name] for name in names] == ["mrpc", "validation", "f1", "0.8", "0.8", "400"]
    assert [second[name] for name in names[:4]] == ["stsb", "validation", "pearson", ""]
    Results(str(tmp_path / "plain.csv")).add(make_run(tmp_path / "p"))
    (row,) = read_csv(tmp_path / "plain.csv")
    others = {name for name in row if not name.startswith("config/")} - {"overrides"}
    assert others == set(COLUMNS)
    read = read_runs([tmp_path / "plain.csv"])
    assert read[["task", "eval/metric", "eval/score"]].isna().all(axis=None)


@pytest.mark.usefixtures("no_figure")
def test_the_report_of_one_task_shows_scores_in_the_place_of_perplexity(tmp_path: Path) -> None:
    for seed in range(2):
        tuned(tmp_path / "runs" / f"a{seed}", seed=seed, score=0.8 + seed / 50, loss=1.0)
        tuned(tmp_path / "runs" / f"t{seed}", "tsr", seed=seed, score=0.9 + seed / 50, loss=1.2)
    code, out = run_report(tmp_path / "runs")
    text = (out / "table.md").read_text()
    adamw, tsr = rows(text)
    assert code == 0 and "perplexity" not in text
    titles = list(tsr)
    assert titles[titles.index("eval loss") + 1 :][:3] == ["f1 (×100)", "gap to adamw (points)", "accuracy (×100)"]
    assert (adamw["f1 (×100)"], tsr["f1 (×100)"]) == ("81.00 ± 1.41", "**91.00 ± 1.41**")
    assert (tsr["accuracy (×100)"], tsr["gap to adamw (points)"]) == ("**90.00 ± 1.41**", "+10.00 ± 1.41")
    assert (adamw["eval loss"], tsr["eval loss"]) == ("**1.000**", "1.200")  # which is low where it is good
    assert list(pd.read_csv(out / "table.csv")["eval/metric"]) == ["f1"] * 4


@pytest.mark.usefixtures("no_figure")
def test_a_run_of_another_task_is_no_missing_seed(tmp_path: Path) -> None:
    tuned(tmp_path / "runs" / "a")
    tuned(tmp_path / "runs" / "b", task="stsb")
    tuned(tmp_path / "runs" / "c", task="stsb", seed=1, summary={"status": "failed", "error": "NonFiniteGradient"})
    code, out = run_report(tmp_path / "runs", "--allow-mixed")
    table = rows((out / "table.md").read_text())
    assert code == 0
    assert {"task=stsb" in row["mixed"]: row["n"] for row in table} == {True: "1 of 2", False: "1"}


@pytest.mark.usefixtures("no_figure")
def test_the_report_of_a_pretraining_has_no_column_of_scores(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a")
    _, out = run_report(tmp_path / "runs")
    header = (out / "table.csv").read_text().splitlines()[0].split(",")
    assert header == [*COLUMNS, "comm/bytes_per_step/adamw", "paper/comm/bytes_per_step/adamw"]
    (row,) = rows((out / "table.md").read_text())
    assert "perplexity" in row and "gap to adamw (nats)" in row


def test_further_embeddings_count_among_the_embeddings_of_the_split(tmp_path: Path) -> None:
    split = {"embedding": 5, "other_embedding": 2, "linear": 1, "head": 0, "vector": 0}
    roles = {"dense": {kind: count * STEPS * 1_000_000 for kind, count in split.items()}}
    tuned(tmp_path / "runs" / "a", summary={"comm/by_role": roles})
    runs = comparable(read_runs(find_runs([tmp_path / "runs"])), allow_mixed=False)
    (drawn,) = draw_report(runs, None, tmp_path / "out", only=["bytes_by_kind"])
    assert drawn.caption.endswith(" other_embedding counts as embedding.")
    assert matplotlib.image.imread(drawn.png).shape[1] == COLUMN_WIDTH * 300
    del roles["dense"]["other_embedding"]
    summary = tmp_path / "runs" / "a" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"comm/by_role": roles}))
    with pytest.raises(ValueError, match="add up to"):
        draw_report(
            comparable(read_runs(find_runs([tmp_path / "runs"])), allow_mixed=False),
            None,
            tmp_path / "out",
            only=["bytes_by_kind"],
        )


def test_axes_of_fine_tuning_do_not_say_per_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "b")
    labels: list[str] = []

    def save(figure: Any, *_: Any) -> Line2D:
        labels.extend(panel.get_ylabel() for panel in figure.axes)
        return Line2D([], [])

    monkeypatch.setattr("sweep.figures.save", save)
    for name, expected in (("a", "final loss (mean over examples)"), ("b", "final loss (nats per token)")):
        runs = comparable(read_runs([tmp_path / "runs" / name]), allow_mixed=False)
        draw_report(runs, None, tmp_path / "out", only=["loss_vs_bytes_per_step"])
        assert set(labels) == {expected}
        labels.clear()
