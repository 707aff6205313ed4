"""The bench's cost model: parameters are recovered, held-out cells unseen, crossovers where algebra has them."""

from __future__ import annotations

import csv
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from sweep.bench import cost
from sweep.bench.cells import CONTESTANTS
from sweep.bench.cost import (
    ALWAYS,
    COLUMNS,
    NEVER,
    REFERENCE,
    CostModel,
    Forecast,
    Measured,
    Messages,
    Place,
    crossover,
    ddp_messages,
    fit,
    hold_out,
    main,
    messages_of,
    powersgd_messages,
    predict,
    read_cells,
    speedup_figure,
)
from sweep.bench.oracle import CollectiveOracle
from sweep.bench.steps import one_worker
from sweep.cells import compose
from train import build_model, build_optimizer
from tsr import Communicator
from tsr.accounting import step_elements

MODEL = CostModel(
    compute_s=0.4,
    optimizer_s={"adamw": 0.05, "tsr": 0.12, "tsr_head": 0.15, "ddp_adamw": 0.04, "ddp_powersgd": 0.03},
    latency_s=2e-4,
    inverse_efficiency=1 / 0.95,
    transfer_s=2.5e-9,
    packing_s=1.2e-9,
    hook_s={"ddp_powersgd": 0.2},
)
SENT = {
    "adamw": Messages(payload=232e6, collectives=1, overlapped=False),
    "tsr": Messages(payload=86e6, collectives=2, overlapped=False),
    "tsr_head": Messages(payload=8e6, collectives=1.5, overlapped=False),
    "ddp_adamw": Messages(payload=232e6, collectives=6, overlapped=True),
    "ddp_powersgd": Messages(payload=3e6, collectives=3, overlapped=False),
}
SMALL = (
    *("model.num_layers=2", "model.hidden_size=128", "model.intermediate_size=352", "model.num_heads=4"),
    *("model.vocab_size=500", "rank.linear=16", "rank.embedding=8"),
)


def make_cells(
    model: CostModel = MODEL,
    *,
    workers: Sequence[int] = (2, 4),
    rates: Sequence[float | None] = (None, 1000.0, 300.0),
    noise: float = 0.0,
    cores: int = 2,
) -> list[Measured]:
    """What a bench of the methods of `SENT` would measure if the model were true, times noise of each column."""
    generator = random.Random(0)
    cells = []
    for size in workers:
        for rate in rates:
            for method, messages in SENT.items():
                place = Place(workers=size, rate_mbit=rate, cores=cores)
                times = model.times(method, messages, place)
                noisy = replace(
                    times,
                    compute=times.compute * generator.gauss(1, noise),
                    communication=times.communication * generator.gauss(1, noise),
                    optimizer=times.optimizer * generator.gauss(1, noise),
                )
                cells.append(
                    Measured(method=method, place=place, messages=messages, tokens=64, step_s=noisy.step, times=noisy)
                )
    return cells


def write_cells(path: Path, cells: Sequence[Measured], **changes: str) -> Path:
    """`bench.csv` of these cells; ``changes`` are to columns of the last row."""
    rows = [
        {
            "method": cell.method,
            "workers": cell.place.workers,
            "rate_mbit": "" if cell.place.rate_mbit is None else cell.place.rate_mbit,
            "cores": cell.place.cores,
            "tokens": cell.tokens,
            "step_s": cell.step_s,
            "compute_s": cell.times.compute,
            "communication_s": cell.times.communication,
            "optimizer_s": cell.times.optimizer,
            "payload": cell.messages.payload,
            "collectives": cell.messages.collectives,
            "overlapped": cell.messages.overlapped,
            "dropped": 0,
        }
        for cell in cells
    ]
    rows[-1] |= changes
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def values_of(model: CostModel) -> dict[str, float]:
    values = {name: value for name, value in vars(model).items() if isinstance(value, float)}
    return {**values, **{f"optimizer {name}": seconds for name, seconds in model.optimizer_s.items()}, **model.hook_s}


def test_a_step_is_the_sum_of_its_parts() -> None:
    """Four workers on two cores, by hand."""
    limited, fast = Place(workers=4, rate_mbit=300.0, cores=2), Place(workers=4, rate_mbit=None, cores=2)
    sent = 232e6 * 1.5  # 2 (N - 1) / N
    on_the_link, by_software = sent * 8 / (0.95 * 300e6), sent * 2.5e-9 * 2
    around = 232e6 * 1.2e-9 * 2 + 6 * 2e-4  # packing, and the hops of one all-reduce
    times = MODEL.times("adamw", SENT["adamw"], limited)
    assert times.compute == pytest.approx(0.8)
    assert times.optimizer == pytest.approx(0.1)
    assert times.communication == pytest.approx(on_the_link + around)
    assert times.step == pytest.approx(0.9 + on_the_link + around)
    assert MODEL.times("adamw", SENT["adamw"], fast).communication == pytest.approx(by_software + around)
    faster_than_software = replace(fast, rate_mbit=8000.0)
    assert MODEL.times("adamw", SENT["adamw"], faster_than_software) == MODEL.times("adamw", SENT["adamw"], fast)
    delayed = replace(fast, latency_ms=3.0)
    assert MODEL.times("adamw", SENT["adamw"], delayed).communication == pytest.approx(by_software + around + 6 * 3e-3)
    hook = MODEL.times("ddp_powersgd", SENT["ddp_powersgd"], fast).communication
    assert hook == pytest.approx(3e6 * (1.5 * 2.5e-9 + 1.2e-9) * 2 + 18 * 2e-4 + 0.2 * 2)


def test_what_hides_behind_backward() -> None:
    """No more than two thirds of compute; with all cores busy, the wait for hops and link alone."""
    plain, overlapped = SENT["adamw"], replace(SENT["adamw"], overlapped=True)

    def hidden(place: Place) -> float:
        times = (MODEL.times("adamw", messages, place).communication for messages in (plain, overlapped))
        return next(times) - next(times)

    bytes_sent = 232e6  # of two workers
    assert hidden(Place(workers=2, rate_mbit=300.0, cores=2)) == pytest.approx(0.4 * 2 / 3)
    short = Place(workers=2, rate_mbit=2.6e3, cores=2)
    on_the_link = bytes_sent * 8 / (0.95 * 2.6e9)
    assert hidden(short) == pytest.approx(on_the_link - bytes_sent * 2.5e-9 + 2 * 2e-4)
    assert hidden(replace(short, rate_mbit=None)) == pytest.approx(2 * 2e-4)
    assert hidden(replace(short, rate_mbit=None, latency_ms=1.0)) == pytest.approx(2 * 1.2e-3)
    assert hidden(replace(short, rate_mbit=None, latency_ms=1e3)) == pytest.approx(0.4 * 2 / 3)
    cheap = replace(MODEL, transfer_s=1e-10)
    idle = Place(workers=2, rate_mbit=None, latency_ms=1.0)
    assert cheap.times("adamw", overlapped, idle).communication == pytest.approx(bytes_sent * 1.2e-9)
    assert idle.sharing == 1 and Place(workers=3, rate_mbit=None, cores=4).has_idle_core


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
    cells = make_cells()
    odd = [
        replace(cell, times=replace(cell.times, communication=2.0 - 0.1 * cell.messages.collectives)) for cell in cells
    ]
    assert min(values_of(fit(odd)).values()) == 0


def test_errors_are_relative_to_the_step() -> None:
    """So the same seconds count for less in a longer one, by the square."""

    def fitted(rate: float | None, seconds: float) -> float:
        cells = make_cells()
        index = next(i for i, cell in enumerate(cells) if (cell.method, *cell.group) == ("adamw", 4, rate))
        times = cells[index].times
        cells[index] = replace(cells[index], times=replace(times, compute=times.compute + seconds))
        return fit(cells).compute_s - MODEL.compute_s

    slow, fast = (
        MODEL.times("adamw", SENT["adamw"], Place(workers=4, rate_mbit=r, cores=2)).step for r in (300.0, None)
    )
    assert slow > 3 * fast
    assert fitted(300.0, 0.1) == pytest.approx(fitted(None, 0.1) * (fast / slow) ** 2, rel=1e-6)


def test_a_held_out_cell_is_unseen() -> None:
    """However wrong a group is, its prediction stays; every cell is predicted once."""
    cells = make_cells()
    group = (4, 300.0)
    wrong = [
        replace(
            cell,
            step_s=10 * cell.step_s,
            times=replace(cell.times, communication=10 * cell.times.communication, compute=5.0, optimizer=9.0),
        )
        if cell.group == group
        else cell
        for cell in cells
    ]
    held = hold_out(wrong)
    assert Counter(id(item.cell) for item in held) == Counter(map(id, wrong))
    for item, cell in ((item, cell) for item in held for cell in cells if cell.group == group == item.cell.group):
        if item.cell.method == cell.method:
            assert item.predicted == pytest.approx(cell.step_s, rel=1e-6)
            assert item.error == pytest.approx(-0.9, abs=1e-6)
    others = [abs(item.error) for item in held if item.cell.group != group]
    assert max(others) > 0.1  # their fits have seen the wrong cells


@pytest.mark.parametrize(
    ("chosen", "count"),
    [({"workers": "4", "rate": "300"}, 5), ({"rate": "none"}, None), ({"rate": "1000"}, 10), ({"workers": "2"}, 15)],
)
def test_chosen_cells_are_held_out(chosen: dict[str, str], count: int | None) -> None:
    if count is None:
        with pytest.raises(ValueError, match=r"2 workers, unlimited held out: .*links without a limit and with one"):
            hold_out(make_cells(), chosen)
        return
    held = hold_out(make_cells(rates=(None, 1000.0, 300.0)), chosen)
    assert len(held) == count
    assert all(abs(item.error) < 1e-6 for item in held)


def test_a_method_that_is_held_out_altogether_has_no_seconds() -> None:
    with pytest.raises(ValueError, match="tsr_head is in no other cell"):
        hold_out(make_cells(), {"method": "tsr_head"})
    with pytest.raises(ValueError, match=r"workers=3: no cell is so; they are 2 workers, unlimited; 2 workers, 1000"):
        hold_out(make_cells(), {"workers": "3"})


def test_crossover_is_where_the_bytes_saved_take_as_long_as_the_work_added() -> None:
    """Without overlap, latency and software: 8 (difference of bytes sent) / (efficiency x difference of seconds)."""
    bare = replace(MODEL, latency_s=0.0, transfer_s=0.0, packing_s=0.0)
    sent = SENT | {REFERENCE: replace(SENT[REFERENCE], overlapped=False)}
    found = Forecast(model=bare, messages=sent)
    for workers in (8, 1024):
        place = Place(workers=workers, rate_mbit=None)
        bits = 8 * (232e6 - 86e6) * 2 * (workers - 1) / workers
        assert crossover(found, "tsr", place) == pytest.approx(bits / 0.95 / (0.12 - 0.04) / 1e6, rel=1e-6)
    assert crossover(found, "adamw", place) == NEVER
    cheap = replace(found, model=replace(bare, optimizer_s={**bare.optimizer_s, "tsr": 0.04}))
    assert crossover(cheap, "tsr", place) == ALWAYS


def test_crossover_is_the_lowest_of_several() -> None:
    """A method that also wins where DDP has nothing to hide pays below the first bandwidth at which it does not."""
    model = replace(MODEL, latency_s=0.0, transfer_s=0.0, packing_s=0.0, optimizer_s={**MODEL.optimizer_s, "tsr": 0.02})
    found = Forecast(model=model, messages=SENT)
    place = Place(workers=4, rate_mbit=None)
    assert found.speedup("tsr", replace(place, rate_mbit=1e5)) > 1
    # link(DDP) - 2/3 compute + 0.04 = link(tsr) + 0.02
    expected = 8 * (232e6 - 86e6) * 1.5 / 0.95 / (0.4 * 2 / 3 - 0.02) / 1e6
    assert crossover(found, "tsr", place) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("method", ["adamw", "galore", "one_sided", "tsr", "tsr_head", "tsr_bf16"])
def test_payload_is_the_closed_form_over_an_interval(method: str) -> None:
    """Steps 2 to 101, each computed on its own."""
    job = ("experiment=table3", "model.dtype=fp32", *SMALL)
    messages, parameters = messages_of(CONTESTANTS[method], *job)
    config = compose(*job, *CONTESTANTS[method].overrides)
    model = build_model(config, "meta")
    optimizer = build_optimizer(config, model, Communicator())
    choices = {"reduce": optimizer.options.reduce, "refresh": optimizer.refresh}
    elements = sum(step_elements(optimizer.blocks, step, **choices).total() for step in range(2, 102))
    assert messages.payload == elements / 100 * (2 if method == "tsr_bf16" else 4)
    assert parameters == sum(parameter.numel() for parameter in model.parameters())
    assert not messages.overlapped
    refreshes = method in ("tsr", "tsr_head")  # the embedding's, every other step, of a round of two
    assert messages.collectives == (2.0 if refreshes else 1.02 if method == "tsr_bf16" else 1.0)


def test_overlap_of_the_configuration_is_predicted() -> None:
    job = ("experiment=table3", "model.dtype=fp32", *SMALL, "comm.overlap=true", "comm.bucket_mib=0.05")
    messages, _ = messages_of(CONTESTANTS["adamw"], *job)
    assert messages.overlapped and messages.collectives > 2


class Layers(nn.Module):
    """Weights whose gradients backward has in the reverse of their order."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = pairwise(widths)
        self.layers = nn.Sequential(*(nn.Linear(before, after) for before, after in pairs))

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


def test_powersgd_sends_what_its_hook_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """One matrix too small to gain, one that does not, biases."""
    sizes = []
    send: Callable[..., Any] = dist.all_reduce

    def counted(tensor: Tensor, **options: Any) -> Any:
        sizes.append(tensor.nbytes)
        return send(tensor, **options)

    monkeypatch.setattr(powersgd.dist, "all_reduce", counted)
    model = Layers(64, 96, 48, 8)
    with one_worker():
        wrapped = DistributedDataParallel(model, bucket_cap_mb=2**14)
        state = powersgd.PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powersgd.powerSGD_hook)
        for _ in range(4):
            sizes.clear()
            wrapped(torch.ones(2, 64)).sum().backward()
    expected = powersgd_messages([parameter.shape for parameter in model.parameters()], rank=4)
    assert (len(sizes), sum(sizes)) == (expected.collectives, expected.payload)


def test_prediction_of_another_model_from_a_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of the optimizer grow with parameters, and those of compute unless they are given."""
    monkeypatch.setattr(cost, "messages_of", lambda contestant, *_: (SENT[contestant.name], 116_000_000))  # twice
    cells = make_cells()
    choices: dict[str, Any] = {"model": "llama_350m", "workers": 64, "rate_mbit": 100.0}
    times = predict(cells, "tsr", **choices)
    assert (times.compute, times.optimizer) == (pytest.approx(0.8), pytest.approx(0.24))
    given = predict(cells, "tsr", compute_s=1.5, latency_ms=2.0, **choices)
    assert given.compute == 1.5
    assert given.communication - times.communication == pytest.approx(2 * 126 * 2e-3)
    with pytest.raises(ValueError, match=r"--model must be one of llama_60m.*, got 'llama_9m'"):
        predict(cells, "tsr", model="llama_9m", workers=4, rate_mbit=None)
    with pytest.raises(ValueError, match="galore was not measured"):
        predict(cells, "galore", **choices)
    faster = cost.forecast(cells, ["tsr"], ("model=llama_350m",), speed=4.0).model
    assert values_of(faster)["optimizer tsr"] == pytest.approx(0.06)
    assert (faster.compute_s, faster.inverse_efficiency) == (pytest.approx(0.2), pytest.approx(1 / 0.95))
    assert (faster.transfer_s, faster.latency_s) == (pytest.approx(2.5e-9 / 4), pytest.approx(5e-5))


def lines_of(figure: Figure) -> list[dict[str, tuple[list[float], list[float]]]]:
    """Of each panel the points of its lines, by label."""
    return [
        {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines}  # type: ignore[arg-type]
        for panel in figure.axes
    ]


def test_figure_has_a_line_a_method_and_marks_crossovers() -> None:
    model = replace(MODEL, optimizer_s={**MODEL.optimizer_s, "tsr": 0.9})
    found = Forecast(model=model, messages={name: SENT[name] for name in ("adamw", "tsr", REFERENCE)})
    places = [Place(workers=size, rate_mbit=None) for size in (8, 64)]
    crossings = {
        (method, place.workers): crossover(found, method, place) for place in places for method in ("adamw", "tsr")
    }
    panels = lines_of(speedup_figure(found, places, crossings))
    assert len(panels) == 2
    for panel, place in zip(panels, places, strict=True):
        bandwidths, speedups = panel["tsr"]
        assert (bandwidths[0], bandwidths[-1]) == (pytest.approx(1e6), pytest.approx(1e11))
        slowest = replace(place, rate_mbit=1.0)
        assert speedups[0] == pytest.approx(found.times(REFERENCE, slowest).step / found.times("tsr", slowest).step)
        (point,), (height,) = panel["_crossover"]  # adamw's would be a second one
        assert (point, height) == (pytest.approx(1e6 * float(crossings["tsr", place.workers])), 1)
        before = max(index for index, bandwidth in enumerate(bandwidths) if bandwidth <= point)
        assert speedups[before] >= 1 >= speedups[before + 1]


def test_command_writes_tables_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = write_cells(tmp_path / "bench.csv", make_cells(noise=0.02))
    out = tmp_path / "out"
    arguments = [str(bench), "--out", str(out), "--methods", "tsr,adamw", "--workers", "8,1024", "--rate", "10,1000"]
    assert main([*arguments, "--compute-s", "1.5", "--set", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "Step time of held-out cells: median error" in printed
    assert (out / "cost.md").read_text(encoding="utf-8") in printed
    with (out / "predictions.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["workers"], row["rate_mbit"]) for row in rows[:4]] == [
        ("tsr", "8", "10.0"), ("adamw", "8", "10.0"), (REFERENCE, "8", "10.0"), ("tsr", "8", "1000.0"),
    ]  # fmt: skip
    assert len(rows) == 12
    assert {row["compute_s"] for row in rows} == {"1.5"}
    parts = ("compute_s", "communication_s", "optimizer_s")
    assert all(math.isclose(sum(float(row[part]) for part in parts), float(row["step_s"])) for row in rows)
    assert float(rows[0]["speedup"]) == pytest.approx(float(rows[2]["step_s"]) / float(rows[0]["step_s"]))
    with (out / "holdout.csv").open(encoding="utf-8") as file:
        held = list(csv.DictReader(file))
    assert len(held) == 30 and all(abs(float(row["error"])) < 0.15 for row in held)
    assert {path.name for path in out.iterdir()} == {
        "cost.md", "predictions.csv", "holdout.csv", "crossovers.csv", "speedup.png", "speedup.pdf",
    }  # fmt: skip
    assert mpl.image.imread(out / "speedup.png").std() > 0


def drop_column(path: Path, name: str) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [key for key in rows[0] if key != name], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"method": "tsrr"}, "row 31: method must be one of adamw, galore"),
        ({"overlapped": "perhaps"}, "row 31: overlapped must be True or False, got 'perhaps'"),
        ({"payload": "nan"}, "row 31: payload must be a number of 0 or more, got 'nan'"),
        ({"step_s": "0"}, "step_s above 0, got 4, 2 and 0"),
        ({"rate_mbit": "0"}, "row 31: rate_mbit must be above 0, or empty for an unlimited link, got 0"),
        ({"tokens": "128"}, "tokens must be the same in all cells, got 64, 128"),
        ({"cores": "8"}, "cores must be the same in all cells, got 2, 8"),
    ],
)
def test_bad_values_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], text: str
) -> None:
    bench = write_cells(tmp_path / "bench.csv", make_cells(), **changes)
    assert main([str(bench), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and text in error


@pytest.mark.parametrize("column", COLUMNS)
def test_an_absent_column_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str) -> None:
    bench = write_cells(tmp_path / "bench.csv", make_cells())
    drop_column(bench, column)
    assert main([str(bench), "--out", str(tmp_path / "out")]) == 1
    assert f"no column {column};" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--methods", "tsr,nope"], "--methods must be of adamw, galore, one_sided"),
        (["--methods", "ddp_adamw"], "--methods must name one besides ddp_adamw"),
        (["--compute-s", "1,2"], "--compute-s must be a positive number, as in 1.5, got '1,2'"),
        (["--speed", "0"], "--speed must be a positive number"),
        (["--latency-ms", "-1"], "--latency-ms must be a number of 0 or more, got '-1'"),
        (["--methods", "galore"], "galore was not measured"),
        (["--model", "llama_9m"], "--model must be one of llama_60m"),
        (["--workers", "8,x"], "--workers must be positive whole numbers, as in 10,100, got '8,x'"),
        (["--workers", "1.5"], "--workers must be positive whole numbers"),
        (["--rate", "0"], "--rate must be positive numbers"),
        (["--hold-out", "cores=2"], "--hold-out must be like workers=4,rate=300"),
        (["--hold-out", "rate=77"], "--hold-out rate=77: no cell is so"),
        (["--set", "model.num_layers"], "model.num_layers"),
    ],
)
def test_bad_options_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], text: str
) -> None:
    bench = write_cells(tmp_path / "bench.csv", make_cells())
    assert main([str(bench), "--out", str(tmp_path / "out"), *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and text in error
    assert not (tmp_path / "out").exists()


def test_files_without_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error_of(path: Path) -> str:
        assert main([str(path), "--out", str(tmp_path / "out")]) == 1
        return capsys.readouterr().err

    empty, header = tmp_path / "empty.csv", tmp_path / "header.csv"
    empty.touch()
    header.write_text(",".join(COLUMNS) + "\n")
    assert "no column method, rate_mbit" in error_of(empty)
    assert "no cells" in error_of(header)
    assert "cannot be read" in error_of(tmp_path / "absent.csv")
    few = write_cells(tmp_path / "few.csv", make_cells(workers=(2,), rates=(None, 100.0)))
    assert "with 2 workers, unlimited held out: 5 cells are too few to fit on" in error_of(few)
    one = write_cells(tmp_path / "one.csv", make_cells(workers=(2,), rates=(100.0,)))
    assert "no cells are left to fit on" in error_of(one)


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = write_cells(tmp_path / "bench.csv", make_cells())
    options = ["--methods", "adamw", "--set", *SMALL]
    assert main([str(bench), "--out", str(bench / "out"), *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "bench.csv" in error


def test_cells_are_read_as_they_were_measured(tmp_path: Path) -> None:
    cells = make_cells()
    assert read_cells(write_cells(tmp_path / "bench.csv", cells)) == cells
