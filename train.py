"""Train one job, or a sweep of jobs: compose the configuration, check it, start the workers, train, record.

    python train.py model=llama_60m nproc=2                        # two local workers
    torchrun --nproc-per-node 2 train.py model=llama_60m           # joins torchrun's workers instead
    python train.py -m trainer.global_batch=16,32 seed=0,1,2       # a sweep; what is done already is skipped
    python train.py experiment=table3 model=llama_1b dry_run=true world_size=64    # bytes and memory, no training

Everything that can be wrong with the input is found before a worker starts or a record is written.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from torch import nn

import data
from data.tasks import TASKS
from sweep.results import Results
from sweep.tables import blocks_table
from tsr import Communicator
from tsr.blocks import describe
from tsr.harness import checkpoint
from tsr.harness.checkpoint import Checkpoint
from tsr.harness.dryrun import count_bytes, fake_workers
from tsr.harness.hydra_hooks import explain, give_up, plain, register_resolvers, remove_if_empty
from tsr.harness.launch import (
    Interrupted,
    WorkerKilled,
    WorkersFailed,
    World,
    external_world,
    pick_device,
    raise_on_signals,
    reason,
    start_workers,
)
from tsr.harness.loop import Trainer, describe_evaluation
from tsr.harness.mirror import Mirror
from tsr.harness.rundir import LOGGER, RunDirectory, provenance
from tsr.harness.settings import JobSettings, Schedule, TrainerSettings, from_group
from tsr.harness.summary import summarise

Config = dict[str, Any]
register_resolvers()


@hydra.main(version_base="1.3", config_path=str(Path(__file__).resolve().parent / "conf"), config_name="config")
def main(cfg: DictConfig) -> None:
    """One job, as Hydra has composed it."""
    directory = Path(HydraConfig.get().runtime.output_dir)
    try:
        run_job(cfg, directory)
    except (ValueError, OSError, OmegaConfBaseException, InstantiationException) as error:
        remove_if_empty(directory)
        give_up(f"error: {explain(error, cfg)}")
    except WorkersFailed as error:
        summary = RunDirectory(directory, {}).summary() or {}
        give_up(f"error: {summary.get('error', error)}; see {directory / 'train.log'}")


def run_job(cfg: DictConfig, directory: Path) -> None:
    """Check the job, run it unless it is done already, and add it to the results that it names.

    Raises:
        ValueError: If something is wrong with the input; nothing has been started or recorded then.
        WorkersFailed: If a worker failed; the run record says why.
    """
    config = plain(cfg)
    run, expected, world = RunDirectory(directory, config), check(config), external_world()
    # What another run's checkpoint began is not the run that its configuration describes.
    kept = not config["dry_run"] and config["resume"] in ("auto", None)
    results = Results(config["results"] if kept else None)
    run.check_owner()
    if config["resume"] == "auto" and results.has(run.config_hash):
        print(f"done already, skipped: {run.config_hash} is in {results.path} (resume=null runs it again)")
        remove_if_empty(directory)
        return
    if not run.is_over():
        if config["dry_run"]:
            dry_run(config, run)
        else:
            start(config, run, expected, world)
    if world is None or world.rank == 0:
        results.add(directory, overrides=HydraConfig.get().overrides.task)


def start(config: Config, run: RunDirectory, expected: dict[str, list[Any]], world: World | None) -> None:
    """Prepare the data, then start the workers and wait for them, or be one of an external launcher's."""
    prepared = TASKS[config["task"]["name"]].prepare(config)
    last = TrainerSettings(**config["trainer"]).count_steps(len(prepared.train))
    find = partial(checkpoint.find, config["resume"], run.checkpoints, expected, text=prepared.identity, steps=last)
    found = find()
    if world is not None:
        with run.lock() if world.rank == 0 else nullcontext(), raise_on_signals():
            work(world, config, run.path, prepared, found)
        return
    with run.lock():
        if run.is_over():  # the same job, started twice at once, may have ended since
            return
        print(f"run directory: {run.path}")
        try:
            start_workers(work, (config, run.path, prepared, find()), nproc=config["nproc"])
        except BaseException as error:
            if isinstance(error, WorkerKilled):
                run.summary_path.unlink(missing_ok=True)
            run.fail(reason(error))  # kept only if no worker could say why itself
            raise


def check(config: Config) -> dict[str, list[Any]]:
    """Find what is wrong with a job's values, with a model of no weights; return what a checkpoint must look like."""
    job, world = JobSettings.of(config), external_world()
    if world is not None and world.size != job.nproc:
        raise ValueError(f"nproc={job.nproc}, but the launcher started {world.size} workers; leave nproc out")
    settings = from_group(TrainerSettings, config, "trainer")
    settings.check_world(job.workers)
    from_group(Schedule, config, "schedule", steps=1)
    pick_device(config["device"], local_rank=0, local_size=world.local_size if world else job.nproc)
    for group, known in (("task", [*TASKS]), ("logger", ["wandb", "none"])):
        if config[group].get("name") not in known:
            raise ValueError(f"{group} must be {' or '.join(known)}, got {config[group].get('name')!r}")
    source, model = instantiate(config["data"]), build_model(config, "meta")
    TASKS[config["task"]["name"]].check(config, model)
    length, positions = source.sequence_length, config["model"]["max_positions"]
    if length > positions:
        raise ValueError(f"data.sequence_length={length} exceeds model.max_positions={positions}; raise that one")
    return checkpoint.signature(model, build_optimizer(config, model, from_group(Communicator, config, "comm")))


def build_model(config: Config, device: torch.device | str) -> nn.Module:
    """The model with weights from ``seed``, the same on every worker."""
    model: nn.Module = instantiate(config["model"], seed=config["seed"], device=device)
    return model


def build_optimizer(config: Config, model: nn.Module, communicator: Communicator) -> Any:
    """The optimizer that the configuration names: `tsr.build`, or any function of the same arguments."""
    groups = {key: config[key] for key in ("subspace", "rank", "refresh", "lr_factor")}
    choices = {key: value for key, value in config["optimizer"].items() if key != "name"}
    make = instantiate(choices, _partial_=True)
    return make(model, communicator=communicator, seed=config["seed"], **groups)


def work(world: World, config: Config, directory: Path, prepared: data.Prepared, found: Checkpoint | None) -> None:
    """One worker, from joining the others to its end; a failure is recorded by the worker that sees it first."""
    run = RunDirectory(directory, config)
    run.log_to_file(rank=world.rank)
    provenance()  # asks git: now, so that a failure is recorded at once
    device = pick_device(config["device"], local_rank=world.local_rank, local_size=world.local_size)
    if world.rank == 0:
        run.summary_path.unlink(missing_ok=True)  # of an earlier attempt
    try:
        with world.joined(device):
            train(config, run, prepared, found, device)
    except BaseException as error:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second signal must not cut the record short
        run.fail(reason(error), rank=world.rank)
        LOGGER.error("failed: %s", reason(error), exc_info=True)
        raise


def train(
    config: Config, run: RunDirectory, prepared: data.Prepared, found: Checkpoint | None, device: torch.device
) -> None:
    """Train the job on this worker, and write its record on the first one."""
    communicator = Communicator(**config["comm"])
    first = communicator.rank == 0
    job = (found, run.config_hash, prepared.identity)
    found, *first_job = communicator.broadcast_object(job)
    if [*job[1:]] != first_job:
        raise ValueError(f"rank {communicator.rank} has another job than rank 0: {job[1:]}, there {first_job}")
    model = build_model(config, device)
    communicator.broadcast([*model.parameters(), *model.buffers()])
    optimizer = build_optimizer(config, model, communicator)
    task = TASKS[config["task"]["name"]]
    settings = TrainerSettings(**config["trainer"])
    last = settings.count_steps(len(prepared.train))
    scores = task.scores(config, prepared)
    if first:
        source = found.path.parent.parent / "metrics.jsonl" if found else None
        checkpoint.drop_others(run.checkpoints, found)
        run.begin(resumed_step=found.step if found else 0, source=source)
        LOGGER.info("%s", "resuming from " + str(found.path) if found else "starting afresh")
        for row in describe(optimizer.blocks):
            LOGGER.info("blocks: %s", ", ".join(f"{key} {value}" for key, value in row.items() if value))
    mirror = Mirror(run, config["logger"]) if first else None

    place = {"rank": communicator.rank, "world_size": communicator.world_size}
    micro_batch = settings.micro_batch or settings.global_batch
    trainer = Trainer(
        model,
        optimizer,
        task.objective,
        steps=lambda step: data.training_steps(
            prepared.train,
            data_seed=config["data_seed"],
            global_batch=settings.global_batch,
            micro_batch=micro_batch,
            first_step=step,
            last_step=last,
            num_workers=config["data"]["num_workers"],
            **place,
        ),
        evaluation=partial(
            data.evaluation_batches,
            prepared.validation,
            micro_batch=min(micro_batch, settings.global_batch // communicator.world_size),
            max_rows=settings.eval_rows,
            **place,
        ),
        last=last,
        settings=settings,
        schedule=Schedule(**config["schedule"], steps=last),
        lr=config["optimizer"]["lr"],
        seed=config["seed"],
        text=prepared.identity,
        run=run,
        scores=scores,
        mirror=mirror,
    )
    if found:
        trainer.restore(found)
    trainer.fit()
    if mirror:
        if scores:
            scores.write(run.path / "predictions", trainer.answers)
        size = {"steps": last, "world_size": communicator.world_size}
        summary = summarise(config, optimizer, model, communicator.ledger, **size) | {
            **{key: value for key, value in trainer.progress.items() if key not in ("step", "seconds")},
            **trainer.last_evaluation,
            "data": prepared.record,
            "duration_s": trainer.progress["seconds"],
        }
        run.finish(summary)
        LOGGER.info("done: %s; %s", describe_evaluation(trainer.last_evaluation), run.path)
        mirror.finish(summary, communicator.ledger.table())


def dry_run(config: Config, run: RunDirectory) -> None:
    """Count bytes and memory of the job on meta tensors, and record them."""
    with run.lock():
        summary = count(config)
        run.begin(resumed_step=0)
        run.finish(summary)
    print(blocks_table(summary["blocks"]).markdown())
    print(f"run directory: {run.path}")
    for key in ("comm/bytes_per_step", "comm/peak_bytes", "paper/comm/bytes_per_step", "paper/comm/peak_bytes"):
        print(f"{key:28} {summary[key] / 1e9:.5f} G")
    for key in ("memory/optimizer_state_bytes", "memory/weight_bytes", "paper/memory_bytes"):
        print(f"{key:28} {summary[key] / 1e9:.4f} G")


def count(config: Config) -> dict[str, Any]:
    """The summary of a dry run: bytes and memory of the job, on meta tensors."""
    start = time.perf_counter()
    workers = JobSettings.of(config).workers
    settings = TrainerSettings(**config["trainer"])
    steps = settings.count_steps(TASKS[config["task"]["name"]].rows(config))
    with fake_workers(workers):
        model = build_model(config, "meta")
        optimizer = build_optimizer(config, model, Communicator(**config["comm"]))
        ledger = count_bytes(optimizer, steps=steps)
    positions = steps * settings.global_batch * config["data"]["sequence_length"]
    return summarise(config, optimizer, model, ledger, steps=steps, world_size=workers) | {
        "tokens": positions,  # a dry run reads no text: rows count as full
        "positions": positions,
        "duration_s": time.perf_counter() - start,
    }


if __name__ == "__main__":
    try:
        import_module("train").main()  # by its name, under which other processes find what they are handed
    except (KeyboardInterrupt, Interrupted):
        print(
            "interrupted; with resume=auto the same command goes on from its last checkpoint, if it has one",
            file=sys.stderr,
        )
        sys.exit(130)
