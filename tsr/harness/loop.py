"""The training loop: local gradients, one optimizer step that synchronises, evaluation, record, checkpoints.

The objective of an update is the mean loss over the loss tokens of the global batch: every worker sums its losses,
scales the sum by world size over the global count, and averaging gradients does the rest. Means of unequal parts are
never averaged. What the loop needs to know from all workers (the loss, whether a gradient is finite, whether parameters
agree) travels in one small control message per step, outside both accountings.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from tsr.clock import mark, seconds_between
from tsr.communicator import Communicator
from tsr.harness import checkpoint
from tsr.harness.checkpoint import Checkpoint
from tsr.harness.mirror import Mirror
from tsr.harness.rundir import LOGGER, RunDirectory
from tsr.harness.settings import Schedule, TrainerSettings
from tsr.subspace import are_finite

ROLES_LOGGED = ("core", "sketch", "dense")
HYPERPARAMETERS = {"lr", "betas", "eps", "weight_decay"}
CHECKSUM_MODULUS = 2**48  # exact in a float64


class Batch(Protocol):
    """Rows that one worker takes through the model at once."""

    @property
    def loss_tokens(self) -> int: ...

    def to(self, device: torch.device) -> Any: ...


class GlobalStep(Protocol):
    """One update's data: this worker's micro-batches, and the counts of the whole global batch."""

    @property
    def step(self) -> int: ...

    @property
    def micro_batches(self) -> Sequence[Any]: ...

    @property
    def tokens(self) -> int: ...

    @property
    def positions(self) -> int: ...

    @property
    def loss_tokens(self) -> int: ...


# Losses of a batch, 0 where there is none, and the answers of its rows that are to be scored, [b, outputs], or None.
Objective = Callable[[nn.Module, Any], tuple[Tensor, Tensor | None]]


class Scores(Protocol):
    """What the answers of all evaluated rows are worth."""

    @property
    def shape(self) -> tuple[int, int]: ...  # rows, outputs

    def __call__(self, answers: NDArray[np.float64]) -> dict[str, Any]: ...  # in the order of the rows


@runtime_checkable
class SendsEarly(Protocol):
    """What an optimizer may offer beyond ``step`` to work while backward goes on; `tsr.LowRankAdam` does."""

    def begin(self, passes: int) -> None: ...

    def local_gradients(self) -> list[Tensor | None]: ...


class NonFiniteGradient(Exception):
    """A gradient is NaN or infinite. All workers raise it, before the update."""


class NonFiniteParameter(Exception):
    """An update left a parameter NaN or infinite. All workers raise it, before it is saved."""


class ReplicasDiffer(Exception):
    """Workers hold different parameters, so what they train is no longer one model."""


class Trainer:
    """Trains one job on one worker; the first worker writes the record.

    Args:
        model: On its device, the same weights on every worker.
        optimizer: Synchronises in ``step()``; has ``communicator`` and ``grad_norm`` (see `tsr.optimizer`).
        objective: Losses of a batch, and answers to score.
        scores: Scores the answers of an evaluation, if the objective gives any; batches then have ``index``, [b].
        steps: Gives the `GlobalStep`s from a step number on.
        evaluation: Gives this worker's batches of the validation rows.
        last: Updates in all.
        settings, schedule: See `tsr.harness.settings`.
        lr: The learning rate before role factors and schedule, for the record.
        seed: Of dropout, which depends on (seed, step, rank, micro-batch) alone.
        text: What is trained on, by hash; a checkpoint is of this text alone.
        run: The run directory.
        mirror: Follows the record (first worker), or ``None``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        *,
        steps: Callable[[int], Iterable[GlobalStep]],
        evaluation: Callable[[], Iterable[Any]],
        last: int,
        settings: TrainerSettings,
        schedule: Schedule,
        lr: float,
        seed: int,
        text: Mapping[str, str],
        run: RunDirectory,
        scores: Scores | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self.communicator: Communicator = optimizer.communicator  # type: ignore[attr-defined]  # see Args
        self.ledger = self.communicator.ledger
        self.settings = settings
        self.run = run
        self.progress: dict[str, Any] = {"step": 0, "tokens": 0, "positions": 0, "loss_tokens": 0, "seconds": 0.0}
        self._last = last
        self._schedule = schedule
        self._lr = lr
        self._seed = seed
        self._scores = scores
        self._text = text
        self._steps = steps
        self._evaluation = evaluation
        self._mirror = mirror
        self._first = self.communicator.rank == 0
        self._started = time.perf_counter()  # less what earlier attempts took
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._device = self._parameters[0].device
        self._ahead = steps_ahead(self._device)
        self.last_evaluation: dict[str, Any] = {}
        self.answers: NDArray[np.float64] = np.zeros((0, 0))  # that the last evaluation scored, on every worker

    def restore(self, found: Checkpoint) -> None:
        """Take over a checkpoint."""
        state = found.load()
        self.model.load_state_dict(state["model"])
        # Rates and constants are the configuration's; the checkpoint gives the state and the clock.
        own = [{key: group[key] for key in group.keys() & HYPERPARAMETERS} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, hyperparameters in zip(self.optimizer.param_groups, own, strict=True):
            group.update(hyperparameters, initial_lr=hyperparameters["lr"])
        self.ledger.load_state_dict(state["progress"].pop("ledger"))
        self.progress = state["progress"]

    def fit(self) -> None:
        """Train to the last step."""
        done, settings = self.progress["step"], self.settings
        self._started = time.perf_counter() - self.progress["seconds"]
        # The schedule is a function of the update clock, so nothing of it is saved: it is set to where the clock is.
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._schedule, last_epoch=done - 1)
        bar = tqdm(total=self._last, initial=done, disable=None if self._first else True, unit="step", smoothing=0.1)
        # Log lines go above the bar; on the first worker alone, since this drops the handlers' levels.
        with bar, logging_redirect_tqdm([LOGGER]) if self._first else nullcontext():
            launched: list[Callable[[], dict[str, Any]]] = []  # steps whose rows are not read yet
            for data in self._steps(done + 1):
                launched.append(self._train_step(data))
                scheduler.step()
                step = data.step
                evaluates = step == self._last or (settings.eval_every and step % settings.eval_every == 0)
                saves = settings.checkpoint_every and (step % settings.checkpoint_every == 0 or step == self._last)
                ahead = self._ahead if not (evaluates or saves) else 0
                while len(launched) > max(1, ahead):
                    self._record(launched.pop(0)(), bar)
                if ahead:
                    continue
                row = launched.pop()()
                if evaluates:
                    self.last_evaluation = self.evaluate()
                    row |= self.last_evaluation
                self._record(row, bar)
                if saves:
                    self._save(step)
        self._require_finite_parameters(self._last)
        report = self._report(torch.zeros(()), checksum=True)
        self._judge(self._last, self.communicator.total_of(report, purpose="control").tolist(), grad_norm=0.0)
        if not self.last_evaluation:  # resumed from a checkpoint of the last step
            self.last_evaluation = self.evaluate()
        self.progress["seconds"] = time.perf_counter() - self._started

    def _train_step(self, data: GlobalStep) -> Callable[[], dict[str, Any]]:
        """Make one update; returns what reads its row, and stops the run if something is wrong with the update.

        Nothing here waits for the device, unless the optimizer does.
        """
        start = mark(self._device)
        self.communicator.lap()
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        if isinstance(self.optimizer, SendsEarly):
            self.optimizer.begin(len(data.micro_batches))
        scale = self.communicator.world_size / max(1, data.loss_tokens)
        local = torch.zeros((), dtype=torch.float64, device=self._device)
        for number, batch in enumerate(data.micro_batches):
            torch.manual_seed(dropout_seed(self._seed, data.step, self.communicator.rank, number))
            loss = self.objective(self.model, batch.to(self._device))[0].sum()
            (loss * scale).backward()
            local += loss.detach()
        report = self._report(local, checksum=(data.step - 1) % self.settings.checksum_every == 0)
        lr = self._current_lr()
        early, update_start = self.communicator.lap(), mark(self._device)
        self.optimizer.step()
        late, end = self.communicator.lap(), mark(self._device)
        total = self.communicator.total_of(report, purpose="control")
        grad_norm = self.optimizer.grad_norm  # type: ignore[attr-defined]  # see Args
        finite = getattr(self.optimizer, "finite", None)  # of what the optimizer saw, sketches included
        if finite is not None:
            grad_norm = torch.where(finite, grad_norm, math.nan)
        traffic, sent = self.ledger.last, self.ledger.total_bytes

        progress = self.progress
        progress["step"] = data.step
        for name in ("tokens", "positions", "loss_tokens"):
            progress[name] += getattr(data, name)
        progress["seconds"] = time.perf_counter() - self._started
        counts = {name: progress[name] for name in ("step", "tokens", "positions", "loss_tokens")}

        def read() -> dict[str, Any]:
            loss_mean = self._judge(data.step, total.tolist(), float(grad_norm)) / max(1, data.loss_tokens)
            seconds = seconds_between(start, end)
            return {
                **counts,
                "train/loss": loss_mean,
                "train/perplexity": perplexity(loss_mean),
                "train/grad_norm": float(grad_norm),
                "lr": lr,
                "comm/bytes": traffic.total,
                "comm/total_bytes": sent,
                **{f"comm/{role}": 0 for role in ROLES_LOGGED},
                **{f"comm/{role}": count for role, count in traffic.by_role().items()},
                "time/step_s": seconds,
                "time/comm_s": early.seconds + late.seconds,
                "time/optimizer_s": seconds_between(update_start, end) - late.seconds,
                "tokens_per_s": data.tokens / seconds,
            }

        return read

    def _current_lr(self) -> float:
        group = self.optimizer.param_groups[0]
        return float(self._lr * group["lr"] / group["initial_lr"])

    def _report(self, loss: Tensor, *, checksum: bool) -> Tensor:
        """What all workers are to know of this one's step, float64 [1 + 2 N]: its loss, and in the places of its rank
        1 + the index of the first parameter whose gradient is not finite (0: none), and a checksum of parameters."""
        rank, size = self.communicator.rank, self.communicator.world_size
        report = torch.zeros(1 + 2 * size, dtype=torch.float64, device=self._device)
        report[0] = loss
        report[1 + rank] = self._first_non_finite()
        if checksum:
            report[1 + size + rank] = parameter_checksum(self._parameters)
        return report

    def _judge(self, step: int, total: list[float], grad_norm: float) -> float:
        """The loss summed over the workers; all stop if a gradient was not finite or parameters differed."""
        size = self.communicator.world_size
        flags, sums = total[1 : 1 + size], total[1 + size :]
        for worker, flag in enumerate(flags):
            if flag:
                raise NonFiniteGradient(
                    f"step {step}: the gradient of {self._names[int(flag) - 1]} on rank {worker} is not finite; "
                    f"the update was not saved, and earlier checkpoints are good"
                )
        if not math.isfinite(grad_norm):
            raise NonFiniteGradient(
                f"step {step}: the norm of the averaged gradients is {grad_norm}, too large for their dtype; the "
                f"update was not saved, and earlier checkpoints are good"
            )
        if len(set(sums)) > 1:
            odd = [worker for worker, value in enumerate(sums) if value != sums[0]]
            raise ReplicasDiffer(f"step {step}: parameters of ranks {odd} differ from those of rank 0")
        return total[0]

    def _first_non_finite(self) -> Tensor:
        """Of this worker's gradients; see `first_non_finite`."""
        if isinstance(self.optimizer, SendsEarly):
            gradients = self.optimizer.local_gradients()
        else:
            gradients = [parameter.grad for parameter in self._parameters]
        nothing = torch.zeros((), device=self._device)
        return first_non_finite([nothing if gradient is None else gradient for gradient in gradients])

    def _require_finite_parameters(self, step: int) -> None:
        """Stop rather than keep an update that ran away: all workers stop, for all hold the same parameters."""
        place = int(first_non_finite([parameter.detach() for parameter in self._parameters]))
        if place:
            raise NonFiniteParameter(
                f"step {step}: the update made {self._names[place - 1]} infinite or NaN; it was not saved, and earlier "
                f"checkpoints are good"
            )

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Mean loss over the loss tokens of the validation rows, each counted once over all workers, and scores."""
        self.model.eval()
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        count = 0
        table = np.zeros(self._scores.shape if self._scores else (0, 0))
        for batch in self._evaluation():
            losses, answers = self.objective(self.model, batch.to(self._device))
            loss += losses.double().sum()
            count += batch.loss_tokens
            if self._scores and answers is not None:
                table[batch.index.numpy()] = answers.double().cpu().numpy()
        # A row is answered by one worker and zero on all others, so that the sum is the answer itself.
        loss_sum, tokens, *answered = self.communicator.total(
            [loss.item(), count, *table.ravel().tolist()], purpose="evaluation"
        )
        mean = loss_sum / tokens
        row: dict[str, Any] = {"eval/loss": mean, "eval/perplexity": perplexity(mean), "eval/tokens": int(tokens)}
        if self._scores:
            self.answers = np.array(answered).reshape(table.shape)
            row |= self._scores(self.answers)
        return row

    def _record(self, row: dict[str, Any], bar: tqdm[Any]) -> None:
        if not self._first:
            return
        self.run.append(row)
        if self._mirror is not None:
            self._mirror.log(row)
        bar.update()
        bar.set_postfix_str(
            f"loss {row['train/loss']:.3f}, {row['tokens_per_s']:.0f} tok/s, {row['comm/total_bytes'] / 1e6:.1f} MB",
            refresh=False,
        )
        if "eval/loss" in row or row["step"] % max(1, self._last // 20) == 0:
            evaluation = f", {describe_evaluation(row)}" if "eval/loss" in row else ""
            LOGGER.info(
                "step %d/%d: loss %.4f%s, %.0f tokens/s, %.3f MB sent a worker",
                row["step"],
                self._last,
                row["train/loss"],
                evaluation,
                row["tokens_per_s"],
                row["comm/total_bytes"] / 1e6,
            )

    def _save(self, step: int) -> None:
        """All workers hold the same state after a step, so the first one's is everybody's."""
        self._require_finite_parameters(step)
        if self._first:
            progress = {**self.progress, "ledger": self.ledger.state_dict()}
            checkpoint.save(
                self.run.checkpoints,
                step,
                self.model,
                self.optimizer,
                progress,
                text=self._text,
                keep=self.settings.keep_checkpoints,
            )
        self.communicator.barrier()


def steps_ahead(device: torch.device) -> int:
    """Steps that may be under way while the next is launched: a GPU must not wait for Python between two of them."""
    return 1 if device.type == "cuda" else 0


def describe_evaluation(row: Mapping[str, Any]) -> str:
    """An evaluation in a few words."""
    text = f"eval loss {row['eval/loss']:.4f}"
    if "eval/metric" not in row:
        return text
    score = row["eval/score"]
    return f"{text}, {row['eval/metric']} {'undefined' if score is None else f'{score:.4f}'}"


def dropout_seed(*place: int) -> int:
    """A seed of torch's generators from (seed, step, rank, micro-batch)."""
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> np.uint64(1))


def first_non_finite(tensors: Sequence[Tensor]) -> Tensor:
    """1 + the index of the first tensor with an element that is NaN or infinite, or 0; does not wait for the device."""
    bad = ~are_finite(tensors)
    return torch.where(bad.any(), bad.int().argmax() + 1, 0)


def perplexity(loss: float) -> float:
    """exp(loss), held below the largest float."""
    return math.exp(min(loss, 700.0))


def parameter_checksum(parameters: Iterable[Tensor]) -> Tensor:
    """A number that differs if a bit of a parameter does, with near certainty; in [0, 2^48)."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [p.detach().view(integers[p.itemsize]).sum(dtype=torch.int64) for p in parameters]
    weights = torch.arange(1, len(sums) + 1, device=sums[0].device)
    return (torch.stack(sums) * weights).sum() % CHECKSUM_MODULUS
