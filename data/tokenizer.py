"""The tokenizer: SentencePiece, a given model or one trained on the corpus.

A trained one has T5's layout of ids (pad 0, end of sequence 1, unknown 2, no beginning of sequence) and is lossless:
nothing is normalised, a newline is a piece of its own, runs of spaces may be pieces (indentation carries meaning in
source code), and what has no piece is spelt in bytes. Only U+2581, SentencePiece's own sign for a space, comes back as
a space.

It is trained by byte-pair encoding, as LLaMA's is. On 12 MB of source code that takes seconds where the unigram model
takes minutes.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

if TYPE_CHECKING:
    from data.config import DataConfig
    from data.corpora import Corpus

TRAINING_BYTES = 20_000_000
LONGEST_SENTENCE = 1000  # characters; SentencePiece drops sentences of more than 4,192 bytes


class Tokenizer:
    """A SentencePiece model.

    Attributes: ``model`` (the file's bytes), ``sha256`` of them, ``pieces`` (size of the vocabulary), ``eos``, ``pad``
    (the end of sequence where the model has no padding), ``origin`` (in words, for messages).

    Raises:
        ValueError: if ``model`` is no SentencePiece model or has no end of sequence.
    """

    def __init__(self, model: bytes, *, origin: str) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            self._processor = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError(f"data.tokenizer.path: {origin} is not a SentencePiece model") from error
        self.model = model
        self.origin = origin
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.pieces = self._processor.get_piece_size() if model else 0
        if self.pieces == 0:
            raise ValueError(f"data.tokenizer.path: {origin} is not a SentencePiece model")
        self.eos = self._processor.eos_id()
        if self.eos < 0:
            raise ValueError(f"data.tokenizer.path: {origin} has no end-of-sequence piece, which rows need")
        self.pad = self._processor.pad_id() if self._processor.pad_id() >= 0 else self.eos

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, in order, without an end of sequence; uses all cores."""
        return self._processor.encode(texts, out_type=int, num_threads=os.cpu_count() or 1)

    def decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)


def open_tokenizer(config: DataConfig, corpus: Corpus) -> Tokenizer:
    """The tokenizer of ``data.tokenizer.path`` or, without one, the corpus's own, trained once and cached."""
    if config.tokenizer.path is not None:
        path = Path(config.tokenizer.path)
        if not path.is_file():
            raise ValueError(f"data.tokenizer.path: '{path}' is not a file; give a SentencePiece .model")
        return Tokenizer(path.read_bytes(), origin=f"'{path}'")

    vocab_size = config.tokenizer.vocab_size
    determines = (corpus.fingerprint, config.validation_fraction, config.document, config.text_field, vocab_size)
    key = hashlib.sha256(repr(determines).encode()).hexdigest()[:16]
    path = Path(config.cache_dir) / f"tokenizer-{key}.model"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                temporary = path.with_suffix(".partial")
                temporary.write_bytes(train(corpus.sample(TRAINING_BYTES), vocab_size=vocab_size))
                os.replace(temporary, path)
    return Tokenizer(path.read_bytes(), origin=f"trained on {corpus.name} (data.tokenizer.vocab_size={vocab_size})")


def train(texts: Iterable[str], *, vocab_size: int) -> bytes:
    """A SentencePiece model of exactly ``vocab_size`` pieces; the same texts give the same bytes.

    Raises:
        ValueError: if the texts allow no vocabulary of this size, naming the nearest that they do.
    """
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    sentences = _sentences(texts)
    first = next(sentences, None)
    if first is None:
        raise ValueError(
            "data: no document to train a tokenizer on; the corpus is empty or data.validation_fraction leaves none"
        )
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_chain(first, sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            user_defined_symbols=["\n"],
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explain(error, vocab_size) from error
    return model.getvalue()


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Lines, the long ones in parts; pieces never span lines anyhow, for the newline is a piece of its own."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), LONGEST_SENTENCE):
                yield line[start : start + LONGEST_SENTENCE]


def _explain(error: RuntimeError, vocab_size: int) -> Exception:
    """SentencePiece's complaints about the size, in terms of the configuration; any other error as it is."""
    message = str(error)
    key = f"data.tokenizer.vocab_size={vocab_size}"
    if found := re.search(r"too high .*<= (\d+)", message):
        return ValueError(f"{key} is too large for this corpus; the largest that it allows is {found[1]}")
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return ValueError(
            f"{key} is too small for a tokenizer of this corpus (all bytes and its frequent characters have a piece); "
            f"the smallest that would do is {found[1]}"
        )
    if vocab_size < 260:  # 256 bytes, pad, eos, unk and the newline
        return ValueError(
            f"{key} is too small for a tokenizer; it needs 260 pieces and one for each frequent character"
        )
    return error
