"""What a job trains for: next tokens, or the labels of a GLUE task.

A task says what fits it, prepares its data, and has the objective: the losses of a batch and, where it scores more than
a loss, the model's answers. `TASKS` has them by name; all else of a job is common.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from hydra.utils import instantiate
from torch import Tensor, nn

import data
from models import Encoder, Llama, locate, locate_tokenizer, next_token_losses

Config = Mapping[str, Any]


class Task(Protocol):
    """One kind of job; its methods need no instance."""

    def check(self, config: Config, model: nn.Module) -> None:
        """Find what does not fit in a configuration whose data and model are valid by themselves.

        Raises:
            ValueError: Naming the key.
        """

    def rows(self, config: Config) -> int:
        """Training rows to count the steps of a dry run by."""

    def prepare(self, config: Config) -> data.Prepared[Any]:
        """The data, made or found in the cache. Raises as `data.prepare` does."""

    def objective(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Losses of a batch, 0 where there is none, and the answers to score, [b, outputs], or None."""

    def scores(self, config: Config, prepared: data.Prepared[Any]) -> data.Scores | None:
        """What the answers of the whole validation split are scored by."""


class Pretrain:
    """Next-token prediction on rows of text."""

    def check(self, config: Config, model: nn.Module) -> None:
        if isinstance(model, Encoder):
            raise ValueError(
                f"task=pretrain predicts next tokens, which model={config['model']['name']}, an encoder, does not; "
                f"use task=finetune"
            )
        if config["data"]["name"] == "glue":
            raise ValueError("data=glue has labelled sentences; use task=finetune with it, or other data")
        if config["trainer"]["epochs"] is not None:
            raise ValueError(
                f"trainer.epochs={config['trainer']['epochs']} is for task=finetune; give trainer.steps, and "
                f"trainer.epochs=null"
            )

    def rows(self, config: Config) -> int:
        return 0  # steps are given as such

    def prepare(self, config: Config) -> data.Prepared[data.Rows]:
        return data.prepare(instantiate(config["data"]), vocab_size=config["model"]["vocab_size"])

    def objective(self, model: nn.Module, batch: data.Batch) -> tuple[Tensor, None]:
        return next_token_losses(model(batch.tokens), batch.tokens, batch.lengths), None

    def scores(self, config: Config, prepared: data.Prepared[data.Rows]) -> None:
        return None


class Finetune:
    """Labels of sentences: cross-entropy over classes, or the squared error of a score."""

    def check(self, config: Config, model: nn.Module) -> None:
        if isinstance(model, Llama):
            raise ValueError(
                f"task=finetune needs an encoder with a classifier, which model={config['model']['name']} is not; use "
                f"model=minilm or model=roberta_base"
            )
        if config["data"]["name"] != "glue":
            raise ValueError(
                f"task=finetune needs labelled sentences, which data={config['data']['name']} has not; use data=glue"
            )
        needed, labels = instantiate(config["data"]).labels, config["model"]["num_labels"]
        if labels != needed:
            raise ValueError(f"model.num_labels={labels}, but data.task={config['data']['task']} needs {needed}")
        if config["trainer"]["eval_rows"] is not None:
            raise ValueError(
                f"trainer.eval_rows={config['trainer']['eval_rows']}, but a task is scored on its whole validation "
                f"split; leave it null"
            )

    def rows(self, config: Config) -> int:
        return int(config["data"]["train_rows"])

    def prepare(self, config: Config) -> data.Prepared[data.Examples]:
        model, place = config["model"], config["data"]["tokenizer"]
        if model["weights"] is not None:
            tokenizer = locate(model["weights"], model["revision"])
            instantiate(model, seed=0, device="cpu")  # what is wrong with the weights is found before a worker starts
        elif place is None:
            raise ValueError("model.weights=null leaves no tokenizer; set data.tokenizer to a folder that has one")
        if place is not None:
            tokenizer = locate_tokenizer(place)
        return data.prepare_glue(
            instantiate(config["data"]),
            tokenizer=tokenizer,
            vocab_size=model["vocab_size"],
            pad_token=model["pad_token_id"],
            token_types=model["token_types"],
        )

    def objective(self, model: nn.Module, batch: data.LabelledBatch) -> tuple[Tensor, Tensor]:
        answers: Tensor = model(batch.tokens, batch.lengths, batch.types)
        if batch.labels.is_floating_point():
            return (answers[:, 0] - batch.labels).square(), answers
        wide = answers.to(torch.promote_types(answers.dtype, torch.float32))
        return nn.functional.cross_entropy(wide, batch.labels, reduction="none"), answers

    def scores(self, config: Config, prepared: data.Prepared[data.Examples]) -> data.Scores:
        return data.Scores(config["data"]["task"], prepared.validation, outputs=config["model"]["num_labels"])


TASKS: dict[str, Task] = {"pretrain": Pretrain(), "finetune": Finetune()}
