"""From documents to rows: corpora, tokenizer, layouts, cache, interruption, the messages when something is wrong."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import pickle
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import data
from data import DataConfig, TokenizerConfig, corpora, prepare
from data import rows as rows_module
from data.corpora import HubDocuments, LocalCorpus, open_corpus
from data.tokenizer import Tokenizer, open_tokenizer, train

VOCABULARY = 320
WORDS = ["def", "return", "self", "class", "import", "for", "if", "else", "not", "value", "name", "list", "key", "data"]


def make_documents(count: int, *, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, 30))) + f" {number}" for number in range(count)]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    path.write_bytes(train(make_documents(300), vocab_size=VOCABULARY))
    return path


@pytest.fixture
def text_config(tmp_path: Path, model_file: Path) -> Any:
    (tmp_path / "corpus.txt").write_text("\n".join(make_documents(200)))

    def make(**overrides: Any) -> DataConfig:
        keys: dict[str, Any] = dict(
            name="text",
            paths=[str(tmp_path / "corpus.txt")],
            sequence_length=16,
            validation_fraction=0.2,
            tokenizer=TokenizerConfig(path=str(model_file)),
            cache_dir=str(tmp_path / "cache"),
        )
        return DataConfig(**(keys | overrides))

    return make


def all_rows(rows: data.Rows) -> tuple[list[list[int]], list[int]]:
    pairs = [rows[index] for index in range(len(rows))]
    return [tokens.tolist() for tokens, _ in pairs], [length for _, length in pairs]


# Corpora


def test_stdlib_is_its_sources_without_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.py", "a.py", "pkg/c.py", "test/t.py", "pkg/tests/t.py", "site-packages/s.py", "note.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    monkeypatch.setattr(corpora, "stdlib_root", lambda: tmp_path)
    corpus = open_corpus(DataConfig(name="stdlib", validation_fraction=1e-9))
    assert list(corpus.documents("train")) == ["# a.py\n", "# b.py\n", "# pkg/c.py\n"]
    (tmp_path / "a.py").write_text("# other\n")
    assert open_corpus(DataConfig(name="stdlib")).fingerprint != corpus.fingerprint


def test_text_reads_lines_files_and_records(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("one\n\ntwo\n")
    (tmp_path / "sub" / "a.jsonl").write_text('{"body": "three\\nlines"}\n\n{"body": "\\ud800four"}\n')
    keys: dict[str, Any] = dict(name="text", paths=[str(tmp_path)], text_field="body", validation_fraction=1e-9)
    assert list(open_corpus(DataConfig(**keys)).documents("train")) == ["one", "two", "three\nlines", "?four"]
    whole = open_corpus(DataConfig(**keys, document="file"))
    assert next(iter(whole.documents("train"))) == "one\n\ntwo\n"


def test_the_split_depends_on_the_text_alone(tmp_path: Path) -> None:
    documents = make_documents(300)
    sides = []
    for name, order in (("a", documents), ("b", documents[::-1] + documents[:50])):
        (tmp_path / f"{name}.txt").write_text("\n".join(order))
        corpus = open_corpus(DataConfig(name="text", paths=[str(tmp_path / f"{name}.txt")], validation_fraction=0.2))
        sides.append({split: set(corpus.documents(split)) for split in ("train", "validation")})
    assert sides[0] == sides[1]
    assert sides[0]["train"].isdisjoint(sides[0]["validation"])
    assert sides[0]["train"] | sides[0]["validation"] == set(documents)
    assert 30 < len(sides[0]["validation"]) < 90


def test_the_tokenizer_sample_is_bounded_and_drawn_from_the_training_side(text_config: Any) -> None:
    corpus = open_corpus(text_config())
    training = list(corpus.documents("train"))
    assert list(corpus.sample(10**9)) == training
    assert isinstance(corpus, LocalCorpus)
    part = list(corpus.sample(corpus.size // 4))
    assert set(part) < set(training) and 10 < len(part) < 80 and training.index(part[-1]) > 100


# Tokenizer


@pytest.mark.parametrize(
    "text", ["def f():\n\tx = 1\n\n    return  'é日本🙂' \n", "\n\n  a", " a ", "x\r\ny\x00", "  "]
)
def test_a_trained_tokenizer_is_lossless(model_file: Path, text: str) -> None:
    tokenizer = Tokenizer(model_file.read_bytes(), origin="small")
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids) == text
    assert (tokenizer.pad, tokenizer.eos, tokenizer.pieces) == (0, 1, VOCABULARY)


def test_training_is_deterministic_and_cached(text_config: Any, model_file: Path) -> None:
    assert train(make_documents(300), vocab_size=VOCABULARY) == model_file.read_bytes()
    config = text_config(tokenizer=TokenizerConfig(vocab_size=VOCABULARY))
    first = open_tokenizer(config, open_corpus(config))
    (cached,) = Path(config.cache_dir).glob("tokenizer-*.model")
    assert cached.read_bytes() == first.model
    stamp = cached.stat().st_mtime_ns
    assert open_tokenizer(config, open_corpus(config)).sha256 == first.sha256 and cached.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("size", [100, 265, 100_000])
def test_a_vocabulary_that_cannot_be_is_explained_with_one_that_can(size: int) -> None:
    documents = make_documents(300)
    with pytest.raises(ValueError, match=rf"data\.tokenizer\.vocab_size={size} is too (small|large)") as caught:
        train(documents, vocab_size=size)
    possible = int(str(caught.value).rstrip(")").split()[-1])
    train(documents, vocab_size=possible)


# Rows


def test_packed_rows_are_the_stream_of_documents(text_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "DOCUMENTS_AT_ONCE", 7)
    config = text_config()
    prepared = prepare(config, vocab_size=VOCABULARY)
    tokenizer, corpus = open_tokenizer(config, open_corpus(config)), open_corpus(config)
    stream = [i for ids in tokenizer.encode(list(corpus.documents("train"))) for i in (*ids, tokenizer.eos)]
    tokens, lengths = all_rows(prepared.train)
    assert [i for row in tokens for i in row] == stream[: len(stream) // 16 * 16]
    assert set(lengths) == {16}
    n = len(tokens)
    assert prepared.record["train"] == {"rows": n, "tokens": 16 * n, "positions": 16 * n, "loss_tokens": 15 * n}
    assert prepared.record["tokenizer_sha256"] == tokenizer.sha256
    assert prepared.record["corpus_sha256"] == corpus.fingerprint
    assert json.loads(json.dumps(prepared.record)) == prepared.record
    assert pickle.loads(pickle.dumps(prepared)).record == prepared.record
    assert (prepared.folder / "tokenizer.model").read_bytes() == tokenizer.model


def test_document_rows_end_and_are_padded(text_config: Any) -> None:
    config = text_config(rows="document", sequence_length=24)
    prepared = prepare(config, vocab_size=VOCABULARY)
    tokenizer = open_tokenizer(config, open_corpus(config))
    tokens, lengths = all_rows(prepared.train)
    documents = tokenizer.encode(list(open_corpus(config).documents("train")))
    assert len(tokens) == len(documents)
    for row, length, ids in zip(tokens, lengths, documents, strict=True):
        assert row == ids[:23] + [tokenizer.eos] + [tokenizer.pad] * (24 - length)
        assert length == min(len(ids) + 1, 24)
    record = prepared.record["train"]
    assert record["tokens"] == sum(lengths) < record["positions"] == 24 * len(tokens)
    assert record["loss_tokens"] == sum(lengths) - len(tokens)


def test_validation_is_shuffled_once_and_its_cap_draws_from_all_of_it(text_config: Any) -> None:
    everything, _ = all_rows(prepare(text_config(), vocab_size=VOCABULARY).validation)
    capped, _ = all_rows(
        prepare(text_config(max_validation_rows=5, max_train_rows=3), vocab_size=VOCABULARY).validation
    )
    assert capped == everything[:5]
    config = text_config()
    tokenizer, corpus = open_tokenizer(config, open_corpus(config)), open_corpus(config)
    stream = [i for ids in tokenizer.encode(list(corpus.documents("validation"))) for i in (*ids, tokenizer.eos)]
    in_order = [stream[start : start + 16] for start in range(0, len(stream) - 15, 16)]
    assert everything != in_order and sorted(everything) == sorted(in_order)


def test_what_determines_the_rows_determines_the_folder(text_config: Any) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"rows": "document"},
        {"sequence_length": 8},
        {"max_train_rows": 2},
        {"validation_fraction": 0.3},
    ]
    folders = {prepare(text_config(**variant), vocab_size=VOCABULARY).folder for variant in variants}
    assert len(folders) == len(variants)
    assert prepare(text_config(num_workers=2), vocab_size=1000).folder in folders


def _prepare_in_process(config: DataConfig, queue: Any) -> None:
    queue.put(str(prepare(config, vocab_size=VOCABULARY).folder))


def test_processes_that_prepare_at_once_share_the_work(text_config: Any) -> None:
    config = text_config(tokenizer=TokenizerConfig(vocab_size=VOCABULARY))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_prepare_in_process, args=(config, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    folders = {queue.get(timeout=120) for _ in processes}
    for process in processes:
        process.join()
    assert len(folders) == 1
    assert sorted(path.name for path in Path(folders.pop()).iterdir()) == sorted(
        ["meta.json", "tokenizer.model", "train.tokens", "train.lengths", "validation.tokens", "validation.lengths"]
    )
    assert not list(Path(config.cache_dir).glob("*.partial"))


def test_real_stdlib(tmp_path: Path, model_file: Path) -> None:
    config = DataConfig(
        name="stdlib",
        tokenizer=TokenizerConfig(path=str(model_file)),
        max_train_rows=50,
        max_validation_rows=20,
        cache_dir=str(tmp_path),
    )
    prepared = prepare(config, vocab_size=VOCABULARY)
    assert (len(prepared.train), len(prepared.validation)) == (50, 20)


# C4, from a local copy of its layout


@pytest.fixture
def c4_config(tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = tmp_path / "c4"
    (folder / "en").mkdir(parents=True)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: en\n  data_files:\n"
        "  - {split: train, path: en/c4-train.*.json.gz}\n"
        "  - {split: validation, path: en/c4-validation.*.json.gz}\n---\n"
    )
    for split, shards in (("train", 3), ("validation", 1)):
        for shard in range(shards):
            with gzip.open(folder / "en" / f"c4-{split}.{shard:05d}-of-{shards:05d}.json.gz", "wt") as file:
                for text in make_documents(60, seed=shard):
                    file.write(json.dumps({"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "u"}) + "\n")
    monkeypatch.setattr(rows_module, "DOCUMENTS_AT_ONCE", 8)

    def make(cache: str, **overrides: Any) -> DataConfig:
        keys: dict[str, Any] = dict(
            name="c4",
            repository=str(folder),
            validation_fraction=None,
            sequence_length=16,
            max_train_rows=10**6,
            tokenizer=TokenizerConfig(path=str(model_file)),
            cache_dir=str(tmp_path / cache),
        )
        return DataConfig(**(keys | overrides))

    return make


@pytest.mark.parametrize("rows", ["packed", "document"])
def test_an_interrupted_c4_preparation_continues_each_time_it_is_resumed(
    c4_config: Any, monkeypatch: pytest.MonkeyPatch, rows: str
) -> None:
    whole = prepare(c4_config("whole", rows=rows), vocab_size=VOCABULARY)
    documents_read = 0
    stream = HubDocuments.__iter__

    def failing(self: HubDocuments) -> Any:
        nonlocal documents_read
        for number, text in enumerate(stream(self)):
            if self._split == "train":
                if number == 45:
                    raise KeyboardInterrupt
                documents_read += 1
            yield text

    monkeypatch.setattr(HubDocuments, "__iter__", failing)
    interruptions = 0
    while interruptions < 10:
        try:
            resumed = prepare(c4_config("resumed", rows=rows), vocab_size=VOCABULARY)
            break
        except KeyboardInterrupt:
            interruptions += 1
            (partial,) = Path(c4_config("resumed").cache_dir).glob("*.partial")
            with (partial / "train.tokens").open("ab") as file:
                file.write(b"half a row")  # as a kill in the middle of a write leaves it
    else:
        pytest.fail("the preparation does not get on")
    assert interruptions >= 3
    assert documents_read < 180 + interruptions * 8  # continued, not started over
    for name in ("train.tokens", "train.lengths", "validation.tokens", "validation.lengths", "meta.json"):
        assert (resumed.folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_c4_stops_at_the_rows_asked_for(c4_config: Any) -> None:
    full, _ = all_rows(prepare(c4_config("a"), vocab_size=VOCABULARY).train)
    some = prepare(c4_config("a", max_train_rows=9, max_validation_rows=4), vocab_size=VOCABULARY)
    assert all_rows(some.train)[0] == full[:9] and len(some.validation) == 4


def test_c4_without_a_network_says_what_to_do(c4_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ConnectionError, match=r"data=c4: cannot read allenai/c4 .*HF_HOME.*data=text"):
        prepare(c4_config("a", repository="allenai/c4"), vocab_size=VOCABULARY)


# What is said when something is wrong


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "wiki"}, "data.name must be one of stdlib, text, c4, got 'wiki'"),
        ({"rows": "padded"}, "data.rows must be one of packed, document, got 'padded'"),
        ({"document": "page"}, "data.document must be one of line, file, got 'page'"),
        ({"sequence_length": 1}, "data.sequence_length must be a whole number of at least 2, got 1"),
        ({"max_train_rows": 0}, "data.max_train_rows must be"),
        ({"max_validation_rows": 1.5}, "data.max_validation_rows must be"),
        ({"num_workers": -1}, "data.num_workers must be"),
        ({"validation_fraction": 0}, "data.validation_fraction must be between 0 and 1, got 0"),
        ({"paths": []}, "data.paths is empty"),
        ({"paths": "a.txt"}, r"write data.paths=\[a.txt\]"),
        ({"name": "c4"}, "data.max_train_rows=null"),
    ],
)
def test_plain_values_are_checked_at_once(text_config: Any, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text_config(**keys)


def test_wrong_paths_and_records(text_config: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.txt").write_bytes(b"ok\n\xff\xfe\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\nnot json\n')
    (tmp_path / "field.jsonl").write_text('{"body": "a"}\n')
    (tmp_path / "blank.txt").write_text("\n \n")
    for name, message in (
        ("missing", "data.paths: .*missing' does not exist"),
        ("empty", r"data.paths: no text found in .*empty' \(looked for \*.txt, \*.jsonl\)"),
        ("bad.txt", "data.paths: .*bad.txt' is not UTF-8"),
        ("bad.jsonl", "data.paths: line 2 of .*bad.jsonl' is not JSON"),
        ("field.jsonl", "data.text_field=text: line 1 of .*field.jsonl'"),
        ("blank.txt", "data=text: the validation documents are empty"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(text_config(paths=[str(tmp_path / name)]), vocab_size=VOCABULARY)
    with pytest.raises(ValueError, match="data: no document to train a tokenizer on"):
        prepare(text_config(paths=[str(tmp_path / "blank.txt")], tokenizer=TokenizerConfig()), vocab_size=VOCABULARY)


@pytest.mark.parametrize(("fraction", "side"), [(1e-6, "validation"), (1 - 1e-6, "train")])
def test_a_corpus_shorter_than_a_row(text_config: Any, fraction: float, side: str) -> None:
    with pytest.raises(ValueError, match=f"data=text: the {side} documents .* data.sequence_length=16"):
        prepare(text_config(validation_fraction=fraction), vocab_size=VOCABULARY)


def test_tokenizers_that_do_not_fit(text_config: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"model.vocab_size=300 but the tokenizer .* has {VOCABULARY} pieces"):
        prepare(text_config(), vocab_size=300)
    with pytest.raises(ValueError, match=r"data.tokenizer.path: .*none.model' is not a file"):
        prepare(text_config(tokenizer=TokenizerConfig(path=str(tmp_path / "none.model"))), vocab_size=VOCABULARY)
    for content in (b"", b"hello"):
        (tmp_path / "bad.model").write_bytes(content)
        with pytest.raises(ValueError, match=r"data.tokenizer.path: .*bad.model' is not a SentencePiece model"):
            prepare(text_config(tokenizer=TokenizerConfig(path=str(tmp_path / "bad.model"))), vocab_size=VOCABULARY)


def test_many_pieces_need_wider_files() -> None:
    assert rows_module.Layout("packed", 4, mock.Mock(pieces=2**16 + 1)).dtype == "uint32"
    assert rows_module.Layout("packed", 4, mock.Mock(pieces=2**16)).dtype == "uint16"
