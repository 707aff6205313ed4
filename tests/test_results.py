"""Results that outlive their run directories: rows are whole, jobs that have one are skipped, and each reproduces."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import shlex
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from sweep.results import Results
from sweep.runs import find_runs, read_run, read_runs
from tests.cli import call, finish, only_run, read_summary, run, start, tiny_job


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run directory, made in a second."""
    folder = tmp_path_factory.mktemp("dry")
    status, text = call(*tiny_job(folder), "dry_run=true", f"results={folder / 'dry.csv'}")
    assert status == 0, text
    assert not (folder / "dry.csv").exists(), "dry runs are no results"
    return only_run(folder / "runs")


def test_a_row_is_what_the_run_directory_says_without_what_is_local(tmp_path: Path, dry_run: Path) -> None:
    results = Results(str(tmp_path / "new" / "r.csv"))
    identity = read_summary(dry_run)["config_hash"]
    assert not results.has(identity)
    results.add(dry_run, overrides=["optimizer=tsr", "data.paths=[a b]", "runs_dir=/home/me", "+data.cache_dir=/x"])
    assert results.has(identity) and not results.has(identity[:-1])

    (row,) = read(tmp_path / "new" / "r.csv")
    assert shlex.split(row["overrides"]) == ["optimizer=tsr", "data.paths=[a b]"], "places on this machine are left out"
    assert row["machine"] == read_summary(dry_run)["machine"] and "cores" in row["machine"]
    assert not {"config/runs_dir", "config/results", "config/logger.name", "config/data.cache_dir"} & set(row)

    expected = read_runs([dry_run]).iloc[0]
    found = read_runs(find_runs([tmp_path / "new" / "r.csv"])).iloc[0]
    assert found["run"] == dry_run.name
    for column in found.index.drop(["run", "overrides"]):
        same = found[column] == expected[column] or (found.isna()[column] and expected.isna()[column])
        assert same, (column, found[column], expected[column])


def test_a_row_is_replaced_and_columns_are_added(tmp_path: Path, dry_run: Path) -> None:
    path = tmp_path / "r.csv"
    other = tmp_path / "other"
    shutil.copytree(dry_run, other)
    results = Results(str(path))
    results.add(dry_run, overrides=["a"])
    text = (other / "config.yaml").read_text().replace("comm:\n", "comm:\n  note: 1\n") + "lookup: {lr: 1}\n"
    (other / "config.yaml").write_text(text)
    results.add(other, overrides=["b"])
    (row,) = read(path)
    assert (row["overrides"], row["run"], row["config/comm.note"]) == ("b", "other", "1")
    assert "config/lookup.lr" not in row


def test_runs_that_end_together_all_get_their_row(tmp_path: Path, dry_run: Path) -> None:
    path = tmp_path / "r.csv"
    text = (dry_run / "summary.json").read_text()
    identity = read_summary(dry_run)["config_hash"]
    copies = []
    for number in range(12):
        copies.append(tmp_path / f"run{number}")
        shutil.copytree(dry_run, copies[-1])
        (copies[-1] / "summary.json").write_text(text.replace(identity, f"hash{number}"))
    with ThreadPoolExecutor(12) as threads:
        list(threads.map(lambda run: Results(str(path)).add(run), copies))
    assert sorted(row["run"] for row in read(path)) == sorted(run.name for run in copies)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with mock.patch("os.access", return_value=False), pytest.raises(ValueError, match=r"r\.csv: .*\(not writable\)"):
        Results(str(tmp_path / "r.csv"))


def test_an_incomplete_record_gets_no_row(tmp_path: Path, dry_run: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(dry_run, copy)
    (copy / "summary.json").write_text('{"status": "done"}')
    with pytest.raises(ValueError, match=r"copy is no finished run \(summary.json lacks .*resume=null runs it again"):
        Results(str(tmp_path / "r.csv")).add(copy)
    assert not (tmp_path / "r.csv").exists()


def test_a_run_that_was_killed_before_its_row_was_written_gets_it_without_a_worker(
    tmp_path: Path, dry_run: Path
) -> None:
    job = tiny_job(tmp_path)
    status, text = call(*job, "dry_run=true")
    assert status == 0, text
    made = only_run(tmp_path / "runs")
    config = (made / "config.yaml").read_text().replace("dry_run: true", "dry_run: false")
    summary = read_summary(made) | {"eval/loss": 2.0, "eval/perplexity": 7.0}
    shutil.rmtree(made)
    finished = tmp_path / "finished"
    finished.mkdir()
    (finished / "config.yaml").write_text(config)
    (finished / "summary.json").write_text(json.dumps(summary | {"config_hash": "set by hand"}))

    directory = (f"hydra.run.dir={finished}", f"results={tmp_path / 'r.csv'}")
    status, text = call(*job, *directory)  # fails if it starts a worker
    assert status == 0 and "done already, skipped" in text, text
    (row,) = read(tmp_path / "r.csv")
    assert (row["run"], row["eval/loss"]) == ("finished", "2.0")

    status, text = call(*job, *directory, f"resume={finished}")
    assert status == 1 and "no checkpoint" in text, text
    assert read(tmp_path / "r.csv") == [row]


@pytest.mark.parametrize(
    ("value", "content", "message"),
    [
        ("results.txt", None, "results must be the path of a .csv file, or null, got 'results.txt'"),
        ("5", None, "results must be the path of a .csv file, or null, got 5"),
        (
            "{folder}/r.csv",
            "a,b\n1,2\n",
            "results={folder}/r.csv: not a CSV of results (it has no column config_hash); ",
        ),
        ("{folder}/r.csv", "", "results={folder}/r.csv: not a CSV of results (it has no column config_hash); "),
        (
            "{folder}/r.csv",
            "run,config_hash\n<<<<<<< HEAD\n",
            "results={folder}/r.csv: not a CSV of results (line 2 is no",
        ),
        ("{folder}/r.csv", "config_hash,run\na,b,c\n", "results={folder}/r.csv: not a CSV of results (line 2 "),
        ("{folder}/r.csv/s.csv", "", "results={folder}/r.csv/s.csv: no file can be made there (File exists)"),
    ],
)
def test_what_is_no_file_of_results_is_refused(tmp_path: Path, value: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "r.csv").write_text(content)
    status, text = call(*tiny_job(tmp_path), f"results={value.format(folder=tmp_path)}")
    assert status == 1 and text.startswith("error: " + message.format(folder=tmp_path)), text
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.distributed
def test_a_killed_sweep_goes_on_without_repeating_a_job_and_any_row_reproduces(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    sweep = ["-m", *tiny_job(tmp_path), "optimizer=tsr,adamw,galore", "seed=0,1", f"results={path}"]
    process = start(*sweep)
    try:
        deadline = time.monotonic() + 300
        while not (path.exists() and len(read(path)) >= 2):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    before = read(path)
    assert 2 <= len(before) < 6, "the sweep was over before it was killed"

    shutil.rmtree(tmp_path / "runs" / before[0]["run"])  # the row alone says that it is done
    status, text = finish(start(*sweep))
    assert status == 0, text
    assert text.count("done already, skipped: ") == len(before)
    rows = read(path)
    assert rows[: len(before)] == before
    assert len(rows) == len({row["config_hash"] for row in rows}) == 6
    assert not (tmp_path / "runs" / before[0]["run"]).exists()

    row = random.choice(rows)
    print(f"the row drawn: {row['overrides']}")
    outcome = run(*shlex.split(row["overrides"]), f"runs_dir={tmp_path / 'again'}", "results=null")
    assert outcome.status == 0, outcome.text
    again = read_run(only_run(tmp_path / "again"))
    for key in ("config_hash", "eval/loss", "eval/perplexity", "tokens", "comm/total_bytes", "paper/comm/total_bytes"):
        assert row[key] == repr(again[key]).strip("'"), key

    other = [*tiny_job(tmp_path), f"optimizer={again['method']}", "seed=9", f"results={path}"]
    outcome = run(*other, f"resume={only_run(tmp_path / 'again')}", "trainer.steps=8")
    assert outcome.status == 0, outcome.text
    assert read(path) == rows, "what another run's checkpoint began is not the run that the configuration describes"


@pytest.mark.distributed
def test_under_torchrun_one_worker_adds_the_row_and_all_skip_it_then(tmp_path: Path) -> None:
    job = [*tiny_job(tmp_path), f"results={tmp_path / 'r.csv'}"]
    status, text = run(*job, torchrun=2)
    assert status == 0, text
    (row,) = read(tmp_path / "r.csv")
    assert row["world_size"] == "2"
    shutil.rmtree(tmp_path / "runs")
    status, text = run(*job, torchrun=2)
    assert status == 0 and text.count("done already, skipped: ") == 2, text
    assert read(tmp_path / "r.csv") == [row] and not list((tmp_path / "runs").iterdir())
