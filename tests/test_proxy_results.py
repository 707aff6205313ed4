"""The committed results of the proxy: what they claim about themselves holds."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

from sweep import report
from sweep.ablations import ABLATIONS, find_ablation
from sweep.compare import best, comparable
from sweep.runs import find_runs, read_runs
from tests.cli import PROJECT
from tsr.harness.hydra_hooks import plain
from tsr.harness.settings import config_hash

RESULTS = PROJECT / "sweep" / "results"
METHODS = {"adamw", "galore", "one_sided", "tsr"}
GRID_KEYS = ["config/optimizer.lr", "config/lr_factor.linear"]


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    return comparable(read_runs(find_runs([RESULTS / "proxy.csv"])), allow_mixed=False)


def test_every_method_had_the_same_grid_and_the_chosen_point_lies_inside_it(runs: pd.DataFrame) -> None:
    assert set(runs["method"]) == METHODS
    tuning = runs[runs["seed"] == 0]
    grids = {method: set(map(tuple, rows[GRID_KEYS].to_numpy())) for method, rows in tuning.groupby("method")}
    assert len({frozenset(grid) for grid in grids.values()}) == 1
    rates, factors = (set(tuning[key]) for key in GRID_KEYS)
    assert grids["tsr"] == {(rate, factor) for rate in rates for factor in factors}

    chosen = best(runs)  # raises at an edge
    for method, rows in chosen.groupby("method"):
        assert set(rows["seed"]) >= {0, 1, 2}, method
        with initialize_config_dir(str(PROJECT / "conf"), version_base="1.3"):
            config = plain(compose("config", ["experiment=proxy", f"optimizer={method}"]))
        assert (config["optimizer"]["lr"], config["lr_factor"]["linear"]) == tuple(rows[GRID_KEYS].iloc[0]), method


@pytest.mark.parametrize("name", ["proxy.csv", "proxy_ablations.csv", "glue.csv"])
def test_every_row_is_the_run_that_its_overrides_make(name: str) -> None:
    table = pd.read_csv(RESULTS / name)
    assert table["config_hash"].is_unique and not table["git_commit"].str.endswith("-dirty").any()
    with initialize_config_dir(str(PROJECT / "conf"), version_base="1.3"):
        for row in table[["overrides", "config_hash", "run"]].itertuples():
            config = plain(compose("config", shlex.split(str(row.overrides))))
            assert config_hash(config) == row.config_hash, row.overrides


def test_no_result_names_a_place_on_the_machine_that_made_it() -> None:
    files = [path for path in RESULTS.rglob("*") if path.suffix in (".csv", ".yaml", ".json", ".jsonl", ".md")]
    assert len(files) > 60
    for path in files:
        assert not re.search(r"""(^|[\s"'=\[,])/\w""", path.read_text()), path


def test_run_directories_of_the_figures_are_those_of_the_rows(runs: pd.DataFrame) -> None:
    for folder, rows in (
        ("runs", best(runs)),
        ("ablations", read_runs(find_runs([RESULTS / "proxy_ablations.csv"]))),
    ):
        made = read_runs(find_runs([RESULTS / "proxy" / folder])).set_index("config_hash")
        rows = rows.set_index("config_hash")
        assert set(made.index) == set(rows.index)
        for column in ("eval/loss", "comm/total_bytes", "paper/comm/total_bytes"):
            assert (made[column] == rows[column].loc[made.index]).all()


def test_ablations_differ_from_the_chosen_setting_in_one_thing(runs: pd.DataFrame) -> None:
    ablations = read_runs(find_runs([RESULTS / "proxy_ablations.csv"]))
    assert set(ablations["method"]) == {"tsr"} and set(ablations["seed"]) == {0}
    for name, ablation in ABLATIONS.items():
        (group,) = find_ablation(comparable(ablations, allow_mixed=False), ablation)
        assert len(group) >= 2, name
        (chosen,) = best(runs).query("method == 'tsr' and seed == 0")["config_hash"]
        assert chosen in set(group["config_hash"]), name


def test_the_table_in_the_readme_is_the_table_of_the_results(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text((PROJECT / "README.md").read_text())
    arguments = [str(RESULTS / "proxy.csv"), "--best", "--out", str(tmp_path), "--readme", str(readme), "proxy"]
    assert report.main(arguments) == 0
    assert readme.read_text() == (PROJECT / "README.md").read_text()


def test_all_methods_saw_the_same_tokens_and_only_the_baseline_sends_all(runs: pd.DataFrame) -> None:
    assert runs["tokens"].nunique() == runs["corpus_sha256"].nunique() == runs["tokenizer_sha256"].nunique() == 1
    sent = runs.groupby("method")["paper/comm/bytes_per_step"].first()
    assert sent["tsr"] < sent["one_sided"] < sent["galore"] == sent["adamw"]
