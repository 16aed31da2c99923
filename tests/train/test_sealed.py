"""Files of the cache that training reads: a flipped bit in any of them is found, and named."""

import numpy as np
import pytest

from meshmpi.checkpoint.hashing import PIECE_BYTES
from meshmpi.errors import DataError
from meshmpi.transformer.training import corpora
from meshmpi.transformer.training.config import load as settings_of
from meshmpi.transformer.training.data import load_dataset, prepare
from meshmpi.transformer.training.sealed import Sealed, seal
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.translation import data as pairs

pytestmark = pytest.mark.usefixtures("cache")
TEXT = "To be, or not to be, that is the question.\n" * 40


def tokens(folder):
    path = folder / "text.txt"
    path.write_text(TEXT)
    prepare(str(path), "characters")
    return "tokens", read_tokens


def read_tokens(folder):
    found = load_dataset(folder)
    return [found.train[:], found.held_out[3:9]]


def sentences(folder):
    path = folder / "pairs.tsv"
    letters = np.random.default_rng(1).integers(97, 123, (400, 2, 6, 4), np.uint8)
    lines = ("\t".join(" ".join(bytes(w).decode() for w in s) for s in pair) for pair in letters)
    path.write_text("\n".join(lines) + "\n")
    options = [f"translation.pairs={path}", "data.vocabulary=characters", "task=translation"]
    pairs.prepare(settings_of(Settings, None, options))
    return "tokens", read_pairs


def read_pairs(folder):
    found = pairs._load(folder)
    places = found.train.starts[:-1]
    return [found.train.tokens[places], found.held_out.tokens[found.held_out.starts[:-1]]]


@pytest.mark.parametrize("make", [tokens, sentences])
def test_a_flipped_bit_in_any_file_is_found(tmp_path, cache, make):
    where, read = make(tmp_path)
    (folder,) = [p for p in (cache / where).iterdir() if p.is_dir()]
    files = sorted(folder.iterdir())
    read(folder)
    assert len(files) >= 5
    random = np.random.default_rng(5)
    for path in files:
        good = path.read_bytes()
        for place in random.integers(0, len(good), 4).tolist():
            bad = bytearray(good)
            bad[place] ^= 1 << int(random.integers(8))
            path.write_bytes(bad)
            with pytest.raises(DataError, match=f"damaged.*{path.name}") as caught:
                read(folder)
            assert "Delete the folder" in caught.value.remedy
        path.write_bytes(good)
    read(folder)


def test_a_fetched_corpus_that_has_changed_since(cache, monkeypatch):
    path = corpora.open_corpus("tinyshakespeare").path
    data = bytearray(path.read_bytes())
    data[1000] ^= 4
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"tinyshakespeare-86c4e6aa9db7.txt is damaged: checksum"):
        corpora.open_corpus("tinyshakespeare")
    path.unlink()  # the remedy
    corpora.open_corpus("tinyshakespeare")


def test_only_what_is_touched_is_read_and_checked(tmp_path):
    each = PIECE_BYTES // 2
    numbers = np.arange(2 * each + 7).astype("<u2")
    numbers.tofile(tmp_path / "n.bin")
    seal(tmp_path)
    with open(tmp_path / "n.bin", "r+b") as file:
        file.seek(PIECE_BYTES + 20)
        file.write(b"\xff\xff")
    found = Sealed(tmp_path).array("n.bin", "<u2")
    np.testing.assert_array_equal(found[:each], numbers[:each])
    np.testing.assert_array_equal(found[-7:], numbers[-7:])
    np.testing.assert_array_equal(found[np.array([[0, -1]])], numbers[[[0, -1]]])
    assert found[5:5].size == 0 and len(found) == numbers.size
    for key in (slice(each - 1, each + 1), slice(None), np.array([0, each]), slice(None, None, -1)):
        with pytest.raises(DataError, match=f"bytes {PIECE_BYTES} to {2 * PIECE_BYTES} of n.bin"):
            found[key]
    with pytest.raises(IndexError):
        found[numbers.size]
