"""From a corpus, or labelled examples, to the rows of tokens that each worker trains on.

Notation, used throughout the package::

    document   a string: a source file, a line of a text, a record of C4
    split      "train" or "validation"
    row        T token ids (T = ``sequence_length``) of which the first ``length`` are real, the rest padding
    N          rows of a split
    tokens     real tokens: the sum of the lengths
    positions  N * T, padding included
    loss tokens  the sum of (length - 1): the positions that have a next token to predict

The work is done once. :func:`prepare` tokenises the corpus into ``<cache_dir>/<key>``, a folder whose name is a hash
of all that determines its content; any number of processes may call it at once. :mod:`data.batches` then serves each
rank its part of each global batch, as a function of (data seed, step, index in the batch) alone, so that neither the
number of workers nor a restart changes what a step sees.

Modules: :mod:`~data.config` (what a user may ask for), :mod:`~data.corpora` (documents), :mod:`~data.tokenizer`,
:mod:`~data.rows` (the files), :mod:`~data.batches` (serving).

For fine-tuning: :mod:`~data.glue` (the tasks and their sentences), :mod:`~data.examples` (rows with labels),
:mod:`~data.scores` (metrics and predictions). :mod:`data.tasks` joins data and models: what a job trains for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from data.batches import GlobalStep, evaluation_batches, training_steps
from data.config import DataConfig, TokenizerConfig
from data.corpora import open_corpus
from data.examples import Examples, GlueConfig, LabelledBatch, prepare_examples
from data.rows import Batch, Rows, prepare_rows
from data.scores import Scores
from data.tokenizer import open_tokenizer

__all__ = [
    "Batch",
    "DataConfig",
    "Examples",
    "GlobalStep",
    "GlueConfig",
    "LabelledBatch",
    "Prepared",
    "Rows",
    "Scores",
    "TokenizerConfig",
    "evaluation_batches",
    "prepare",
    "prepare_glue",
    "training_steps",
]


Rowlike = TypeVar("Rowlike", Rows, Examples)


@dataclass(frozen=True)
class Prepared(Generic[Rowlike]):
    """A corpus, or a labelled task, ready for training.

    ``record`` is plain JSON for the run record: ``name``, ``corpus_sha256``, ``tokenizer_sha256``,
    ``tokenizer_vocabulary`` (pieces), ``sequence_length``, and for ``train`` and ``validation`` their ``rows``,
    ``tokens``, ``positions`` and ``loss_tokens``; further ``rows`` (the layout) of a corpus, and of a task what
    :func:`data.examples.prepare_examples` lists.
    """

    folder: Path
    train: Rowlike
    validation: Rowlike
    record: dict[str, Any]

    @property
    def identity(self) -> dict[str, str]:
        """What identifies the text: the hashes of corpus and tokenizer."""
        return {key: self.record[key] for key in ("corpus_sha256", "tokenizer_sha256")}


def prepare(config: DataConfig, *, vocab_size: int) -> Prepared[Rows]:
    """Make the rows that ``config`` describes, or find them in the cache.

    ``vocab_size`` is the model's. Safe to call from all ranks at once: one works, the others wait for it.

    Raises:
        ValueError: for anything wrong with the configuration or the corpus, naming the key.
        ConnectionError: if C4 is needed and cannot be reached.
    """
    corpus = open_corpus(config)
    tokenizer = open_tokenizer(config, corpus)
    if tokenizer.pieces > vocab_size:
        raise ValueError(
            f"model.vocab_size={vocab_size} but the tokenizer {tokenizer.origin} has {tokenizer.pieces} pieces; "
            f"set model.vocab_size to at least {tokenizer.pieces} or choose another tokenizer (data.tokenizer.path)"
        )
    folder, record = prepare_rows(config, corpus, tokenizer)
    return Prepared(folder=folder, train=Rows(folder, "train"), validation=Rows(folder, "validation"), record=record)


def prepare_glue(
    config: GlueConfig, *, tokenizer: Path, vocab_size: int, pad_token: int, token_types: int
) -> Prepared[Examples]:
    """Make the labelled rows that ``config`` describes, or find them in the cache; see `data.examples.prepare_examples`
    for arguments and errors."""
    folder = prepare_examples(
        config, tokenizer=tokenizer, vocab_size=vocab_size, pad_token=pad_token, token_types=token_types
    )
    record = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    return Prepared(folder, Examples(folder, "train"), Examples(folder, "validation"), record)
