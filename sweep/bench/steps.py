"""`python -m sweep.bench.steps --out DIR`: what a step costs one process, beside torch's own AdamW and a plain loop.

Everything of a model is timed turn by turn in one run and given as medians: forward and backward; every kind of step of
each method, weighed over an interval; torch.optim.AdamW, fused and foreach; and tokens a second of this project's loop
and of a plain one with DDP.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from data import Batch
from data.batches import GlobalStep
from data.tasks import TASKS
from sweep.bench.forecast import job
from sweep.bench.rows import check_folder
from sweep.cells import compose
from sweep.report import check_place, put
from sweep.tables import Table
from train import build_model, build_optimizer
from tsr import Communicator, LowRankAdam
from tsr.accounting import state_bytes
from tsr.harness.loop import Trainer
from tsr.harness.rundir import RunDirectory
from tsr.harness.settings import Schedule, TrainerSettings

METHODS = {
    "adamw": ("optimizer=adamw",),
    "tsr": ("optimizer=tsr",),
    "tsr_head": ("optimizer=tsr", "rank.head=64"),
}
LOOP_STEPS = 5  # of a turn


def alternate(pieces: Mapping[str, Callable[[], None]], *, repeats: int) -> dict[str, float]:
    """Median seconds of each piece, run in turns after one turn that does not count."""
    times: dict[str, list[float]] = {name: [] for name in pieces}
    for turn in range(repeats + 1):
        print(f"steps, forward and backward: {f'turn {turn} of {repeats}' if turn else 'begin'}", flush=True)
        for name, piece in pieces.items():
            start = time.perf_counter()
            piece()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def model_of(*overrides: str) -> tuple[dict[str, Any], nn.Module]:
    """Configuration and model of the paper's setting for a model."""
    config = compose("experiment=table3", "model.dtype=fp32", *overrides)
    return config, build_model(config, "cpu")


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean next-token loss of full rows."""
    batch = Batch(tokens, torch.full((len(tokens),), tokens.shape[1]))
    return TASKS["pretrain"].objective(model, batch)[0].sum() / batch.loss_tokens


def forward_backward(model: nn.Module, tokens: Tensor) -> None:
    """Forward, and backward into gradients that are not there yet."""
    model.zero_grad(set_to_none=True)
    loss_of(model, tokens).backward()


def time_steps(model_name: str, *, tokens: int, length: int, repeats: int) -> dict[str, Any]:
    """Seconds of forward and backward on ``tokens``, and of steps; bytes of optimizer state."""
    config, model = model_of(f"model={model_name}")
    batch = torch.randint(config["model"]["vocab_size"], (tokens // length, length))
    loss_of(model, batch).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    optimizers: dict[str, LowRankAdam] = {}
    pieces: dict[str, Callable[[], None]] = {}
    weights: dict[str, Counter[int]] = {}

    def with_gradients(step: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            step()

        return run

    def numbered(optimizer: LowRankAdam, number: int) -> Callable[[], None]:
        def run() -> None:
            optimizer.updates = number - 1
            optimizer.step()

        return with_gradients(run)

    for name, overrides in METHODS.items():
        method = compose("experiment=table3", f"model={model_name}", "model.dtype=fp32", *overrides)
        optimizers[name] = build_optimizer(method, model, Communicator())
        numbered(optimizers[name], 1)()  # bases
        weights[name] = optimizers[name].schedule()
        for number in weights[name]:
            pieces[f"{name}/{number}"] = numbered(optimizers[name], number)
    pieces["torch_fused"] = with_gradients(torch.optim.AdamW(model.parameters(), fused=True).step)
    pieces["torch_foreach"] = with_gradients(torch.optim.AdamW(model.parameters(), foreach=True).step)
    pieces["forward_backward"] = lambda: forward_backward(model, batch)
    times = alternate(pieces, repeats=repeats)
    steps = {
        name: sum(times[f"{name}/{number}"] * count for number, count in kinds.items()) / kinds.total()
        for name, kinds in weights.items()
    }
    parts = {name: [times[f"{name}/{number}"] for number in kinds] for name, kinds in weights.items()}
    return {
        "model": model_name,
        "tokens": tokens,
        "forward_backward": times["forward_backward"],
        "mean": {**steps, **{name: times[name] for name in ("torch_fused", "torch_foreach")}},
        "lightest": {name: min(values) for name, values in parts.items()},
        "heaviest": {name: max(values) for name, values in parts.items()},
        "state_bytes": {name: state_bytes(optimizer) for name, optimizer in optimizers.items()},
    }


def time_loops(model_name: str, *, tokens: int, length: int, repeats: int) -> dict[str, float]:
    """Tokens a second of this project's loop and of a plain one with DDP, both with AdamW: medians of turns."""
    config, ours = model_of(f"model={model_name}", "optimizer=adamw")
    optimizer = build_optimizer(config, ours, Communicator())  # before there is a group, which train.py needs none of
    _, plain = model_of(f"model={model_name}")
    batch = torch.randint(config["model"]["vocab_size"], (tokens // length, length))
    rows = Batch(batch, torch.full((len(batch),), length))
    with one_worker(), tempfile.TemporaryDirectory() as folder:
        wrapped = DistributedDataParallel(plain, gradient_as_bucket_view=True)
        reference = torch.optim.AdamW(plain.parameters(), fused=True)
        settings = TrainerSettings(
            **config["trainer"] | {"steps": 10**9, "eval_every": None, "checkpoint_every": None, "checksum_every": 50}
        )
        run = RunDirectory(Path(folder), config)
        run.begin(resumed_step=0)
        counts = {"tokens": batch.numel(), "positions": batch.numel(), "loss_tokens": rows.loss_tokens}
        times: dict[str, list[float]] = {"ours": [], "plain": []}

        def steps(first: int) -> Iterator[GlobalStep]:
            """The turns of one run; the plain loop has its own in between, while this run waits for its next step."""
            for turn in range(repeats + 1):
                print(f"training loops: {f'turn {turn} of {repeats}' if turn else 'begin'}", flush=True)
                start = time.perf_counter()
                for step in range(turn * LOOP_STEPS, (turn + 1) * LOOP_STEPS):
                    yield GlobalStep(step=first + step, micro_batches=[rows], **counts)
                middle = time.perf_counter()
                for _ in range(LOOP_STEPS):
                    reference.zero_grad(set_to_none=True)
                    loss_of(wrapped, batch).backward()
                    reference.step()
                if turn:
                    times["ours"].append(middle - start)
                    times["plain"].append(time.perf_counter() - middle)

        trainer = Trainer(
            ours,
            optimizer,
            TASKS["pretrain"].objective,
            steps=steps,
            evaluation=lambda: [rows],
            last=10**9,
            settings=settings,
            schedule=Schedule(**config["schedule"], steps=10**9),
            lr=config["optimizer"]["lr"],
            seed=0,
            text={},
            run=run,
        )
        trainer.last_evaluation = {"eval/loss": math.nan}  # none is wanted
        trainer.fit()
    return {name: LOOP_STEPS * batch.numel() / statistics.median(seconds) for name, seconds in times.items()}


@contextmanager
def one_worker() -> Iterator[None]:
    """A process group of this process alone, which DDP needs."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def table(result: Mapping[str, Any]) -> Table:
    """The result of a model, beside its forward and backward."""
    whole = result["forward_backward"]
    loops = result["tokens_per_s"]
    rows = [("forward and backward", "-", f"{whole:.3f}", "-", "100", "-")]
    for name, seconds in result["mean"].items():
        light, heavy = (result[key].get(name, seconds) for key in ("lightest", "heaviest"))
        state = result["state_bytes"].get(name, result["state_bytes"]["adamw"])
        rows.append(
            (
                name,
                f"{light:.3f}",
                f"{seconds:.3f}",
                f"{heavy:.3f}",
                f"{100 * seconds / whole:.2f}",
                f"{state / 1e6:.0f}",
            )
        )
    columns = ("", "ordinary (s)", "mean (s)", "heaviest (s)", "mean, % of forward and backward", "state (MB)")
    ours, plain = loops["ours"], loops["plain"]
    note = (
        f"One process, {result['tokens']} tokens; means weighed by a method's schedule. Tokens a second "
        f"with AdamW, at {result['loop_tokens']} a step: {ours:.0f} in this project's training loop, {plain:.0f} in a "
        f"plain one with DDP ({ours / plain:.3f})."
    )
    return Table(f"Optimizer steps at the shapes of {result['model']}", columns, tuple(rows), (note,))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m sweep.bench.steps", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="where steps.json goes")
    add("--model", default="llama_60m", help="of experiment=table3")
    add("--tokens", type=int, default=4096, help="of forward and backward")
    add("--loop-tokens", type=int, default=1024, help="of a step of the training loops")
    add("--length", type=int, default=256, help="tokens of a row")
    add("--repeats", type=int, default=5, help="measurements of each piece")
    add("--readme", nargs=2, metavar=("FILE", "NAME"), help="put the table between FILE's <!-- begin/end NAME -->, too")
    options = parser.parse_args(arguments)
    try:
        check_place(options.readme)
        check_folder(options.out)
        for name, least in (("length", 1), ("repeats", 1), ("tokens", options.length), ("loop_tokens", options.length)):
            if getattr(options, name) < least:
                key, of = name.replace("_", "-"), ", the --length" if "tokens" in name else ""
                raise ValueError(f"--{key} must be a whole number from {least}{of}, got {getattr(options, name)}")
        job(options.model)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = {"length": options.length, "repeats": options.repeats}
    result = time_steps(options.model, tokens=options.tokens, **size)
    result["loop_tokens"] = options.loop_tokens
    result["tokens_per_s"] = time_loops(options.model, tokens=options.loop_tokens, **size)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"steps-{options.model}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    text = table(result).markdown()
    put(options.readme, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
