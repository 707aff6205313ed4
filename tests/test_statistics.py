"""What a report claims of losses: means with their n, what is bold, gaps, missing seeds, the best setting."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sweep.compare import comparable, missing_seeds, with_ratios
from sweep.report import table_of
from sweep.runs import find_runs, read_runs
from tests.made_up import make_run, rows, run_report
from tests.renderings import READERS


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """Runs of four methods at three seeds, to be given other losses: reading them takes longer than the table."""
    folder = tmp_path_factory.mktemp("seeds")
    for method in ("adamw", "galore", "tsr", "beta"):
        for seed in range(3):
            make_run(folder / f"{method}{seed}", method, seed=seed)
    return comparable(read_runs(find_runs([folder])), allow_mixed=False)


def with_losses(runs: pd.DataFrame, losses: dict[str, list[float]]) -> pd.DataFrame:
    """The runs of these methods, as many seeds as there are losses."""
    kept = runs[[run.method in losses and run.seed < len(losses[run.method]) for run in runs.itertuples()]].copy()
    kept["eval/loss"] = [losses[run.method][run.seed] for run in kept.itertuples()]
    kept["eval/perplexity"] = [math.exp(loss) for loss in kept["eval/loss"]]
    return with_ratios(kept)


def bold_methods(done: pd.DataFrame, *, column: str = "eval loss", rendering: str = "markdown") -> list[str]:
    table = table_of(done, missing_seeds(done, done))
    columns, body = READERS[rendering](getattr(table, rendering)())
    return [row[0][0] for row in body if row[columns.index(column)][1]]


@pytest.mark.parametrize(
    ("losses", "bold"),
    [
        ({"adamw": [4.0, 4.1, 4.2], "tsr": [4.3, 4.4, 4.5]}, ["adamw"]),
        ({"adamw": [4.3, 4.4, 4.5], "tsr": [4.0, 4.1, 4.2]}, ["tsr"]),
        # Inside one standard deviation, of one or of the other; at exactly one; and equal means.
        ({"adamw": [4.0, 4.1, 4.2], "tsr": [4.07, 4.17, 4.27]}, []),
        ({"adamw": [4.0, 4.5, 5.0], "tsr": [4.89, 4.9, 4.91]}, []),
        ({"adamw": [4.49, 4.5, 4.51], "tsr": [4.4, 4.9, 5.4]}, []),
        ({"adamw": [4.0, 4.5, 5.0], "tsr": [4.5, 5.0, 5.5]}, []),
        ({"adamw": [4.0, 4.0, 4.0], "tsr": [4.0, 4.0, 4.0]}, []),
        # Every other row counts, not the second best alone.
        ({"adamw": [4.0, 4.01, 4.02], "galore": [4.3, 4.31, 4.32], "tsr": [3.5, 4.5, 5.5]}, []),
        # No deviation is known of a single seed, on either side.
        ({"adamw": [4.0], "tsr": [5.0]}, []),
        ({"adamw": [4.0, 4.1, 4.2], "tsr": [4.3, 4.4, 4.5], "beta": [9.0]}, []),
        # Nothing to compare with.
        ({"adamw": [4.0, 4.1, 4.2]}, []),
        # What has no finite loss cannot be judged.
        ({"adamw": [4.0, 4.1, 4.2], "tsr": [4.5, 4.6, math.nan]}, []),
        ({"adamw": [4.0, 4.1, 4.2], "tsr": [4.5, 4.6, math.inf]}, []),
        # A method that lacks a seed is not the best of those that have it.
        ({"adamw": [4.0, 4.1], "tsr": [4.5, 4.6, 4.7]}, []),
        ({"adamw": [4.0, 4.1, 4.2], "tsr": [4.5, 4.6]}, ["adamw"]),
    ],
)
def test_bold_is_clearly_the_lowest(seeds: pd.DataFrame, losses: dict[str, list[float]], bold: list[str]) -> None:
    assert bold_methods(with_losses(seeds, losses)) == bold


def test_bold_compares_only_what_is_comparable(seeds: pd.DataFrame) -> None:
    losses = {"adamw": [3.0, 3.1, 3.2], "galore": [4.0, 4.1, 4.2], "tsr": [4.3, 4.4, 4.5], "beta": [2.0, 2.01, 2.02]}
    done = with_losses(seeds, losses)
    done["mixed"] = ["tokens=1" if method in ("adamw", "beta") else "tokens=2" for method in done["method"]]
    assert bold_methods(done) == ["galore", "beta"]


def test_no_rendering_shows_a_mean_without_n_or_bolds_what_is_not_clear(seeds: pd.DataFrame) -> None:
    generator = np.random.default_rng(0)
    methods = ("adamw", "galore", "tsr", "beta")
    bolded = 0
    for _ in range(25):
        counts = generator.integers(1, 4) if generator.random() < 0.8 else generator.integers(1, 4, size=4)
        sizes = dict(zip(methods, np.broadcast_to(counts, 4), strict=True))
        spread = generator.choice([0.01, 0.1, 0.3])
        losses = {method: list(generator.normal(generator.normal(4, 0.2), spread, sizes[method])) for method in methods}
        done = with_losses(seeds, losses)
        table = table_of(done, missing_seeds(done, done))
        for rendering, read in READERS.items():
            columns, body = read(getattr(table, rendering)())
            shown = {row[0][0]: dict(zip(columns, row, strict=True)) for row in body}
            bolded += check_statistics(shown, losses)
    assert bolded > 20


def check_statistics(table: dict[str, dict[str, tuple[str, bool]]], losses: dict[str, list[float]]) -> int:
    """Check n, ± and bold of each method's row, as a rendering shows it, against the losses; how many are bold."""
    complete = max(map(len, losses.values()))
    bold = set()
    for title, transform in (("eval loss", float), ("perplexity", math.exp)):
        values = {method: [transform(loss) for loss in losses[method]] for method in losses}
        for method, own in values.items():
            assert ("±" in table[method][title][0]) == (len(own) > 1)
            others = [other for name, other in values.items() if name != method]
            if len(own) == complete and all(is_clearly_lower(own, other) for other in others):
                bold.add((method, title))
    assert {(method, title) for method, row in table.items() for title, (_, best) in row.items() if best} == bold
    for method, own in losses.items():
        assert table[method]["n"][0] == (str(complete) if len(own) == complete else f"{len(own)} of {complete}")
    return len(bold)


def is_clearly_lower(one: list[float], other: list[float]) -> bool:
    if min(len(one), len(other)) < 2:
        return False
    return statistics.mean(other) - statistics.mean(one) > max(statistics.stdev(one), statistics.stdev(other))


def test_the_gap_to_the_baseline(seeds: pd.DataFrame) -> None:
    losses = {"adamw": [4.0, 4.1, 4.2], "galore": [4.3, 4.3], "tsr": [4.05], "beta": [3.9, 4.0, 4.1]}
    done = with_losses(seeds, losses)
    gaps = {
        row["method"]: row["gap to adamw (nats)"] for row in rows(table_of(done, missing_seeds(done, done)).markdown())
    }
    error = math.sqrt(2 * 0.1**2 / 3)
    assert gaps == {
        "adamw": "-",
        "galore": f"+0.200 ± {0.1 / math.sqrt(3):.3f}",
        "tsr": "−0.050",
        "beta": f"−0.100 ± {error:.3f}",
    }
    two = done.assign(
        label=[f"{run.label}{run.seed}" if run.method == "adamw" else run.label for run in done.itertuples()]
    )
    assert {row["gap to adamw (nats)"] for row in rows(table_of(two, missing_seeds(two, two)).markdown())} == {"-"}


@pytest.mark.usefixtures("no_figure")
def test_missing_seeds_show_as_missing(tmp_path: Path) -> None:
    for seed in range(3):
        make_run(tmp_path / "runs" / f"adamw{seed}", seed=seed)
    failed = {"status": "failed", "error": "Traceback …\nNonFiniteGradient: step 3"}
    make_run(tmp_path / "runs" / "tsr0", "tsr", seed=0)
    make_run(tmp_path / "runs" / "tsr2", "tsr", seed=2, summary=failed)
    (make_run(tmp_path / "runs" / "adamw3", seed=3) / "summary.json").unlink()
    make_run(tmp_path / "runs" / "other", "tsr", seed=7, config={"optimizer.lr": 1.0}, summary=failed)
    code, out = run_report(tmp_path / "runs")
    text = (out / "table.md").read_text()
    assert code == 0
    assert {row["method"]: row["n"] for row in rows(text)} == {"adamw": "3 of 4", "tsr": "1 of 4"}
    assert "\nadamw: seed 3 missing (unfinished: no summary.json: still running, or killed).\n" in text
    assert (
        "\ntsr optimizer.lr=0.01: seed 1 missing (not run); seed 2 missing (failed: NonFiniteGradient: step 3); "
        "seed 3 missing (not run).\n"
    ) in text
    for name in ("table.tex", "report.html"):
        assert "seed 3 missing" in (out / name).read_text()


def make_grid(folder: Path, method: str, *, best: tuple[float, float], lrs: list[float], seeds: int = 3) -> None:
    """Runs over learning rates and a factor: seed 0 of each setting, all seeds of the one that is best at seed 0."""
    for lr in lrs:
        for factor in (0.1, 0.3, 1):
            config = {"optimizer.lr": lr, "lr_factor.linear": factor}
            for seed in range(seeds if (lr, factor) == best else 1):
                # At further seeds the best is worse than the others at seed 0: these must not count.
                loss = 4 + seed + (0 if (lr, factor) == best else 0.5)
                make_run(folder / f"{method}-{lr}-{factor}-{seed}", method, seed=seed, loss=loss, config=config)


@pytest.mark.usefixtures("no_figure")
def test_best_keeps_one_setting_a_method(tmp_path: Path) -> None:
    make_grid(tmp_path / "runs", "adamw", best=(0.01, 0.3), lrs=[0.003, 0.01, 0.1])
    make_grid(tmp_path / "runs", "tsr", best=(0.03, 0.3), lrs=[0.01, 0.03, 0.1])
    code, out = run_report(tmp_path / "runs", "--best")
    text = (out / "table.md").read_text()
    assert code == 0
    shown = [(row["method"], row["n"], row["lr"], row["settings"], row["eval loss"]) for row in rows(text)]
    assert shown == [
        ("adamw", "3", "0.01", "lr_factor.linear=0.3", "5.000 ± 1.000"),
        ("tsr", "3", "0.03", "lr_factor.linear=0.3", "5.000 ± 1.000"),
    ]
    for method, lrs in (("adamw", "{0.003, 0.01, 0.1}"), ("tsr", "{0.01, 0.03, 0.1}")):
        grid = f"lr_factor.linear ∈ {{0.1, 0.3, 1}} × optimizer.lr ∈ {lrs}, 9 settings"
        assert f"\n{method}: chosen from {grid}, by the evaluation loss of seed 0, which is in the mean, too.\n" in text
    assert len(pd.read_csv(out / "table.csv")) == 6


@pytest.mark.usefixtures("no_figure")
@pytest.mark.parametrize(
    ("best_at", "named"),
    [
        ((0.003, 0.3), "optimizer.lr=0.003 is at the edge of {0.003, 0.01, 0.1}"),
        ((0.1, 0.3), "optimizer.lr=0.1 is at the edge of {0.003, 0.01, 0.1}"),
        ((0.01, 0.1), "lr_factor.linear=0.1 is at the edge of {0.1, 0.3, 1}"),
        ((0.01, 1), "lr_factor.linear=1 is at the edge of {0.1, 0.3, 1}"),
    ],
)
def test_best_at_an_edge_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], best_at: tuple[float, float], named: str
) -> None:
    make_grid(tmp_path / "runs", "adamw", best=(0.01, 0.3), lrs=[0.003, 0.01, 0.1])
    make_grid(tmp_path / "runs", "tsr", best=best_at, lrs=[0.003, 0.01, 0.1])
    code, out = run_report(tmp_path / "runs", "--best")
    error = capsys.readouterr().err
    assert code == 1 and not out.exists()
    assert f"tsr: {named}" in error and "adamw" not in error
    code, out = run_report(tmp_path / "runs", "--best", "--allow-edge")
    assert code == 0
    assert [row["lr"] for row in rows((out / "table.md").read_text())] == ["0.01", f"{best_at[0]:g}"]


@pytest.mark.usefixtures("no_figure")
@pytest.mark.parametrize(
    ("losses", "grid", "seed"),
    [
        # Seed 1 is that of most settings; the lower losses of seed 2 do not count.
        ({0.01: {1: 4.2}, 0.03: {0: 3.0, 1: 4.0}, 0.1: {1: 4.1, 2: 2.0}, 0.3: {2: 1.0}}, "{0.01, 0.03, 0.1}", 1),
        # As many have seed 0 as seed 1: the lower one.
        ({0.003: {1: 9.0}, 0.01: {0: 4.2, 1: 1.0}, 0.03: {0: 4.0, 1: 2.0}, 0.1: {0: 4.1}}, "{0.01, 0.03, 0.1}", 0),
    ],
)
def test_the_tuning_seed_is_the_one_of_most_settings(
    tmp_path: Path, losses: dict[float, dict[int, float]], grid: str, seed: int
) -> None:
    for lr, by_seed in losses.items():
        for run_seed, loss in by_seed.items():
            config = {"optimizer.lr": lr}
            make_run(tmp_path / "runs" / f"{lr}-{run_seed}", seed=run_seed, loss=loss, config=config)
    _, out = run_report(tmp_path / "runs", "--best")
    text = (out / "table.md").read_text()
    assert [row["lr"] for row in rows(text)] == ["0.03"]
    assert f"chosen from optimizer.lr ∈ {grid}, 3 settings, by the evaluation loss of seed {seed}," in text


@pytest.mark.usefixtures("no_figure")
def test_only_numbers_have_an_edge(tmp_path: Path) -> None:
    for moments in ("keep", "rotate"):
        for flag in (False, True):
            config = {"optimizer.moments": moments, "optimizer.flag": flag}
            loss = 4.0 if (moments, flag) == ("rotate", True) else 5.0
            make_run(tmp_path / "runs" / f"{moments}{flag}", "tsr", loss=loss, config=config)
    make_run(tmp_path / "runs" / "a")
    code, out = run_report(tmp_path / "runs", "--best")
    text = (out / "table.md").read_text()
    assert code == 0
    assert [row["settings"] for row in rows(text)] == ["-", "optimizer.flag=True, optimizer.moments=rotate"]
    assert "\ntsr: chosen from optimizer.flag ∈ {False, True} × optimizer.moments ∈ {keep, rotate}, 4 settings" in text
    assert "adamw: chosen" not in text  # there was no choice
