"""`python -m sweep.bench.memory --out DIR`: memory of gradients, by what accumulates, and of a real step.

Gradients: the most bytes alive together while the micro-batches of an ordinary step go by, with and without
accumulation in the core. With `--step`, one real step of the model in bf16 (its first, in which every basis is made)
runs in a process of its own, with activation checkpointing, and its peak of resident memory stands beside what
AdamW's weights, gradients and state would take.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sweep.bench.steps import loss_of, model_of
from sweep.cells import compose
from train import build_optimizer, count
from tsr import Communicator, LowRankAdam

HEADS = {"low_rank_head": "rank.head=64", "dense_head": "rank.head=null"}


def gradient_memory(*overrides: str, passes: int, length: int) -> dict[str, int]:
    """The most bytes that gradients take together on an ordinary step, by what accumulates: gradients or cores.

    Looked at whenever a gradient is complete: it, all that are kept, and the cores that stand for others.
    """
    peaks: dict[str, int] = {}
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
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def predicted(model_name: str, method: str) -> dict[str, int]:
    """Bytes of weights and gradients in bf16, and of a method's state, by a dry run."""
    summary = count(compose_dry(model_name, method))
    weights = summary["memory/weight_bytes"]
    return {"weights": weights, "gradients": weights, "state": summary["memory/optimizer_state_bytes"]}


def compose_dry(model_name: str, method: str) -> dict[str, Any]:
    """The configuration of a dry run in the paper's setting."""
    return compose("experiment=table3", f"model={model_name}", f"optimizer={method}", "dry_run=true", "world_size=1")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m sweep.bench.memory", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="where memory-MODEL.json goes")
    add("--model", default="llama_60m", help="of experiment=table3")
    add("--length", type=int, default=256, help="tokens of a row")
    add("--passes", type=int, default=8, help="micro-batches")
    add("--step", action="store_true", help="a real step in the place of the gradients")
    add("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_this_process:
        print(json.dumps(one_step(options.model, length=options.length)))
        return 0
    result: dict[str, Any]
    if options.step:
        own = [sys.executable, "-m", "sweep.bench.memory", "--in-this-process", "--out", str(options.out)]
        step = [*own, "--model", options.model, "--length", str(options.length)]
        result = json.loads(subprocess.run(step, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
        result["predicted_bytes"] = {method: predicted(options.model, method) for method in ("tsr", "adamw")}
    else:
        result = {
            name: gradient_memory(
                *(f"model={options.model}", "optimizer=tsr", head, "refresh.embedding=100"),
                passes=options.passes,
                length=options.length,
            )
            for name, head in HEADS.items()
        }
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=2)
    name = f"{'step' if options.step else 'memory'}-{options.model}.json"
    (options.out / name).write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
