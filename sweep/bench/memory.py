"""`python -m sweep.bench.memory --out DIR`: memory of gradients, by what accumulates, and of a real step.

Gradients: the most bytes alive together while the micro-batches of an ordinary step go by, with and without
accumulation in the core. And one real step of a large model in bf16 (its first, in which every basis is made), in a
process of its own, with activation checkpointing: its peak of resident memory beside what AdamW would take.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sweep.bench.forecast import job
from sweep.bench.processes import until_death
from sweep.bench.rows import check_folder
from sweep.bench.steps import loss_of, model_of
from sweep.cells import compose
from sweep.report import check_place, put
from sweep.tables import Table
from train import build_optimizer, count
from tsr import Communicator, LowRankAdam

HEADS = {"low_rank_head": "rank.head=64", "dense_head": "rank.head=null"}


def gradient_memory(*overrides: str, passes: int, length: int) -> dict[str, int]:
    """The most bytes that gradients take together on an ordinary step, by what accumulates: gradients or cores.

    Looked at whenever a gradient is complete: it, all that are kept, and the cores that stand for others.
    """
    peaks: dict[str, int] = {}
    print(f"gradients with {' '.join(overrides)}: begin", flush=True)
    for name in ("dense", "core"):
        config, model = model_of(*overrides, f"optimizer.accumulate={'core' if name == 'core' else 'null'}")
        optimizer: LowRankAdam = build_optimizer(config, model, Communicator())
        peaks[name] = 0

        def arrives(gradient: Tensor, optimizer: LowRankAdam = optimizer, name: str = name) -> None:
            kept = sum(held.nbytes for held in optimizer.local_gradients() if held is not None)
            peaks[name] = max(peaks[name], kept + gradient.nbytes)

        for parameter in model.parameters():
            parameter.register_hook(arrives)
        optimizer.updates = 1  # an ordinary step
        optimizer.begin(passes)
        for batch in torch.randint(config["model"]["vocab_size"], (passes, 1, length)):
            loss_of(model, batch).backward()
        del model, optimizer  # whose hooks hold each other, before others are made
        gc.collect()
    return peaks


def one_step(model_name: str, *, length: int) -> dict[str, float]:
    """Seconds and peak resident bytes of this process after the first step of tsr on one row, in bf16."""
    config, model = model_of(
        f"model={model_name}", "optimizer=tsr", "model.dtype=bf16", "model.activation_checkpointing=true"
    )
    optimizer = build_optimizer(config, model, Communicator())
    tokens = torch.randint(config["model"]["vocab_size"], (1, length))
    start = time.perf_counter()
    loss = loss_of(model, tokens)
    loss.backward()
    middle = time.perf_counter()
    optimizer.step()
    end = time.perf_counter()
    return {
        "loss": float(loss.detach()),
        "finite": float(optimizer.finite),
        "forward_backward_s": middle - start,
        "optimizer_s": end - middle,
        "peak_bytes": peak_bytes(),
    }


def peak_bytes() -> int:
    """The most that this process has had resident; Linux counts a parent's into getrusage's figure, so not that one."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def predicted(model_name: str, method: str) -> int:
    """Bytes of weights and gradients in bf16 and of a method's state, by a dry run; activations are not in it."""
    overrides = ("experiment=table3", f"model={model_name}", f"optimizer={method}", "dry_run=true", "world_size=1")
    summary = count(compose(*overrides))
    return int(2 * summary["memory/weight_bytes"] + summary["memory/optimizer_state_bytes"])


def step_apart(model_name: str, *, length: int) -> dict[str, Any]:
    """`one_step` in a process of its own, and what is predicted for tsr and adamw."""
    print(f"a step of {model_name}: begins", flush=True)
    own = [*until_death(), sys.executable, "-m", "sweep.bench.memory"]
    step = [*own, "--one-step", model_name, "--length", str(length)]
    done = subprocess.run(step, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**result, "predicted": {method: predicted(model_name, method) for method in ("tsr", "adamw")}}


def table(result: Mapping[str, Any]) -> Table:
    """Gradients by model and head; a real step as a note."""
    rows = tuple(
        (
            model,
            head.replace("_", " "),
            f"{peaks['dense'] / 1e6:.1f}",
            f"{peaks['core'] / 1e6:.1f}",
            f"{100 * peaks['core'] / peaks['dense']:.1f}",
        )
        for model, heads in result["gradients"].items()
        for head, peaks in heads.items()
    )
    notes = tuple(
        f"The first step of tsr on {model} in bf16, {result['length']} tokens, activation checkpointing, on a CPU: "
        f"{step['peak_bytes'] / 1e9:.2f} GB resident at most, Python and torch included. Weights, gradients and state "
        f"take {step['predicted']['tsr'] / 1e9:.2f} GB, and with adamw {step['predicted']['adamw'] / 1e9:.2f} GB."
        for model, step in result["steps"].items()
    )
    columns = ("model", "head", "gradients kept (MB)", "optimizer.accumulate=core (MB)", "%")
    title = f"Most bytes of gradients at once, fp32, {result['passes']} micro-batches of an ordinary step of tsr"
    return Table(title, columns, rows, notes)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m sweep.bench.memory", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("reports/bench"), metavar="DIR", help="where memory.json goes")
    add("--models", default="llama_60m,llama_350m", help="of experiment=table3")
    add("--step", default="llama_1b", metavar="MODEL", help="whose first step is made; empty for none")
    add("--length", type=int, default=256, help="tokens of a row")
    add("--passes", type=int, default=8, help="micro-batches")
    add("--readme", nargs=2, metavar=("FILE", "NAME"), help="put the table between FILE's <!-- begin/end NAME -->, too")
    add("--one-step", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one_step:
        print(json.dumps(one_step(options.one_step, length=options.length)))
        return 0
    models, large = options.models.split(","), [options.step] if options.step else []
    try:
        check_place(options.readme)
        check_folder(options.out)
        for name in ("length", "passes"):
            if getattr(options, name) < 1:
                raise ValueError(f"--{name} must be a whole number from 1, got {getattr(options, name)}")
        for key, names in (("--models", models), ("--step", large)):
            for model in names:
                job(model, key=key)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        steps = {model: step_apart(model, length=options.length) for model in large}  # while this process is small
    except subprocess.CalledProcessError as error:
        how = "was killed, for want of memory perhaps" if error.returncode < 0 else f"ended with {error.returncode}"
        print(f"error: the step of {options.step} {how}; another: --step MODEL, none: --step ''", file=sys.stderr)
        return 1
    gradients = {
        model: {
            name: gradient_memory(
                *(f"model={model}", "optimizer=tsr", head, "refresh.embedding=100"),
                passes=options.passes,
                length=options.length,
            )
            for name, head in HEADS.items()
        }
        for model in models
    }
    result = {"passes": options.passes, "length": options.length, "gradients": gradients, "steps": steps}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "memory.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    text = table(result).markdown()
    put(options.readme, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
