"""From a corpus to the rows of tokens that each worker trains on.

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
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.batches import Batch, GlobalStep, evaluation_batches, training_steps
from data.config import DataConfig, TokenizerConfig
from data.corpora import open_corpus
from data.rows import Rows, prepare_rows
from data.tokenizer import open_tokenizer

__all__ = [
    "Batch",
    "DataConfig",
    "GlobalStep",
    "Prepared",
    "Rows",
    "TokenizerConfig",
    "evaluation_batches",
    "prepare",
    "training_steps",
]


@dataclass(frozen=True)
class Prepared:
    """A corpus ready for training.

    ``record`` is plain JSON for the run record: ``name``, ``corpus_sha256``, ``tokenizer_sha256``,
    ``tokenizer_vocabulary`` (pieces), ``rows`` (the layout), ``sequence_length``, and for ``train`` and ``validation``
    their ``rows``, ``tokens``, ``positions`` and ``loss_tokens``.
    """

    folder: Path
    train: Rows
    validation: Rows
    record: dict[str, Any]

    @property
    def identity(self) -> dict[str, str]:
        """What identifies the text: the hashes of corpus and tokenizer."""
        return {key: self.record[key] for key in ("corpus_sha256", "tokenizer_sha256")}


def prepare(config: DataConfig, *, vocab_size: int) -> Prepared:
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
