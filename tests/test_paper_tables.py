"""The paper's analytic cells: every verdict, the counts behind them, and the files of `python -m sweep.paper`."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

import sweep.paper
import train
from sweep.cells import (
    FITTED,
    MATCHES,
    STATUSES,
    UNEXPLAINED,
    AnalyticCell,
    Count,
    Published,
    Summary,
    analytic_cells,
    cells_of,
    compose,
    counter,
    decimals,
    head_ratios,
    published,
    rounds_to,
)
from tsr import Communicator
from tsr.accounting import step_elements

SHARED = Path(train.__file__).parents[1] / "shared" / "docs" / "published.yaml"

# Recomputed from shapes by hand, apart from this code: (by definition, verdict) of bytes, peak and memory; where the
# verdict is a fit, what the fit gives follows.
Expected = tuple[str | None, str] | tuple[str | None, str, str]
EXPECTED: dict[tuple[str, str], tuple[Expected, ...]] = {
    ("table3", "60M AdamW"): (("0.1667", MATCHES), ("0.1667", MATCHES), ("0.2829", MATCHES)),
    ("table3", "60M GaLore"): (("0.0913", UNEXPLAINED), (None, UNEXPLAINED), ("0.2143", MATCHES)),
    ("table3", "60M TSR"): (("0.01966", MATCHES), ("0.1030", MATCHES), ("0.1422", FITTED, "0.1708")),
    ("table3", "130M AdamW"): (("0.4380", MATCHES), ("0.4380", MATCHES), ("0.7062", MATCHES)),
    ("table3", "130M GaLore"): (("0.2132", MATCHES), (None, UNEXPLAINED), ("0.5128", MATCHES)),
    ("table3", "130M TSR"): (
        *(("0.05856", FITTED, "0.05835"), ("0.3311", FITTED, "0.3099"), ("0.4094", FITTED, "0.4522")),
    ),
    ("table3", "350M AdamW"): (("1.3406", MATCHES), ("1.3406", MATCHES), ("2.0764", MATCHES)),
    ("table3", "350M GaLore"): (("0.4395", MATCHES), (None, UNEXPLAINED), ("1.2574", MATCHES)),
    ("table3", "350M TSR"): (*(("0.1148", MATCHES), ("0.8339", FITTED, "0.7914"), ("1.1368", FITTED, "1.1938")),),
    ("table3", "1B AdamW"): (("5.0938", MATCHES), ("5.0938", MATCHES), ("7.7718", MATCHES)),
    ("table3", "1B GaLore"): (("1.4942", FITTED, "1.4809"), (None, UNEXPLAINED), ("4.500", MATCHES)),
    ("table3", "1B TSR"): (("0.2130", MATCHES), ("2.1238", FITTED, "2.0483"), ("3.6970", FITTED, "3.8104")),
    ("table4", "AdamW"): (("494.15", MATCHES),),
    ("table4", "GaLore"): (("157.88", MATCHES),),
    ("table4", "TSR"): (("20.25", MATCHES),),
    ("table6", "60M TSR 128(64)"): (("0.00805", MATCHES), ("0.0520", MATCHES), ("0.1112", FITTED, "0.1398")),
    ("table6", "60M TSR 256(64), 40K steps"): (
        *(("0.01966", MATCHES), ("0.1030", MATCHES), ("0.1422", FITTED, "0.1708")),
    ),
    ("table6", "130M TSR 256(96)"): (
        *(("0.03193", MATCHES), ("0.2139", FITTED, "0.2045"), ("0.3370", FITTED, "0.3798")),
    ),
    ("table6", "350M TSR 256(128)"): (
        *(("0.06213", MATCHES), ("0.5396", FITTED, "0.5207"), ("0.9621", FITTED, "1.0192")),
    ),
}
# The definition at the scripts' oversampling of 5: bytes and peak.
OVERSAMPLED = {
    ("table3", "60M TSR"): ("0.02000", "0.1052"),
    ("table3", "130M TSR"): ("0.05893", "0.3353"),
    ("table3", "350M TSR"): ("0.1152", "0.8439"),
    ("table3", "1B TSR"): ("0.2135", "2.1432"),
    ("table6", "60M TSR 128(64)"): ("0.00838", "0.0542"),
    ("table6", "130M TSR 256(96)"): ("0.03233", "0.2181"),
    ("table6", "350M TSR 256(128)"): ("0.06265", "0.5496"),
}
DENSE = {"60M GaLore": "0.1667", "130M GaLore": "0.4380", "350M GaLore": "1.3406", "1B GaLore": "5.0938"}


@dataclass(frozen=True)
class Counted:
    """All cells, from one pass of dry runs; `optimizers` and `summaries` are by job."""

    facts: Published
    cells: list[AnalyticCell]
    count: Count
    summaries: dict[tuple[str, ...], Summary]
    optimizers: dict[tuple[str, ...], Any]

    def of(self, table: str, row: str) -> list[AnalyticCell]:
        return [cell for cell in self.cells if (cell.table, cell.row.name) == (table, row)]


@pytest.fixture(scope="module")
def counted() -> Iterator[Counted]:
    """The dry runs of the command, with the optimizers that made them kept: nothing is counted twice."""
    count, build = counter(), train.build_optimizer
    summaries: dict[tuple[str, ...], Summary] = {}
    optimizers: dict[tuple[str, ...], Any] = {}

    def recorded(*job: str) -> Summary:
        def keep(*arguments: Any) -> Any:
            optimizers[job] = build(*arguments)
            return optimizers[job]

        with mock.patch.object(train, "build_optimizer", keep):
            summaries[job] = count(*job)
        return summaries[job]

    facts = published()
    yield Counted(facts, analytic_cells(facts, recorded), count, summaries, optimizers)


def row_cells(row: str, count: Count, **changes: Any) -> list[AnalyticCell]:
    """The cells of a row of Table 3, with other printed figures if given."""
    facts = published()
    table = facts.tables[0]
    found = replace(next(each for each in table.rows if each.name == row), **changes)
    return cells_of(table, found, facts.methods[found.method], count)


def test_every_cell_has_its_verdict_and_its_value(counted: Counted) -> None:
    assert {(cell.table, cell.row.name) for cell in counted.cells} == set(EXPECTED)
    for place, expected in EXPECTED.items():
        cells = counted.of(*place)
        assert [cell.column for cell in cells] == ["bytes/step", "peak bytes", "memory"][: len(expected)]
        for cell, (value, status, *fitted) in zip(cells, expected, strict=True):
            assert cell.verdict.status == status, (place, cell.column)
            assert value in (None, cell.show(cell.by_definition)), (place, cell.column)
            assert [cell.show(cell.verdict.fitted)] == (fitted or ["-"]), (place, cell.column)
    assert len(counted.cells) == 51
    assert Counter(cell.verdict.status for cell in counted.cells) == {MATCHES: 31, FITTED: 15, UNEXPLAINED: 5}


def test_other_readings_stand_beside_the_definition(counted: Counted) -> None:
    for place, (average, peak) in OVERSAMPLED.items():
        assert [cell.show(cell.oversampled) for cell in counted.of(*place)] == [average, peak, "-"], place
    for row, dense in DENSE.items():
        assert [cell.show(cell.other) for cell in counted.of("table3", row)] == [dense, dense, "-"], row
    assert [cell.show(cell.other) for cell in counted.of("table4", "GaLore")] == ["494.15"]


def test_a_peak_below_the_dense_size_is_reported_as_such(counted: Counted) -> None:
    reported = {cell.row.name for cell in counted.cells if "below the dense size" in cell.verdict.explanation}
    assert reported == set(DENSE)
    fits = {"60M GaLore": "0.1361", "130M GaLore": "0.3578", "350M GaLore": "0.9751", "1B GaLore": "3.6342"}
    for row, fitted in fits.items():
        explanation = counted.of("table3", row)[1].verdict.explanation
        assert f"{fitted}, with no support in the paper" in explanation


def closed_form(optimizer: Any, steps: int) -> tuple[Counter[tuple[str, str]], int, int, int]:
    """Elements of all steps by (message, kind), the largest step's, and total and peak of what the paper counts."""
    intervals = sorted({block.interval for block in optimizer.blocks if block.is_low_rank})
    first_of: dict[tuple[bool, ...], int] = {}
    times: Counter[tuple[bool, ...]] = Counter()
    for step in range(1, steps + 1):
        due = tuple((step - 1) % interval == 0 for interval in intervals)
        first_of.setdefault(due, step)
        times[due] += 1
    total: Counter[tuple[str, str]] = Counter()
    peak = paper_total = paper_peak = 0
    for due, step in first_of.items():
        elements = step_elements(optimizer.blocks, step, reduce=optimizer.options.reduce, refresh=optimizer.refresh)
        paper = sum(n for (_, kind), n in elements.items() if kind in ("linear", "embedding"))
        total.update({key: n * times[due] for key, n in elements.items()})
        peak, paper_peak = max(peak, elements.total()), max(paper_peak, paper)
        paper_total += paper * times[due]
    return total, peak, paper_total, paper_peak


def test_the_ledger_of_every_cell_is_the_closed_form(counted: Counted) -> None:
    assert len(counted.summaries) == 33
    for job, summary in counted.summaries.items():
        total, peak, paper_total, paper_peak = closed_form(counted.optimizers[job], summary["steps"])
        by_role = {(role, kind): n for role, kinds in summary["comm/by_role"].items() for kind, n in kinds.items()}
        assert by_role == {key: 4 * n for key, n in total.items()}, job
        assert summary["comm/total_bytes"] == 4 * total.total(), job
        assert summary["comm/bytes_per_step"] == 4 * total.total() / summary["steps"], job
        assert summary["comm/peak_bytes"] == 4 * peak, job
        assert summary["paper/comm/total_bytes"] == 4 * paper_total, job
        assert summary["paper/comm/peak_bytes"] == 4 * paper_peak, job


def test_all_tensors_are_all_parameters_of_a_dense_method(counted: Counted) -> None:
    """Parameters of the models as published, at 4 bytes on the wire; weights in bf16 and two moments in fp32 kept."""
    for scale, millions in (("60M", "58.07"), ("130M", "134.11"), ("350M", "367.97"), ("1B", "1339.08")):
        average, peak, memory = counted.of("table3", f"{scale} AdamW")
        assert f"{average.all_tensors / 4e6:.2f}" == f"{peak.all_tensors / 4e6:.2f}" == millions
        assert f"{memory.all_tensors / 10e6:.2f}" == millions


def test_what_leaving_the_head_out_hides(counted: Counted) -> None:
    ratios = head_ratios(counted.facts, counted.cells)
    assert [f"{ratio.by_definition:.1f}" for ratio in ratios] == ["8.5", "7.5", "11.7", "23.9"]
    assert [f"{ratio.all_tensors:.1f}" for ratio in ratios] == ["2.7", "3.4", "6.0", "11.3"]


def test_the_readme_says_what_is_found(counted: Counted) -> None:
    readme = " ".join((Path(train.__file__).with_name("README.md")).read_text(encoding="utf-8").split())
    tally = [sum(cell.verdict.status == status for cell in counted.cells) for status in STATUSES]
    assert f"Of {len(counted.cells)} cells {tally[0]} match by definition, {tally[1]} only under a stated fit" in readme
    assert f"{tally[2]} are unexplained" in readme
    ratios = head_ratios(counted.facts, counted.cells)
    for values in ([x.by_definition for x in ratios], [x.all_tensors for x in ratios]):
        *first, last = [f"{value:.1f}" for value in values]
        assert f"{', '.join(first)} and {last} times" in readme


def test_a_changed_shape_changes_the_table() -> None:
    (average, *_) = row_cells("60M AdamW", counter(overrides=["model.intermediate_size=2048"]))
    assert average.show(average.by_definition) == "0.1998"  # 4 (8 (4 512² + 3 512 2048) + 32000 512)
    assert average.verdict.status == UNEXPLAINED
    assert average.verdict.explanation == "printed 14.9 % below the definition"


def test_a_verdict_is_computed_from_what_is_printed(counted: Counted) -> None:
    by_definition = row_cells("60M TSR", counted.count, peak="0.103")[1]
    fitted = row_cells("60M TSR", counted.count, peak="0.097")[1]
    neither = row_cells("60M TSR", counted.count, peak="0.11")[1]
    assert [cell.verdict.status for cell in (by_definition, fitted, neither)] == [MATCHES, FITTED, UNEXPLAINED]
    assert "0.0967, not printed either" in neither.verdict.explanation


@pytest.mark.parametrize("world_size", [1, 64])
def test_the_number_of_workers_changes_no_byte(counted: Counted, world_size: int) -> None:
    count = counter(world_size=world_size)
    assert row_cells("60M TSR", count) == counted.of("table3", "60M TSR")
    job = ("experiment=table3", "model=llama_60m", "optimizer=tsr")
    assert (count(*job)["world_size"], counted.summaries[job]["world_size"]) == (world_size, 8)


def test_rounding_is_ordinary_and_keeps_the_printed_decimals() -> None:
    assert rounds_to(0.125, "0.13") and rounds_to(4.5003, "4.5") and rounds_to(493.5, "494")
    assert not rounds_to(0.125, "0.12") and not rounds_to(4.5003, "4.51") and not rounds_to(0.0204, "0.021")
    assert [decimals(text) for text in ("494", "4.5", "0.020")] == [0, 1, 3]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Tables(HTMLParser):
    """Rows of each table's body, and every address that the page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.body = False
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tbody":
            self.rows.append(0)
        self.body = tag == "tbody" or (self.body and tag != "thead")
        if tag == "tr" and self.body:
            self.rows[-1] += 1
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]


@pytest.fixture(scope="module")
def reports(counted: Counted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes."""
    out = tmp_path_factory.mktemp("paper") / "new" / "reports"
    with mock.patch.object(sweep.paper, "counter", lambda *, world_size: counted.count):
        assert sweep.paper.main(["--out", str(out)]) == 0
    return out


def test_the_command_writes_every_file(reports: Path) -> None:
    tables = {f"{name}.{ending}" for name in ("table3", "table4", "table6") for ending in ("md", "csv", "tex")}
    assert {path.name for path in reports.iterdir()} == tables | {"cells.csv", "tables.html"}


def test_cells_csv(reports: Path, counted: Counted) -> None:
    lines = read_csv(reports / "cells.csv")
    assert list(lines[0])[:7] == ["table", "row", "column", "printed", "by_definition", "all_tensors", "status"]
    assert len(lines) == 51
    printed = [(cell.printed, cell.verdict.status) for cell in counted.cells]
    assert [(line["printed"], line["status"]) for line in lines] == printed
    matching = [rounds_to(float(line["by_definition"]), line["printed"]) for line in lines]
    assert matching == [line["status"] == MATCHES for line in lines]
    (head,) = (line for line in lines if (line["row"], line["column"]) == ("60M AdamW", "bytes/step"))
    assert f"{float(head['all_tensors']):.4f}" == "0.2323"
    for line in lines:
        assert bool(line["fitted"]) == bool(line["fit"]) == (line["status"] == FITTED)
        assert bool(line["explanation"]) == (line["status"] != MATCHES)


def test_a_table_of_the_paper_in_each_format(reports: Path) -> None:
    text = (reports / "table3.md").read_text()
    (line,) = (line for line in text.splitlines() if "130M TSR" in line and "0.058 " in line)
    shown = [part.strip() for part in line.strip("|").split("|")]
    assert shown[:6] == ["130M TSR", "384(96)", "100", "0.058", "0.05856", "0.15694"]
    assert shown[-2:] == ["0.05835", f"{FITTED} (b)"]
    assert "(b) Fits if refresh steps are counted with 4 r²" in text
    assert "(a) 60M GaLore: printed 9.5 % above the definition and 40.0 % below what `galore` sends" in text
    latex = (reports / "table6.tex").read_text()
    assert latex.count(r"\toprule") == latex.count(r"\bottomrule") == 4
    wide = {line["row"]: line for line in read_csv(reports / "table4.csv")}
    assert (wide["TSR"]["bytes/step, printed"], wide["TSR"]["CoLA, printed"]) == ("20", "61.32")
    assert [len(read_csv(reports / f"table{number}.csv")) for number in (3, 4, 6)] == [12, 3, 4]


def test_the_page_needs_nothing_else_and_has_all_tables(reports: Path) -> None:
    parser = Tables()
    parser.feed((reports / "tables.html").read_text())
    assert parser.rows == [3, 4, *4 * [12], *2 * [3], *4 * [4]]
    assert parser.references == []


def test_a_value_that_makes_no_job_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.paper.main(["--out", str(tmp_path / "out"), "--world-size", "0"]) == 1
    assert capsys.readouterr().err == "error: world_size must be a whole number of at least 1 or null, got 0\n"
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"experiment=table3 source=talk: .*'table3\.interval\.talk' not found"):
        compose("experiment=table3", "source=talk")


# Options of the experiments.


def test_paper_and_scripts_are_named_options() -> None:
    table3 = {
        (model, source): compose("experiment=table3", f"model={model}", "optimizer=tsr", f"source={source}")
        for model in ("llama_60m", "llama_130m", "llama_350m", "llama_1b")
        for source in ("paper", "scripts")
    }
    warmups = {key: round(job["schedule"]["warmup"] * job["trainer"]["steps"]) for key, job in table3.items()}
    assert [warmups[model, "scripts"] for model, source in table3 if source == "paper"] == [1000, 2000, 6000, 10000]
    assert [warmups[model, "paper"] for model, source in table3 if source == "paper"] == [2000, 2000, 9000, 9000]
    intervals = [job["refresh"]["linear"] for (_, source), job in table3.items() if source == "scripts"]
    assert intervals == [100, 100, 100, 50]
    assert {job["refresh"]["linear"] for (_, source), job in table3.items() if source == "paper"} == {100}
    default = compose("experiment=table3", "model=llama_1b", "optimizer=tsr")
    assert default == table3["llama_1b", "paper"]
    galore = compose("experiment=table3", "model=llama_1b", "optimizer=galore", "source=scripts")
    assert galore["refresh"]["linear"] == 200  # the script is TSR's


# Of Table 7 and the sizes of the training splits: batch, rate, scale, rows.
GLUE: Mapping[str, tuple[int, float, float, int]] = {
    "cola": (32, 1e-5, 8, 8551),
    "stsb": (16, 3e-5, 2, 5749),
    "mrpc": (16, 2e-5, 2, 3668),
    "rte": (16, 2e-5, 2, 2490),
    "sst2": (16, 2e-5, 2, 67349),
    "mnli": (16, 1e-5, 2, 392702),
    "qnli": (16, 1e-5, 2, 104743),
    "qqp": (16, 2e-5, 2, 363846),
}


@pytest.mark.parametrize("task", GLUE)
def test_fine_tuning_follows_table_7(task: str) -> None:
    job = compose("experiment=table4", "optimizer=tsr", f"data.task={task}")
    batch, rate, scale, rows = GLUE[task]
    assert job["trainer"]["global_batch"] == batch
    assert (job["optimizer"]["lr"], job["optimizer"]["scale"]) == (rate, scale)
    assert (job["trainer"]["epochs"], job["trainer"]["steps"], job["data"]["train_rows"]) == (30, None, rows)
    assert job["schedule"] == {"shape": "linear", "warmup": 0.0, "floor": 0.0}
    assert (job["model"]["name"], job["task"]["name"], job["data"]["sequence_length"]) == (
        "roberta_base",
        "finetune",
        512,
    )
    assert {key: job["rank"][key] for key in ("linear", "embedding")} == {"linear": 256, "embedding": 256}
    assert (job["refresh"]["linear"], job["refresh"]["embedding"], job["refresh"]["oversampling"]) == (200, 200, 5)


def test_options_of_fine_tuning() -> None:
    rates = {
        (task, source): compose("experiment=table4", "optimizer=tsr", f"data.task={task}", f"source={source}")
        for task in ("mrpc", "rte")
        for source in ("paper", "scripts")
    }
    assert [job["optimizer"]["lr"] for job in rates.values()] == [2e-5, 3e-5, 2e-5, 2e-5]
    settings = [
        compose("experiment=table4", f"optimizer={method}", *more)
        for method in ("galore", "one_sided")
        for more in ([], ["table4.galore=rank_8"])
    ]
    found = [(job["rank"]["linear"], job["optimizer"]["scale"], job["optimizer"]["lr"]) for job in settings]
    assert found == 2 * [(4, 4.0, 3e-5), (8, 2.0, 2e-5)]


def test_rank_8_without_refreshes_would_print_the_same_figure() -> None:
    """What the note below Table 4 says of GaLore's rank."""
    config = compose("experiment=table4", "optimizer=one_sided", "table4.galore=rank_8")
    optimizer = train.build_optimizer(config, train.build_model(config, "meta"), Communicator())
    ordinary = step_elements(optimizer.blocks, 2, reduce=optimizer.options.reduce, refresh=optimizer.refresh)
    counted = 4 * sum(n for (_, kind), n in ordinary.items() if kind in ("linear", "embedding"))
    assert f"{counted / 1e6:.2f}" == "157.95" and rounds_to(counted / 1e6, "158")


def test_table_6_is_table_3_at_other_ranks() -> None:
    for model, expected in (("60m", (128, 64, 200)), ("130m", (256, 96, 50)), ("350m", (256, 128, 50))):
        job = compose("experiment=table6", f"model=llama_{model}", "optimizer=tsr")
        of_table_3 = compose("experiment=table3", f"model=llama_{model}", "optimizer=tsr")
        assert (job["rank"]["linear"], job["rank"]["embedding"], job["refresh"]["linear"]) == expected
        differing = {key for key in of_table_3 if job[key] != of_table_3[key]}
        assert differing == {"rank", "refresh", "runs_dir"}


@pytest.mark.skipif(not SHARED.is_file(), reason="shared/docs/published.yaml is not there")
def test_printed_figures_are_those_on_record() -> None:
    """Against another transcription of the same tables."""
    record = yaml.safe_load(SHARED.read_text())
    facts = {table.name: table.rows for table in published().tables}

    def numbers(texts: Sequence[str | None]) -> list[float]:
        return [float(text) for text in texts if text is not None]

    for row, line in zip(facts["table3"], record["tsr_table3"]["rows"], strict=True):
        scale, method, rank, embedding_rank, interval, *figures = line
        assert row.name.lower() == f"{scale} {method}"
        assert row.rank == (f"{rank}({embedding_rank})" if embedding_rank else f"{rank}")
        assert row.interval == str(interval or "-")
        metrics = list(row.metrics.values())
        assert numbers([metrics[0], row.bytes, row.peak, row.memory, metrics[1]]) == figures
    for row, line in zip(facts["table6"], record["tsr_table6"]["rows"], strict=True):
        _, _, rank, embedding_rank, interval, *figures = line
        assert (row.rank, row.interval) == (f"{rank}({embedding_rank})", str(interval))
        assert numbers([*row.metrics.values(), row.bytes, row.peak, row.memory]) == figures
    for row, line in zip(facts["table4"], record["tsr_table4"]["rows"], strict=True):
        assert numbers([row.bytes, *row.metrics.values()]) == line[1:]


def test_fine_tuning_with_every_synchronised_tensor(counted: Counted) -> None:
    """As the README has it beside the paper's count."""
    readme = (Path(train.__file__).with_name("README.md")).read_text(encoding="utf-8")
    for row, expected in (("AdamW", "498.59"), ("TSR", "23.37")):
        (cell,) = counted.of("table4", row)
        assert f"{cell.all_tensors / 1e6:.2f}" == expected and expected in readme
