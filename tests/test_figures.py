"""Figures of small, made-up run directories: what is drawn is what is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import same_color, to_rgb
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from sweep.ablations import ABLATIONS, ablation_lines, find_ablation
from sweep.compare import comparable
from sweep.curves import COSTS, TRAIN, lines_by_label, loss_caption, loss_figure
from sweep.figures import draw_report, main
from sweep.runs import KINDS, find_runs, read_curves, read_runs
from sweep.style import COLUMN_WIDTH, OTHER_COLOURS, RC, STYLES, method_style
from sweep.totals import pareto_caption, pareto_figure, pareto_front, split_figure
from tests.made_up import STEPS, TOKENS, make_run

EVALUATED = (10, 20, 30, 40)
BYTES = {"embedding": 2_000_000, "linear": 4_000_000, "head": 1_500_000, "vector": 500_000}  # per step
LOW_RANK = {"subspace.linear": "two_sided", "subspace.embedding": "two_sided", "refresh.method": "sketch"}


def make(
    path: Path,
    method: str = "adamw",
    *,
    by_kind: dict[str, int] = BYTES,
    config: dict[str, Any] | None = None,
    drop: str | None = None,
    **more: Any,
) -> Path:
    """A run of `make_run` that sends `by_kind` bytes a step; `drop` leaves a key out of its metrics.jsonl."""
    sent = sum(by_kind.values())
    summary = {
        "paper/comm/bytes_per_step": by_kind["embedding"] + by_kind["linear"],
        "comm/by_role": {"dense": {kind: count * STEPS for kind, count in by_kind.items()}},
    }
    settings = {"rank.linear": 16, "refresh.linear": 100, **(config or {})}
    make_run(path, method, step_bytes=sent, config=settings, summary=summary, **more)
    if drop:
        metrics = path / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        kept = [{key: value for key, value in row.items() if key != drop} for row in rows]
        metrics.write_text("".join(json.dumps(row) + "\n" for row in kept))
    return path


def read(folder: Path, *, allow_mixed: bool = False) -> tuple[pd.DataFrame, pd.DataFrame]:
    done = comparable(read_runs(find_runs([folder])), allow_mixed=allow_mixed)
    return done, read_curves(done)


@pytest.fixture
def methods(tmp_path: Path) -> Path:
    """AdamW with one seed, TSR with three at a quarter of the bytes, and a method that no module names."""
    make(tmp_path / "runs" / "adamw")
    for seed, loss in enumerate((3.9, 4.3, 4.1)):
        by_kind = {kind: count // 4 for kind, count in BYTES.items()}
        make(tmp_path / "runs" / f"tsr_{seed}", "tsr", seed=seed, loss=loss, by_kind=by_kind)
    make(tmp_path / "runs" / "beta", "beta", loss=4.5)
    return tmp_path / "runs"


def line(panel: Axes, label: str) -> Line2D:
    (found,) = [line for line in panel.get_lines() if line.get_label() == label]
    return found


def data(drawn: Line2D) -> tuple[np.ndarray, np.ndarray]:
    x, y = drawn.get_data()
    return np.asarray(x, dtype=float), np.asarray(y, dtype=float)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_everything_that_runs_allow_is_drawn(methods: Path, tmp_path: Path) -> None:
    runs, curves = read(methods)
    drawn = draw_report(runs, curves, tmp_path / "out")
    names = ["loss_vs_bytes", "loss_vs_tokens", "loss_vs_seconds", "loss_vs_bytes_per_step", "bytes_by_kind"]
    assert [one.name for one in drawn] == names
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        f"{n}.{kind}" for n in names for kind in ("png", "pdf")
    }
    for one in drawn:
        assert one.png.parent == one.pdf.parent == tmp_path / "out"
        assert ("mean" in one.caption) == ("(n = " in one.caption)
        image = matplotlib.image.imread(one.png)
        assert image.shape[1] == COLUMN_WIDTH * 300
        assert one.pdf.read_bytes().startswith(b"%PDF")
    assert [one.name for one in draw_report(runs, None, tmp_path / "less")] == names[3:]


@pytest.mark.parametrize(("cost", "per_step"), [("bytes", 2_000_000), ("tokens", TOKENS), ("seconds", 2.0)])
def test_a_line_is_the_mean_of_its_seeds(methods: Path, cost: str, per_step: float) -> None:
    runs, curves = read(methods)
    curves["time/step_s"] = curves["run"].map(dict(zip(runs["run"], 1.0 + runs["seed"], strict=True)))
    lines = lines_by_label(runs)
    (panel,) = loss_figure(lines, curves, COSTS[cost]).axes
    x, y = data(line(panel, "tsr"))
    assert x == pytest.approx([per_step * step for step in EVALUATED])
    assert y == pytest.approx([4.1 + 2 / step - 2 / STEPS for step in EVALUATED])
    (band,) = panel.collections  # of TSR: the others have one seed
    corners = band.get_paths()[0].vertices
    assert isinstance(corners, np.ndarray)
    for step in EVALUATED:
        ys = corners[np.isclose(corners[:, 0], per_step * step), 1]
        assert (ys.min(), ys.max()) == pytest.approx((3.9 + 2 / step - 2 / STEPS, 4.3 + 2 / step - 2 / STEPS))
    caption = loss_caption(lines, COSTS[cost])
    assert "n = 1, but 3 for tsr" in caption and "lowest to the highest" in caption


def test_training_loss_is_smoothed_and_starts_at_the_first_step(methods: Path) -> None:
    runs, _ = read(methods)
    steps = np.arange(1, 1001)
    curve = pd.DataFrame({"run": runs["run"][0], "step": steps, "tokens": 100 * steps})
    curve["train/loss"] = curve["eval/loss"] = np.where(steps % 2, 5.0, 4.0) + (steps > 500)
    (panel,) = loss_figure(lines_by_label(runs.head(1)), curve, COSTS["tokens"]).axes
    train, evaluated = panel.get_lines()
    assert list(data(evaluated)[1]) == list(curve["eval/loss"])
    x, y = data(train)
    assert list(x) == list(100 * steps) and y[0] == 5.0
    assert y[100:500] == pytest.approx(4.5, abs=0.1) and y[-1] == pytest.approx(5.5, abs=0.1)


def test_axes_have_units_and_legends_name_all(methods: Path) -> None:
    runs, curves = read(methods)
    for name, unit in {"bytes": "(bytes)", "tokens": "(tokens)", "seconds": "(s)"}.items():
        figure = loss_figure(lines_by_label(runs), curves, COSTS[name])
        (panel,) = figure.axes
        assert panel.xaxis.get_major_formatter()(2_000_000) == "2M"
        assert unit in panel.get_xlabel() and "nats" in panel.get_ylabel()
        assert texts(figure) == ["adamw", "tsr", "beta", TRAIN]
    for panel in pareto_figure(runs).axes:
        assert "nats" in panel.get_ylabel() and panel.get_title()
    assert "(bytes)" in pareto_figure(runs).axes[-1].get_xlabel()
    assert "(bytes)" in split_figure(runs).axes[0].get_xlabel()
    assert texts(split_figure(runs)) == list(KINDS)


def test_settings_of_a_method_differ_in_dashes_or_filling(tmp_path: Path) -> None:
    for rank in range(1, 9):
        make(tmp_path / "runs" / str(rank), "tsr", config={"rank.linear": rank})
    lines = lines_by_label(read(tmp_path / "runs")[0])
    assert [one.label for one in lines] == [f"tsr rank.linear={rank}" for rank in range(1, 9)]
    assert {one.style["color"] for one in lines} == {STYLES["tsr"][0]}
    assert len({(one.style["ls"], one.style["fillstyle"]) for one in lines}) == len(lines)


def test_a_method_has_one_colour_in_every_figure(methods: Path) -> None:
    runs, curves = read(methods)
    assert method_style("beta")[0] in OTHER_COLOURS
    panels = [loss_figure(lines_by_label(runs), curves, cost).axes[0] for cost in COSTS.values()]
    scatter = pareto_figure(runs)
    for method in ("adamw", "tsr", "beta"):
        colours = [line(panel, method).get_color() for panel in panels]
        (entry,) = [handle for handle in scatter.legends[0].legend_handles if handle and handle.get_label() == method]
        assert isinstance(entry, Line2D)
        assert {*colours, entry.get_color()} == {method_style(method)[0]}
        for panel in scatter.axes:
            drawn = [one for one in panel.containers if isinstance(one, ErrorbarContainer)]
            assert sum(same_color(one.lines[0].get_color(), method_style(method)[0]) for one in drawn) == 1


def test_colours_differ_between_known_methods() -> None:
    assert len({colour for colour, _ in STYLES.values()}) == len(STYLES)
    assert len({method_style(f"method{index}") for index in range(40)}) > 20


def test_pareto_front() -> None:
    points = [(1, 5.0), (2, 5.0), (2, 4.0), (3, 4.5), (4, 3.0), (4, 3.5), (9, 3.0)]
    assert pareto_front(points) == [(1, 5.0), (2, 4.0), (4, 3.0)]


def test_final_loss_against_bytes_per_step(methods: Path) -> None:
    runs, _ = read(methods)
    figure = pareto_figure(runs)
    for panel, sent in zip(figure.axes, ((8e6, 2e6), (6e6, 1.5e6)), strict=True):  # adamw and tsr; all, paper
        drawn = [one for one in panel.containers if isinstance(one, ErrorbarContainer)]
        points = np.array([np.concatenate(data(one.lines[0])) for one in drawn if one.lines[0]])
        assert points == pytest.approx(np.array([(sent[0], 4.0), (sent[1], 4.1), (sent[0], 4.5)]))
        ((low, high),) = [segment[:, 1] for one in drawn if one.has_yerr for segment in one.lines[2][0].get_segments()]
        assert (low, high) == pytest.approx((3.9, 4.3))  # 4.1 ± 0.2, only where there are several seeds
        front = line(panel, "_front")
        assert front.get_drawstyle() == "steps-post"
        assert np.array(data(front)) == pytest.approx(np.array([(sent[1], sent[0]), (4.1, 4.0)]))
    assert "n = 1, but 3 for tsr" in pareto_caption(runs)


def test_fronts_join_only_what_compares(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "a", loss=4.0)
    make(tmp_path / "runs" / "b", loss=3.0, config={"model.name": "llama_9m"})
    runs, _ = read(tmp_path / "runs", allow_mixed=True)
    figure = pareto_figure(runs)
    fronts = [one for one in figure.axes[0].get_lines() if one.get_label() == "_front"]
    assert sorted(data(one)[1][0] for one in fronts) == [3.0, 4.0]
    assert texts(figure) == ["adamw", "Pareto front model=llama_9m", "Pareto front model=llama_tiny"]


def test_bars_add_up_to_the_bytes_per_step(methods: Path) -> None:
    runs, _ = read(methods)
    (panel,) = split_figure(runs).axes
    bars = [list(container) for container in panel.containers]  # a container a kind, a bar a setting
    for kind, of_kind in zip(KINDS, bars, strict=True):
        assert [bar.get_width() for bar in of_kind] == [BYTES[kind], BYTES[kind] / 4, BYTES[kind]]
    for setting, total in zip(zip(*bars, strict=True), (8e6, 2e6, 8e6), strict=True):
        ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in setting]
        assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])] and ends[-1][1] == total
    assert len({of_kind[0].get_hatch() for of_kind in bars}) == len(KINDS)
    written = [text.get_text() for text in panel.texts]
    assert written == ["adamw", "8.00M", "tsr", "2.00M", "beta", "8.00M"]


def test_bytes_that_do_not_add_up_are_an_error(methods: Path) -> None:
    runs, _ = read(methods)
    with pytest.raises(ValueError, match="adamw: comm/bytes_per_step/embedding"):
        split_figure(runs.assign(**{"comm/bytes_per_step/head": 0.0}))
    with pytest.raises(ValueError, match=r"adamw: .* missing"):
        split_figure(runs.assign(**{f"comm/bytes_per_step/{kind}": None for kind in KINDS}))
    split_figure(
        runs.assign(
            **{"comm/bytes_per_step/vector": None, "comm/bytes_per_step": runs["comm/bytes_per_step"] * 15 / 16}
        )
    )
    for column in ("eval/loss", "paper/comm/bytes_per_step"):
        with pytest.raises(ValueError, match=f"tsr_0: no '{column}'"):
            pareto_figure(runs.assign(**{column: runs[column].where(runs["run"] != str(methods / "tsr_0"))}))


@pytest.mark.parametrize("key", ["eval/loss", "train/loss", "comm/total_bytes", "tokens", "time/step_s"])
def test_a_missing_curve_is_an_error(tmp_path: Path, key: str) -> None:
    make(tmp_path / "runs" / "a")
    bad = make(tmp_path / "runs" / "b", "tsr", drop=key)
    runs, curves = read(tmp_path / "runs")
    with pytest.raises(ValueError, match=rf"{bad}/metrics.jsonl: .*'{key}'"):
        draw_report(runs, curves, tmp_path / "out")


def test_a_run_without_a_curve_or_a_second_is_an_error(methods: Path, tmp_path: Path) -> None:
    runs, curves = read(methods)
    with pytest.raises(ValueError, match=r"beta/metrics.jsonl: this run has no curve"):
        draw_report(runs, curves[curves["run"] != str(methods / "beta")], tmp_path / "out")
    gap = curves.assign(**{"time/step_s": curves["time/step_s"].where(curves["step"] != 7)})
    with pytest.raises(ValueError, match="step 7 lacks 'time/step_s'"):
        draw_report(runs, gap, tmp_path / "out", only=["loss_vs_seconds"])
    odd = curves[(curves["run"] != str(methods / "tsr_1")) | (curves["step"] % 2 == 1)].copy()
    odd.loc[odd["run"] == str(methods / "tsr_1"), "eval/loss"] = 4.0
    with pytest.raises(ValueError, match="no step with 'eval/loss' is common to the seeds of tsr"):
        draw_report(runs, odd, tmp_path / "out", only=["loss_vs_tokens"])


def test_the_same_runs_give_the_same_files(methods: Path, tmp_path: Path) -> None:
    runs, curves = read(methods)
    some = ["loss_vs_bytes", "bytes_by_kind"]
    first, second = (draw_report(runs, curves, tmp_path / out, only=some) for out in "ab")
    for one, other in zip(first, second, strict=True):
        assert one.pdf.read_bytes() == other.pdf.read_bytes() and one.png.read_bytes() == other.png.read_bytes()
        assert one.caption == other.caption


def make_ablation(folder: Path, **varied: list[Any]) -> None:
    """TSR at each of the values of the keys (dots written `__`) that vary together, all else equal."""
    keys = [key.replace("__", ".") for key in varied]
    for values in zip(*varied.values(), strict=True):
        name = "_".join(map(str, values))
        make(folder / name, "tsr", config={**LOW_RANK, **dict(zip(keys, values, strict=True))})


@pytest.mark.parametrize(
    ("name", "varied", "labels"),
    [
        (
            "ablation_sided",
            {
                "subspace__linear": ["two_sided", "two_sided", "one_sided", "dense"],
                "subspace__embedding": ["one_sided", "two_sided", "one_sided", "dense"],
            },
            ["one_sided", "two_sided"],
        ),
        ("ablation_refresh", {"refresh__method": ["sketch", "svd"]}, ["sketch", "svd"]),
        ("ablation_interval", {"refresh__linear": [100, 20, 50, 200]}, ["20", "50", "100", "200"]),
        ("ablation_rank", {"rank__linear": [8, 16, 4]}, ["4", "8", "16"]),
        ("ablation_embedding", {"subspace__embedding": ["two_sided", "dense"]}, ["dense", "two_sided"]),
    ],
)
def test_an_ablation_is_drawn_where_nothing_else_differs(
    tmp_path: Path, name: str, varied: dict[str, list[Any]], labels: list[str]
) -> None:
    make_ablation(tmp_path / "runs", **varied)
    runs, curves = read(tmp_path / "runs")
    assert [one for one in ABLATIONS if find_ablation(runs, ABLATIONS[one])] == [name]
    (group,) = find_ablation(runs, ABLATIONS[name])
    lines = ablation_lines(group)
    assert [one.label for one in lines] == labels
    expected = [str(tmp_path / "runs" / "_".join([label] * len(varied))) for label in labels]
    assert [run for one in lines for run in one.runs] == expected
    assert len({one.style["color"] for one in lines}) == len({one.style["marker"] for one in lines}) == len(labels)
    (drawn,) = draw_report(runs, curves, tmp_path / "out", only=[name])
    assert drawn.name == name and drawn.png.exists() and "n = 1" in drawn.caption
    assert drawn.caption.startswith(f"tsr, by {ABLATIONS[name].title}.")


def test_an_ablation_pools_seeds_and_needs_all_else_equal(tmp_path: Path) -> None:
    for interval in (20, 50):
        for seed in (0, 1):
            for rate in (0.01, 0.02):
                config = {
                    "refresh.linear": interval,
                    "optimizer.lr": rate,
                    "lookup.rates": rate,
                    "data.cache_dir": str(seed),
                }
                make(tmp_path / "runs" / f"{interval}_{seed}_{rate}", "tsr", seed=seed, config=config)
    make(tmp_path / "runs" / "other", "tsr", config={"refresh.linear": 100, "optimizer.lr": 0.01, "trainer.steps": 7})
    make(tmp_path / "runs" / "adamw", config={"refresh.linear": 200, "optimizer.eps": 1e-8})
    runs, curves = read(tmp_path / "runs")
    groups = find_ablation(runs, ABLATIONS["ablation_interval"])
    assert [[len(one.runs) for one in ablation_lines(group)] for group in groups] == [[2, 2], [2, 2]]
    drawn = draw_report(runs, curves, tmp_path / "out", only=["ablation_interval"])
    assert [one.name for one in drawn] == ["ablation_interval_1", "ablation_interval_2"]
    for one, rate in zip(drawn, (0.01, 0.02), strict=True):
        assert f"optimizer.lr={rate}" in one.caption and "n = 2" in one.caption


def test_a_dense_embedding_must_be_among_those_compared(tmp_path: Path) -> None:
    make_ablation(tmp_path / "runs", subspace__embedding=["one_sided", "two_sided"])
    runs, _ = read(tmp_path / "runs")
    assert not any(find_ablation(runs, ablation) for ablation in ABLATIONS.values())


def test_an_ablation_goes_by_settings_and_not_by_names(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "a", "tsr", config={**LOW_RANK, "refresh.method": "svd"})
    make(tmp_path / "runs" / "b", "tsr_sketch", config=LOW_RANK)
    make(tmp_path / "runs" / "c", "tsr_svd", config={**LOW_RANK, "refresh.method": "svd"})
    runs, _ = read(tmp_path / "runs")
    (group,) = find_ablation(runs, ABLATIONS["ablation_refresh"])
    assert [(one.label, len(one.runs)) for one in ablation_lines(group)] == [("sketch", 1), ("svd", 1)]


def test_the_command(methods: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([str(methods), "--out", str(out), "--only", "loss_vs_bytes", "bytes_by_kind"]) == 0
    assert {file.stem for file in out.iterdir()} == {"loss_vs_bytes", "bytes_by_kind"}
    assert f"{out / 'bytes_by_kind.png'}: Bytes" in capsys.readouterr().out
    assert main([str(methods), "--out", str(out), "--only", "ablation_interval"]) == 1
    error = capsys.readouterr().err
    assert "ablation_interval: needs runs that differ in refresh.linear" in error and "refresh.linear=100" in error
    with pytest.raises(SystemExit):
        main([str(methods), "--out", str(out), "--only", "nonsense"])
    make(methods / "mixed", "galore", config={"model.name": "llama_9m"})
    assert main([str(methods), "--out", str(out)]) == 1 and "--allow-mixed" in capsys.readouterr().err
    assert main([str(methods), "--out", str(out), "--only", "loss_vs_bytes_per_step", "--allow-mixed"]) == 0


def test_the_best_setting_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rate, loss in {0.01: 4.2, 0.02: 4.0, 0.03: 4.3}.items():
        make(tmp_path / "runs" / str(rate), "tsr", loss=loss, config={"optimizer.lr": rate})
    drawn: list[pd.DataFrame] = []

    def note(runs: pd.DataFrame, *_: Any, **__: Any) -> list[Any]:
        drawn.append(runs)
        return []

    monkeypatch.setattr("sweep.figures.draw_report", note)
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--best"]) == 0
    assert list(drawn[0]["lr"]) == [0.02]
    make(tmp_path / "runs" / "0.04", "tsr", loss=3.0, config={"optimizer.lr": 0.04})
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--best"]) == 1
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--best", "--allow-edge"]) == 0
    assert list(drawn[1]["lr"]) == [0.04]
    assert [one.label for one in lines_by_label(drawn[0])] == ["tsr"]


def test_rows_of_a_csv_draw_what_needs_no_curve(
    methods: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read_runs(find_runs([methods])).to_csv(tmp_path / "results.csv", index=False)
    out = tmp_path / "out"
    assert main([str(tmp_path / "results.csv"), "--out", str(out)]) == 0
    assert {file.stem for file in out.iterdir()} == {"loss_vs_bytes_per_step", "bytes_by_kind"}
    assert main([str(tmp_path / "results.csv"), "--out", str(out), "--only", "loss_vs_bytes"]) == 1
    assert "loss_vs_bytes: needs curves" in capsys.readouterr().err


def boxes(figure: Figure) -> dict[str, Bbox]:
    """Where the texts of a figure are drawn, in pixels, by text and place."""
    figure.set_dpi(300)
    figure.draw_without_rendering()
    shown = [*figure.legends[0].get_texts(), figure.legends[0].get_title()]
    for panel in figure.axes:
        shown += [panel.title, panel.xaxis.label, panel.yaxis.label, *panel.texts]
        for axis in (panel.xaxis, panel.yaxis):
            low, high = sorted(axis.get_view_interval())
            shown += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    found = ((text.get_text(), text.get_window_extent()) for text in shown if text.get_text() and text.get_visible())
    return {f"{text} at {box.x0:.0f}, {box.y0:.0f}": Bbox(box.get_points()) for text, box in found}


def test_no_texts_overlap_and_all_are_inside(methods: Path) -> None:
    long = {
        "rank.linear": 8,
        "optimizer.lr": 0.02,
        "trainer.a_long_key": "a_long_value",
        "trainer.another_key": "value",
    }
    make(methods / "long", "tsr", config=long)
    runs, curves = read(methods)
    lines = lines_by_label(runs)
    with mpl.rc_context(RC):
        figures = [loss_figure(lines, curves, cost) for cost in COSTS.values()]
        for figure in [*figures, pareto_figure(runs), split_figure(runs)]:
            found = boxes(figure)
            assert len(found) > 10
            for name, box in found.items():
                width, height = figure.bbox.size
                assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, name
                # Two pixels of 300 an inch: lines of one text are closer to each other than this anyway.
                others = [other for other, its in found.items() if other != name and box.overlaps(its.padded(-2))]
                assert not others, (name, others)


def test_text_is_at_least_seven_points(methods: Path) -> None:
    runs, curves = read(methods)
    with mpl.rc_context(RC):
        for figure in (
            loss_figure(lines_by_label(runs), curves, COSTS["bytes"]),
            pareto_figure(runs),
            split_figure(runs),
        ):
            assert all(float(text.get_fontsize()) >= 7 for text in figure.findobj(Text))


def has_colour(image: np.ndarray, colour: str) -> bool:
    distance = np.abs(image[..., :3] - np.array(to_rgb(colour))).max(axis=-1)
    return int((distance < 0.02).sum()) > 50


def test_the_files_show_every_method_in_its_colour(methods: Path, tmp_path: Path) -> None:
    runs, curves = read(methods)
    for drawn in draw_report(runs, curves, tmp_path / "out", only=["loss_vs_bytes", "loss_vs_bytes_per_step"]):
        image = matplotlib.image.imread(drawn.png)
        for method in ("adamw", "tsr", "beta"):
            assert has_colour(image, method_style(method)[0]), (drawn.name, method)
        assert not has_colour(image, method_style("galore")[0])
