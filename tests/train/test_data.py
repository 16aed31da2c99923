"""Corpora, vocabularies, token files and batches; packages are fetched by stand-ins."""

import math
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from meshmpi.errors import DataError
from meshmpi.files.cache import cache_folder, make_file, make_folder
from meshmpi.transformer.text import sentence_pieces
from meshmpi.transformer.text.base import bits_per_byte, count_bytes
from meshmpi.transformer.text.characters import ByteVocabulary, CharacterVocabulary
from meshmpi.transformer.text.sentence_pieces import SentencePieceVocabulary
from meshmpi.transformer.text.vocabulary import build_vocabulary, load_vocabulary, restore_vocabulary, save_vocabulary
from meshmpi.transformer.training import data
from meshmpi.transformer.training.corpora import open_corpus
from meshmpi.transformer.training.data import TokenStream, load_dataset, prepare, token_dtype
from meshmpi.transformer.training.evaluation import HeldOutText

pytestmark = pytest.mark.usefixtures("cache")
TEXT = "To be, or not to be\nthat is — the question ☃\n" * 40


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


# Corpora


def test_tinyshakespeare_is_in_the_repository():
    corpus = open_corpus("tinyshakespeare")
    assert (corpus.train_bytes, corpus.total_bytes) == (1003854, 1115394)
    train = b"".join(corpus.train_pieces(100_000))
    assert train == corpus.path.read_bytes()[:1003854]
    assert train.startswith(b"First Citizen:\nBefore we proceed")


@pytest.mark.parametrize("piece_bytes", [1, 2, 7, 64, 10_000])
def test_a_file_is_split_between_characters(text_file, piece_bytes):
    for fraction in (0.1, 0.3, 0.5014, 0.5015, 0.5016, 0.5017):
        corpus = open_corpus(str(text_file), fraction)
        train = list(corpus.train_pieces(piece_bytes))
        held_out = list(corpus.held_out_pieces(piece_bytes))
        assert b"".join(train + held_out) == TEXT.encode()
        assert b"".join(held_out).decode()
        wanted = corpus.total_bytes * (1 - fraction)
        assert wanted - 4 < corpus.train_bytes <= wanted
        if piece_bytes >= 64:
            assert all(p.endswith(b"\n") for p in train[:-1])


def test_the_key_of_a_file_follows_its_text(text_file):
    key = open_corpus(str(text_file)).key
    assert open_corpus(str(text_file)).key == key
    text_file.write_text(TEXT + "more")
    assert open_corpus(str(text_file)).key != key


def test_missing_and_empty_corpora(tmp_path):
    with pytest.raises(DataError, match=r"no named corpus has this name. Did you mean 'sotu'\?"):
        open_corpus("sotuu")
    with pytest.raises(DataError, match="does not exist.*Known names: tinyshakespeare"):
        open_corpus(str(tmp_path / "nothing.txt"))
    with pytest.raises(DataError, match="is a folder"):
        open_corpus(str(tmp_path))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"empty\.txt' is an empty file"):
        open_corpus(str(tmp_path / "empty.txt"))
    (tmp_path / "short.txt").write_text("a")
    with pytest.raises(DataError, match="leaves 0 for training and 1 held out"):
        open_corpus(str(tmp_path / "short.txt"))
    with pytest.raises(DataError, match="held_out_fraction is 1"):
        open_corpus("tinyshakespeare", 1)


# Vocabularies


def test_bytes():
    vocabulary = ByteVocabulary()
    assert vocabulary.size == 256
    assert vocabulary.decode(vocabulary.encode(TEXT)) == TEXT
    assert count_bytes(vocabulary, vocabulary.encode(TEXT)) == len(TEXT.encode())
    assert vocabulary.decode([0xFF, 65]) == "\ufffdA"


def test_characters_of_tinyshakespeare():
    dataset = prepare("tinyshakespeare", "characters")
    assert dataset.vocabulary.size == 65
    assert dataset.vocabulary.characters[:3] == "\n !"  # type: ignore[attr-defined]
    assert dataset.train.dtype == np.uint8
    assert (len(dataset.train), len(dataset.held_out)) == (1003854, 111540)
    assert dataset.vocabulary.decode(dataset.train[:14]) == "First Citizen:"


def test_characters_beyond_ascii():
    vocabulary = CharacterVocabulary(TEXT)
    tokens = vocabulary.encode(TEXT.encode())
    assert tokens.dtype == np.int32
    assert vocabulary.decode(tokens) == TEXT
    assert count_bytes(vocabulary, tokens) == len(TEXT.encode())
    for unknown in "z\U0001f600\x00":
        with pytest.raises(DataError, match="is not among the"):
            vocabulary.encode("be" + unknown)
    with pytest.raises(DataError, match=r"not UTF-8: byte 0xff at 2"):
        vocabulary.encode(b"be\xff")


def test_byte_pairs_lose_nothing():
    pytest.importorskip("sentencepiece", reason="the extra 'text' is not installed")
    text = "the cat  sat\ton the mat\n\n the hat\r\n" * 50
    vocabulary = SentencePieceVocabulary.train(text.split("\n"), 280)
    assert (vocabulary.size, vocabulary.name) == (280, "bpe:280")
    strange = text + "naïve ☃ \U0001f600 "
    tokens = vocabulary.encode(strange)
    assert len(tokens) < len(strange)
    assert vocabulary.decode(tokens) == strange
    assert count_bytes(vocabulary, tokens) == len(strange.encode())
    same = restore_vocabulary(vocabulary.state())
    assert np.array_equal(same.encode(strange), tokens)
    with pytest.raises(DataError, match="could not learn a vocabulary of 9999"):
        SentencePieceVocabulary.train(text.split("\n"), 9999)


def test_byte_pairs_of_parts_are_those_of_the_whole(monkeypatch):
    """Tokens of parts are kept; a full store begins anew.  SentencePiece on the whole text says what is right."""
    pytest.importorskip("sentencepiece", reason="the extra 'text' is not installed")
    text = "the cat  sat\ton the mat\n\n   the hat\r\nñandú  \n" * 20
    vocabulary = SentencePieceVocabulary.train(text.split("\n"), 290)
    strange = f"{text}  \n \nnaïve ☃ \U0001f600\u2581x \x00\u00a0 y \x0b z {text}"
    wanted = vocabulary._processor.encode(strange)
    for most in (1 << 19, 3):
        monkeypatch.setattr(sentence_pieces, "MOST_WORDS", most)
        assert vocabulary.encode(strange).tolist() == wanted
        assert len(vocabulary._known) < 60
    assert vocabulary.encode("").tolist() == []


def test_a_long_text_is_learnt_from_in_part(tmp_path, monkeypatch):
    pytest.importorskip("sentencepiece", reason="the extra 'text' is not installed")
    monkeypatch.setattr(data, "LEARNT_BYTES", 3 << 20)
    seen = []
    right = data.build_vocabulary
    monkeypatch.setattr(data, "build_vocabulary", lambda name, train, held_out: right(name, seen_of(train), held_out))

    def seen_of(train):
        for piece in train:
            seen.append(len(piece))
            yield piece

    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {n} of a text that is long\n" for n in range(220_000)))
    found = prepare(str(file), "bpe:300")
    assert file.stat().st_size / 3.2 < sum(seen) < file.stat().st_size / 2
    assert len(found.train) > 10 * 220_000 * 0.8, "all of it is encoded"


def test_byte_pairs_without_their_package(monkeypatch, text_file):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match=r"pip install 'meshmpi\[text\]'"):
        prepare(str(text_file), "bpe:300")


@pytest.mark.parametrize("name", ["bytes", "characters"])
def test_vocabularies_are_kept_in_json(tmp_path, name):
    vocabulary = build_vocabulary(name, [b"abc\n"], ["☃".encode()])
    save_vocabulary(vocabulary, tmp_path / "v.json")
    same = load_vocabulary(tmp_path / "v.json")
    assert (same.name, same.size) == (vocabulary.name, vocabulary.size)
    assert same.encode("ab☃").tolist() == vocabulary.encode("ab☃").tolist()


def test_vocabulary_names():
    with pytest.raises(DataError, match=r"no vocabulary 'byte'. Did you mean 'bytes'\?"):
        prepare("tinyshakespeare", "byte")
    with pytest.raises(DataError, match="'bpe:many' has no size"):
        prepare("tinyshakespeare", "bpe:many")
    with pytest.raises(DataError, match="unknown kind 'words'"):
        restore_vocabulary({"kind": "words"})


def test_bits_per_byte():
    # 8 bits a byte are ln(256) nats for every byte
    assert bits_per_byte(math.log(256), 10, 10) == pytest.approx(8)
    assert bits_per_byte(math.log(256), 10, 40) == pytest.approx(2)


# Token files


def test_tokens_are_prepared_once(text_file, monkeypatch):
    first = prepare(str(text_file), "bytes")
    monkeypatch.setattr("meshmpi.transformer.training.data.build_vocabulary", None)
    again = prepare(str(text_file), "bytes")
    assert again.digest == first.digest
    assert bytes(np.concatenate([again.train, again.held_out])) == TEXT.encode()
    with pytest.raises(TypeError, match="assignment"):
        again.train[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        again.train[:][0] = 1


def test_many_tokens_take_wider_files(text_file):
    assert [token_dtype(n).name for n in (65, 256, 257, 65536, 65537)] == [
        "uint8",
        "uint8",
        "uint16",
        "uint16",
        "int32",
    ]
    text_file.write_text("".join(chr(0x4E00 + k) for k in range(700)))
    dataset = prepare(str(text_file), "characters")
    assert dataset.vocabulary.size == 700
    assert dataset.train.dtype == np.uint16
    both = [*dataset.train, *dataset.held_out]
    assert dataset.vocabulary.decode(both) == text_file.read_text()


def test_damaged_token_files(text_file, cache):
    prepare(str(text_file), "bytes")
    (folder,) = [p for p in (cache / "tokens").iterdir() if p.is_dir()]
    with open(folder / "train.bin", "ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="damaged: train.bin has .* bytes, .* were written"):
        load_dataset(folder)
    (folder / "about.json").unlink()
    with pytest.raises(DataError, match="damaged"):
        load_dataset(folder)


def _prepare_in_a_process(path):
    return prepare(path, "characters").digest


def test_several_processes_prepare_at_once(text_file, cache):
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        digests = list(pool.map(_prepare_in_a_process, [str(text_file)] * 4))
    assert len(set(digests)) == 1
    assert len([p for p in (cache / "tokens").iterdir() if p.is_dir()]) == 1


def test_a_failure_leaves_nothing_behind(tmp_path):
    def fail(path):
        path.write_text("half")
        raise DataError("no more")

    with pytest.raises(DataError, match="no more"):
        make_file(tmp_path / "new" / "x", fail)
    assert {p.name for p in (tmp_path / "new").iterdir()} <= {"x.lock"}


def test_without_locks_the_first_result_stays(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError("not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    target = tmp_path / "folder"

    def slow(beside):
        make_folder(target, lambda other: (other / "a").write_text("other"))
        (beside / "a").write_text("late")

    make_folder(target, slow)
    assert (target / "a").read_text() == "other"


def test_a_cache_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(DataError, match="the cache has no folder.*Set MESHMPI_CACHE"):
        cache_folder("tokens")
    monkeypatch.delenv("MESHMPI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("tokens") == tmp_path / "xdg" / "meshmpi" / "tokens"


# Batches


class Counting(np.ndarray):
    """Tokens that count how many of them are read."""

    read = 0

    def __getitem__(self, index):
        Counting.read += index.stop - index.start
        return np.asarray(super().__getitem__(index))


def test_targets_are_one_token_further():
    stream = TokenStream(np.arange(1000, dtype=np.uint16), batch=6, length=8, seed=3)
    inputs, targets = stream.block(0)
    assert inputs.shape == targets.shape == (6, 8)
    assert inputs.dtype == targets.dtype == np.int32
    assert np.array_equal(targets, inputs + 1)
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])


def test_blocks_are_parts_of_the_whole_batch():
    stream = TokenStream(np.arange(500, dtype=np.uint16), batch=7, length=9, seed=-1)
    inputs, targets = stream.block(12)
    for rows in ((0, 7), (0, 3), (3, 6), (6, 7), (2, 2)):
        for columns in ((0, 9), (0, 4), (4, 9), (5, 5)):
            x, y = stream.block(12, rows=rows, columns=columns)
            assert np.array_equal(x, inputs[slice(*rows), slice(*columns)])
            assert np.array_equal(y, targets[slice(*rows), slice(*columns)])


def test_a_rank_reads_its_own_block_only():
    tokens = np.arange(10_000, dtype=np.uint16).view(Counting)
    stream = TokenStream(tokens, batch=64, length=128, seed=0)
    Counting.read = 0
    stream.block(5, rows=(8, 12), columns=(32, 64))
    assert Counting.read == 4 * 33


def test_batches_depend_on_seed_step_and_row_alone():
    tokens = np.arange(5000, dtype=np.int32)
    stream = TokenStream(tokens, batch=4, length=5, seed=1)
    later = TokenStream(tokens, batch=9, length=5, seed=1)
    assert stream.offsets(77, 0, 4) == later.offsets(77, 0, 4)
    assert stream.offsets(77, 0, 4) != stream.offsets(78, 0, 4)
    assert stream.offsets(77, 0, 4) != TokenStream(tokens, 4, 5, seed=2).offsets(77, 0, 4)
    # fixed for good: a resumed run must see the data that it would have seen
    assert stream.offsets(77, 0, 4) == [4708, 3437, 2999, 995]


def test_offsets_cover_the_text_evenly():
    stream = TokenStream(np.arange(20, dtype=np.int32), batch=1000, length=9, seed=0)
    offsets = stream.offsets(0, 0, 1000)
    counts = np.bincount(offsets)
    assert len(counts) == 11  # the last window needs its target
    assert counts.min() > 60


def test_a_text_of_one_window():
    inputs, targets = TokenStream(np.arange(5), batch=2, length=4).block(9)
    assert inputs.tolist() == [[0, 1, 2, 3]] * 2
    assert targets.tolist() == [[1, 2, 3, 4]] * 2


def test_held_out_bytes_are_those_of_the_predicted_tokens():
    vocabulary = CharacterVocabulary("a☃")  # 1 and 3 bytes
    tokens = vocabulary.encode("☃a☃a☃a☃")
    windows = HeldOutText(tokens, batch=1, length=2)
    assert windows.predicted == 6
    assert windows.text_bytes(vocabulary) == len("a☃a☃a☃".encode())


def test_batches_that_cannot_be_cut():
    tokens = np.arange(10)
    with pytest.raises(DataError, match="training text has 10 tokens; .* need 11"):
        TokenStream(tokens, batch=1, length=10)
    with pytest.raises(DataError, match="batches of 0 windows"):
        TokenStream(tokens, batch=0, length=3)
    with pytest.raises(DataError, match=r"rows 1\.\.5 of a batch with 4"):
        TokenStream(tokens, batch=4, length=3).block(0, rows=(1, 5))
