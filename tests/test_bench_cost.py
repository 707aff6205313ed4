"""The bench's cost model: parameters are recovered, held-out cells unseen, crossovers where algebra has them."""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from sweep.bench import forecast as forecasts
from sweep.bench.cells import CONTESTANTS, Row
from sweep.bench.cost import crossovers_table, main, speedup_figure
from sweep.bench.cost_model import CostModel, Messages, Place, fit, hold_out
from sweep.bench.forecast import (
    ALWAYS,
    NEVER,
    Crossover,
    Forecast,
    crossover,
    ddp_messages,
    forecast,
    job,
    messages_of,
    powersgd_messages,
)
from sweep.bench.oracle import CollectiveOracle
from sweep.bench.report import BASELINE
from sweep.bench.rows import write_rows
from sweep.bench.steps import one_worker
from sweep.bench.worker import counted_calls
from sweep.cells import compose
from train import build_model, build_optimizer
from tsr import Communicator
from tsr.accounting import step_elements

MODEL = CostModel(
    compute_s=0.4,
    optimizer_s={"adamw_late": 0.05, "tsr": 0.12, "tsr_head": 0.15, "ddp_adamw": 0.04, "ddp_powersgd": 0.03},
    latency_s=2e-4,
    inverse_efficiency=1 / 0.95,
    transfer_s=2.5e-9,
    packing_s=1.2e-9,
    hook_s={"ddp_powersgd": 0.2},
)
SENT = {
    "adamw_late": Messages(payload=232e6, collectives=8, overlapped=False),
    "tsr": Messages(payload=86e6, collectives=4, overlapped=True),
    "tsr_head": Messages(payload=8e6, collectives=1.5, overlapped=True),
    "ddp_adamw": Messages(payload=232e6, collectives=6, overlapped=True),
    "ddp_powersgd": Messages(payload=3e6, collectives=3, overlapped=False),
}
SMALL = (
    *("model.num_layers=2", "model.hidden_size=128", "model.intermediate_size=352", "model.num_heads=4"),
    *("model.vocab_size=500", "rank.linear=16", "rank.embedding=8"),
)


def make_cells(
    *, workers: Sequence[int] = (2, 4), rates: Sequence[float | None] = (None, 1000.0, 300.0), noise: float = 0.0
) -> list[Row]:
    """What a bench of the methods of `SENT` would measure if `MODEL` were true, times noise of each column."""
    generator = random.Random(0)
    cells = []
    for place in (Place(workers=size, rate_mbit=rate, cores=2) for size in workers for rate in rates):
        for method, messages in SENT.items():
            times = vars(MODEL.times(method, messages, place))
            parts = {f"{name}_s": value * generator.gauss(1, noise) for name, value in times.items()}
            link = {"workers": place.workers, "rate_mbit": place.rate_mbit, "cores": 2, "goodput_mbit": 100.0}
            rest = dict.fromkeys(("tokens", "peak_payload", "first_payload", "dropped", "wire_ratio"), 1)
            measured: dict[str, Any] = {**link, **rest, **parts, **vars(messages)}
            cells.append(Row(method=method, step_s=math.fsum(parts.values()), **measured))
    return cells


def written(path: Path, cells: Sequence[Row]) -> Path:
    write_rows(path, cells)
    return path


def values_of(model: CostModel) -> dict[str, float]:
    values = {name: value for name, value in vars(model).items() if isinstance(value, float)}
    return {**values, **{f"optimizer {name}": seconds for name, seconds in model.optimizer_s.items()}, **model.hook_s}


def test_a_step_is_the_sum_of_its_parts() -> None:
    """Four workers on two cores, by hand."""
    limited, fast = Place(workers=4, rate_mbit=300.0, cores=2), Place(workers=4, rate_mbit=None, cores=2)
    sent = 232e6 * 1.5  # 2 (N - 1) / N
    on_the_link, by_software = sent * 8 / (0.95 * 300e6), sent * 2.5e-9 * 2
    around = 232e6 * 1.2e-9 * 2 + 8 * 6 * 2e-4  # packing, and the hops of eight all-reduces
    late = SENT["adamw_late"]
    times = MODEL.times("adamw_late", late, limited)
    assert times.compute == pytest.approx(0.8)
    assert times.optimizer == pytest.approx(0.1)
    assert times.communication == pytest.approx(on_the_link + around)
    assert times.step == pytest.approx(0.9 + on_the_link + around)
    assert MODEL.times("adamw_late", late, fast).communication == pytest.approx(by_software + around)
    faster_than_software = replace(fast, rate_mbit=8000.0)
    assert MODEL.times("adamw_late", late, faster_than_software) == MODEL.times("adamw_late", late, fast)
    delayed = MODEL.times("adamw_late", late, replace(fast, latency_ms=3.0))
    assert delayed.communication == pytest.approx(by_software + around + 48 * 3e-3)
    hook = MODEL.times("ddp_powersgd", SENT["ddp_powersgd"], fast).communication
    assert hook == pytest.approx(3e6 * (1.5 * 2.5e-9 + 1.2e-9) * 2 + 18 * 2e-4 + 0.2 * 2)


def test_what_hides_behind_backward() -> None:
    """Of four all-reduces three, and no more than two thirds of compute; with all cores busy, what they wait for."""
    late = replace(SENT["adamw_late"], collectives=4)
    early = replace(late, overlapped=True)

    def hidden(place: Place) -> float:
        first, second = (MODEL.times("adamw_late", messages, place).communication for messages in (late, early))
        return first - second

    assert hidden(Place(workers=2, rate_mbit=300.0, cores=2)) == pytest.approx(0.4 * 2 / 3)
    short = Place(workers=2, rate_mbit=2.6e3, cores=2)
    on_the_link = 232e6 * 8 / (0.95 * 2.6e9)
    assert hidden(short) == pytest.approx(0.75 * (on_the_link - 232e6 * 2.5e-9 + 8 * 2e-4))
    assert hidden(replace(short, rate_mbit=None)) == pytest.approx(0.75 * 8 * 2e-4)
    assert hidden(replace(short, rate_mbit=None, latency_ms=1.0)) == pytest.approx(0.75 * 8 * 1.2e-3)
    assert hidden(replace(short, rate_mbit=None, latency_ms=1e3)) == pytest.approx(0.4 * 2 / 3)
    cheap = replace(MODEL, transfer_s=1e-10)
    idle = Place(workers=2, rate_mbit=None, latency_ms=1.0)
    last = 0.25 * (232e6 * 1e-10 + 8 * 1.2e-3)
    assert cheap.times("adamw_late", early, idle).communication == pytest.approx(232e6 * 1.2e-9 + last)
    assert idle.sharing == 1 and Place(workers=3, rate_mbit=None, cores=4).has_idle_core


def test_a_message_of_one_bucket_hides_nothing() -> None:
    """It is full when backward is over, as of methods that send less than a bucket; nor does none at all."""
    place = Place(workers=4, rate_mbit=100.0)
    for one in (Messages(payload=8e6 * number, collectives=number, overlapped=True) for number in (0, 1)):
        assert MODEL.times("tsr_head", one, place) == MODEL.times("tsr_head", replace(one, overlapped=False), place)


@pytest.mark.parametrize("rates", [(None, 1000.0, 300.0), (None, 300.0), (None, 8000.0, 1000.0)])
def test_known_parameters_are_recovered(rates: Sequence[float | None]) -> None:
    """Also where overlapped cells hide all, and where software is slower than the link (8 Gbit/s)."""
    found = fit(make_cells(rates=rates))
    assert values_of(found) == pytest.approx(values_of(MODEL), rel=1e-6)


def test_noise_of_the_cells_is_about_that_of_the_predictions() -> None:
    cells = make_cells(noise=0.05)
    found, true = values_of(fit(cells)), values_of(MODEL)
    for name in ("compute_s", "inverse_efficiency", "optimizer tsr"):
        assert found[name] == pytest.approx(true[name], rel=0.1)
    assert all(value >= 0 for value in found.values())
    errors = [abs(item.error) for item in hold_out(cells)]
    assert 0.005 < sorted(errors)[len(errors) // 2] < 0.08


def test_parameters_are_never_negative() -> None:
    """Cells whose communication does not grow with the number of all-reduces, nor as fast as bytes."""
    odd = [replace(cell, communication_s=2.0 - 0.1 * cell.collectives) for cell in make_cells()]
    assert min(values_of(fit(odd)).values()) == 0


def test_errors_are_relative_to_the_step() -> None:
    """So the same seconds count for less in a longer one, by the square."""

    def fitted(rate: float | None, seconds: float) -> float:
        cells = make_cells()
        keys = [(cell.method, cell.workers, cell.rate_mbit) for cell in cells]
        index = keys.index(("adamw_late", 4, rate))
        cells[index] = replace(cells[index], compute_s=cells[index].compute_s + seconds)
        return fit(cells).compute_s - MODEL.compute_s

    slow, fast = (
        MODEL.times("adamw_late", SENT["adamw_late"], Place(workers=4, rate_mbit=r, cores=2)).step
        for r in (300.0, None)
    )
    assert slow > 3 * fast
    assert fitted(300.0, 0.1) == pytest.approx(fitted(None, 0.1) * (fast / slow) ** 2, rel=1e-6)


def test_a_held_out_cell_is_unseen() -> None:
    """However wrong a group is, its prediction stays; every cell is predicted once."""
    cells = make_cells()
    wrong = [
        replace(cell, step_s=10 * cell.step_s, communication_s=10 * cell.communication_s, compute_s=5.0)
        if (cell.workers, cell.rate_mbit) == (4, 300.0)
        else cell
        for cell in cells
    ]
    held = {(item.method, item.workers, item.rate_mbit): item for item in hold_out(wrong)}
    assert len(held) == len(hold_out(wrong)) == len(cells)
    for cell in cells:
        if (cell.workers, cell.rate_mbit) == (4, 300.0):
            item = held.pop((cell.method, 4, 300.0))
            assert item.predicted_s == pytest.approx(cell.step_s, rel=1e-6)
            assert item.measured_s == 10 * cell.step_s and item.error == pytest.approx(-0.9, abs=1e-6)
    assert max(abs(item.error) for item in held.values()) > 0.1  # their fits have seen the wrong cells


def test_a_method_of_one_group_alone_has_no_seconds_without_it() -> None:
    cells = [cell for cell in make_cells() if cell.method != "tsr_head" or (cell.workers, cell.rate_mbit) == (2, 300)]
    with pytest.raises(ValueError, match="with 2 workers, 300 Mbit/s held out, no cell is left of tsr_head"):
        hold_out(cells)


def test_crossover_is_where_the_bytes_saved_take_as_long_as_the_work_added() -> None:
    """Without overlap, latency and software: 8 (difference of bytes sent) / (efficiency x difference of seconds)."""
    bare = replace(MODEL, latency_s=0.0, transfer_s=0.0, packing_s=0.0)
    found = Forecast(model=bare, messages={name: replace(sent, overlapped=False) for name, sent in SENT.items()})
    for workers in (8, 1024):
        place = Place(workers=workers, rate_mbit=None)
        bits = 8 * (232e6 - 86e6) * 2 * (workers - 1) / workers
        assert crossover(found, "tsr", place).bandwidth_mbit == pytest.approx(
            bits / 0.95 / (0.12 - 0.04) / 1e6, rel=1e-6
        )
    assert crossover(found, "adamw_late", place).bandwidth_mbit == NEVER
    cheap = replace(found, model=replace(bare, optimizer_s={**bare.optimizer_s, "tsr": 0.04}))
    assert crossover(cheap, "tsr", place).bandwidth_mbit == ALWAYS


def test_crossover_is_the_lowest_of_several() -> None:
    """A method that also wins where DDP has nothing to hide pays below the first bandwidth at which it does not."""
    model = replace(MODEL, latency_s=0.0, transfer_s=0.0, packing_s=0.0, optimizer_s={**MODEL.optimizer_s, "tsr": 0.02})
    found = Forecast(model=model, messages=SENT | {"tsr": replace(SENT["tsr"], overlapped=False)})
    place = Place(workers=4, rate_mbit=None)
    assert found.speedup("tsr", replace(place, rate_mbit=1e5)) > 1
    # link(DDP) - 2/3 compute + 0.04 = link(tsr) + 0.02
    expected = 8 * (232e6 - 86e6) * 1.5 / 0.95 / (0.4 * 2 / 3 - 0.02) / 1e6
    assert crossover(found, "tsr", place).bandwidth_mbit == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("method", "payload", "collectives"),
    [("tsr_bf16", 315993.6, 1.1), ("ddp_adamw", 7410176, 2), ("ddp_bf16", 3705088, 2), ("ddp_powersgd", 297472, 3)],
)
def test_what_the_bench_measured_is_counted(method: str, payload: float, collectives: float) -> None:
    """Rows of `python -m sweep.bench --experiment proxy --model llama_9m`, of two workers."""
    messages, parameters = messages_of(CONTESTANTS[method], "experiment=proxy", "model=llama_9m", "model.dtype=fp32")
    overlapped = method != "ddp_powersgd"
    assert messages == Messages(payload=payload, collectives=collectives, overlapped=overlapped)
    assert parameters == 7_410_176 / 4


@pytest.mark.parametrize("method", ["adamw", "adamw_late", "galore", "one_sided", "tsr", "tsr_head", "tsr_bf16"])
def test_payload_is_the_closed_form_over_an_interval(method: str) -> None:
    """Steps 2 to 201, each computed on its own."""
    wanted = ("experiment=table3", "model.dtype=fp32", *SMALL)
    messages, _ = messages_of(CONTESTANTS[method], *wanted)
    config = compose(*wanted, *CONTESTANTS[method].overrides)
    optimizer = build_optimizer(config, build_model(config, "meta"), Communicator())
    choices = {"reduce": optimizer.options.reduce, "refresh": optimizer.refresh}
    elements = sum(step_elements(optimizer.blocks, step, **choices).total() for step in range(2, 202))
    assert messages.payload == elements / 200 * (2 if method == "tsr_bf16" else 4)
    assert messages.overlapped == (method != "adamw_late")
    refreshes = method in ("tsr", "tsr_head")  # the embedding's, every other step, of a round of two
    once = {"tsr_bf16": 1.02, "one_sided": 1.005}  # a round of two in 100 steps, one of one in 200
    assert messages.collectives == (2.0 if refreshes else once.get(method, 1.0))


def test_buckets_of_the_configuration_are_counted() -> None:
    smaller = replace(CONTESTANTS["adamw"], overrides=("optimizer=adamw", "comm.bucket_mib=0.05"))
    messages, _ = messages_of(smaller, "experiment=table3", "model.dtype=fp32", *SMALL)
    assert messages.collectives > 2 and not messages.overlapped


class Layers(nn.Module):
    """Weights whose gradients backward has in the reverse of their order."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*itertools.starmap(nn.Linear, itertools.pairwise(widths)))

    def forward(self, batch: Tensor) -> Tensor:
        return self.layers(batch)


@pytest.mark.parametrize("widths", [(600, 600, 32, 32), (32, 600, 900, 300, 7), (2048, 2048, 2048, 2048, 600, 10)])
def test_buckets_are_those_of_torch(widths: Sequence[int]) -> None:
    """From the second step on, as DDP's order of buckets is settled by the first; 2, 3 and 38 MB."""
    model = Layers(*widths)
    with one_worker():
        wrapped = DistributedDataParallel(model)
        for _ in range(2):
            wrapped(torch.ones(2, widths[0])).sum().backward()
        with CollectiveOracle() as oracle:
            wrapped(torch.ones(2, widths[0])).sum().backward()
    expected = ddp_messages(list(model.parameters()), narrow=False)
    assert (oracle.calls["allreduce_"], oracle.bytes["allreduce_"]) == (expected.collectives, expected.payload)
    narrow = ddp_messages(list(model.parameters()), narrow=True)
    assert narrow == replace(expected, payload=expected.payload / 2)


def test_powersgd_sends_what_its_hook_does() -> None:
    """One matrix too small to gain, one that does not, biases."""
    model = Layers(64, 96, 48, 8)
    with one_worker():
        wrapped = DistributedDataParallel(model, bucket_cap_mb=2**14)
        state = powersgd.PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powersgd.powerSGD_hook)
        for _ in range(4):
            with counted_calls() as sizes:
                wrapped(torch.ones(2, 64)).sum().backward()
    expected = powersgd_messages([parameter.shape for parameter in model.parameters()], rank=4)
    assert (len(sizes), sum(sizes)) == (expected.collectives, expected.payload)


def test_forecast_of_another_model_from_a_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of the optimizer grow with parameters, and those of compute unless they are given."""
    monkeypatch.setattr(forecasts, "messages_of", lambda contestant, *_: (SENT[contestant.name], 116_000_000))  # twice
    cells = make_cells()
    wanted, place = job("llama_350m"), Place(workers=64, rate_mbit=100.0)
    times = forecast(cells, ["tsr"], wanted).times("tsr", place)
    assert (times.compute, times.optimizer) == (pytest.approx(0.8), pytest.approx(0.24))
    assert forecast(cells, ["tsr"], wanted, compute_s=1.5).times("tsr", place).compute == 1.5
    with pytest.raises(ValueError, match=r"--model must be one of llama_60m.*, got 'llama_9m'"):
        job("llama_9m")
    with pytest.raises(ValueError, match="galore was not measured"):
        forecast(cells, ["galore"], wanted)
    faster = forecast(cells, ["tsr"], wanted, speed=4.0).model
    assert values_of(faster)["optimizer tsr"] == pytest.approx(0.06)
    assert (faster.compute_s, faster.inverse_efficiency) == (pytest.approx(0.2), pytest.approx(1 / 0.95))
    assert (faster.transfer_s, faster.latency_s) == (pytest.approx(2.5e-9 / 4), 0)  # of busy cores
    far = replace(place, latency_ms=20.0)
    rows = forecasts.predictions(forecast(cells, ["tsr"], wanted), [place, far], of="llama_350m")
    assert {row.latency_ms: row.step_s for row in rows if row.method == "tsr"}.keys() == {place.latency_ms, 20.0}


def test_figure_has_a_line_a_method_and_marks_crossovers() -> None:
    model = replace(MODEL, optimizer_s={**MODEL.optimizer_s, "tsr": 1.5})
    found = Forecast(model=model, messages={name: SENT[name] for name in ("adamw_late", "tsr", BASELINE)})
    places = [Place(workers=size, rate_mbit=None) for size in (8, 64)]
    crossings = [crossover(found, method, place) for place in places for method in ("adamw_late", "tsr")]
    panels = speedup_figure(found, places, crossings).axes
    assert len(panels) == 2
    for panel, place, crossing in zip(panels, places, crossings[1::2], strict=True):
        lines = {str(line.get_label()): np.array(line.get_data()) for line in panel.lines}
        rates, speedups = lines["tsr"]
        assert (rates[0], rates[-1]) == (pytest.approx(1e6), pytest.approx(1e11))
        assert speedups[0] == pytest.approx(found.speedup("tsr", replace(place, rate_mbit=1.0)))
        (point,), (height,) = lines["_crossover"]  # adamw_late's would be a second one
        assert (point, height) == (pytest.approx(1e6 * float(crossing.bandwidth_mbit)), 1)
        assert min(speedups[rates <= point]) >= 1 >= max(speedups[rates > point])


def table_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_command_writes_tables_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = written(tmp_path / "bench.csv", make_cells(noise=0.02))
    out, readme = tmp_path / "out", tmp_path / "README.md"
    readme.write_text("above\n<!-- begin cost -->\nold\n<!-- end cost -->\nbelow\n")
    choice = ["--methods", "tsr,adamw_late", "--workers", "8,1024", "--rate", "10,1000", "--compute-s", "1.5"]
    assert main([str(bench), "--out", str(out), *choice, "--readme", str(readme), "cost", "--set", *SMALL]) == 0
    printed = capsys.readouterr().out
    errors = next(line for line in printed.splitlines() if "Step time of held-out cells: median error" in line)
    assert (out / "cost.md").read_text(encoding="utf-8") in printed
    rows = table_of(out / "predictions.csv")
    assert [(row["method"], row["workers"], row["rate_mbit"]) for row in rows[:4]] == [
        ("tsr", "8", "10.0"), ("adamw_late", "8", "10.0"), (BASELINE, "8", "10.0"), ("tsr", "8", "1000.0"),
    ]  # fmt: skip
    assert len(rows) == 12 and {row["compute_s"] for row in rows} == {"1.5"}
    seconds = [[float(row[f"{part}_s"]) for part in ("step", "compute", "communication", "optimizer")] for row in rows]
    assert all(math.isclose(step, sum(parts)) for step, *parts in seconds)
    assert float(rows[0]["speedup"]) == pytest.approx(seconds[2][0] / seconds[0][0])
    held = table_of(out / "holdout.csv")
    assert len(held) == 30 and all(abs(float(row["error"])) < 0.15 for row in held)
    assert {path.name for path in out.iterdir()} == {
        "cost.md", "predictions.csv", "holdout.csv", "crossovers.csv", "speedup.png", "speedup.pdf",
    }  # fmt: skip
    assert mpl.image.imread(out / "speedup.png").std() > 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("above\n") and text.endswith("below\n") and "old" not in text
    assert errors.strip("#* ") in text
    (line,) = (line for line in text.splitlines() if line.startswith("| tsr"))
    points = [row["bandwidth_mbit"] for row in table_of(out / "crossovers.csv") if row["method"] == "tsr"]
    assert [cell.strip() for cell in line.strip("|").split("|")[1:]] == points


def test_crossovers_stand_by_method_and_workers() -> None:
    points: dict[Any, Any] = {("tsr", 8): 1234.56, ("tsr", 64): ALWAYS, ("galore", 8): NEVER, ("galore", 64): 7.0}
    rows = [Crossover(method=name, workers=size, bandwidth_mbit=point) for (name, size), point in points.items()]
    shown = crossovers_table(rows, of="llama_60m", compute_s=1.5, latency_ms=0.1)
    assert shown.columns == ("method", "8 workers", "64 workers")
    assert shown.rows == (("tsr", "1230", "always"), ("galore", "never", "7"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"method": "tsrr"}, "row 31: method must be of adamw, adamw_late"),
        ({"payload": math.nan}, "row 31: payload must be 0 or more, got nan"),
        ({"step_s": 0.0}, "row 31: step_s must be 1e-06 or more, got 0.0"),
        ({"workers": 1}, "row 31: workers must be 2 or more, got 1"),
    ],
)
def test_bad_values_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], text: str
) -> None:
    *cells, last = make_cells()
    bench = written(tmp_path / "bench.csv", [*cells, replace(last, **changes)])
    assert main([str(bench), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and text in error


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--methods", "tsr,nope"], "--methods: each must be one of adamw, adamw_late"),
        (["--methods", "ddp_adamw"], "--methods must name one besides"),
        (["--compute-s", "-1"], "--compute-s must be a number of 0 or more, got -1.0"),
        (["--workers", "1,8"], "--workers: each must be a whole number from 2, got '1,8'"),
        (["--latency-ms", "nan"], "--latency-ms must be a number of 0 or more, got nan"),
        (["--speed", "0"], "--speed must be a positive number"),
        (["--workers", "8,x"], "--workers: each must be a positive whole number, as in 10,100, got '8,x'"),
        (["--set", "model.num_layers"], "model.num_layers"),
        (
            ["--readme", "absent.md", "cost", "--methods", "tsr", "--set", *SMALL],
            "--readme must begin with a file that exists, got 'absent.md'",
        ),
    ],
)
def test_bad_options_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], text: str
) -> None:
    bench = written(tmp_path / "bench.csv", make_cells())
    assert main([str(bench), "--out", str(tmp_path / "out"), *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and text in error
    assert not (tmp_path / "out").exists()


def test_bad_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error_of(path: Path, *options: str) -> str:
        assert main([str(path), "--out", str(tmp_path / "out"), *options]) == 1
        return capsys.readouterr().err

    (other := tmp_path / "other.csv").write_text("method,workers\n")
    assert "no column rate_mbit" in error_of(other)
    assert "no cells; it must be the bench.csv" in error_of(tmp_path / "absent.csv")
    few = written(tmp_path / "few.csv", make_cells(workers=(2,), rates=(None, 100.0)))
    assert "with 2 workers, unlimited held out: 5 cells are too few to fit on" in error_of(few)
    one = written(tmp_path / "one.csv", make_cells(workers=(2,), rates=(100.0,)))
    assert "no cells are left to fit on" in error_of(one)
    (tmp_path / "out").touch()
    all_there = written(tmp_path / "bench.csv", make_cells())
    assert "--out must be a folder, or a place for a new one, got" in (
        error := error_of(all_there, "--methods", "tsr", "--set", *SMALL)
    )
    assert error.startswith("error: ") and error.count("\n") == 1
