"""Pairs of sentences: files of the user and their mistakes, cleaning, division, Debian's texts."""

from __future__ import annotations

import subprocess

import pytest

from apps.transformer import debian_pairs
from meshmpi.errors import DataError
from meshmpi.transformer.translation.pairs import (
    Cleaning,
    Pair,
    clean,
    divide,
    main_script,
    read_parallel,
    read_tsv,
    statistics,
)
from meshmpi.transformer.translation.translator import bleu

ENGLISH = ["A small house.", "Two big trees stand here.", "The end of it."]
GERMAN = ["Ein kleines Haus.", "Zwei große Bäume stehen hier.", "Das Ende davon."]


def files(tmp_path, source, target):
    paths = tmp_path / "en.txt", tmp_path / "de.txt"
    for path, text in zip(paths, (source, target), strict=True):
        data = text if isinstance(text, bytes) else "".join(f"{t}\n" for t in text).encode()
        path.write_bytes(data)
    return paths


# ---- files of the user -----------------------------------------------------------------------


def test_parallel_files_and_tables_give_the_same_pairs(tmp_path):
    paths = files(tmp_path, [*ENGLISH[:2], "", ENGLISH[2]], [*GERMAN[:2], "", GERMAN[2]])
    found = read_parallel(*paths)
    assert [p[1:] for p in found] == list(zip(ENGLISH, GERMAN, strict=True))
    table = tmp_path / "both.tsv"
    lines = [f"{a}\t {b}" for a, b in zip(ENGLISH, GERMAN, strict=True)]
    table.write_bytes(("\ufeff" + "\r\n".join(lines)).encode())  # as Windows writes it
    assert [p[1:] for p in read_tsv(table)] == [p[1:] for p in found]


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (ENGLISH, GERMAN[:2], r"en.txt has 3 lines and .*de.txt has 2"),
        (ENGLISH, ["Ein Haus.", "  ", "Ende"], r"de.txt:2: the target is empty, .*'Two big trees"),
        ([ENGLISH[0], "", "c"], GERMAN, r"en.txt:2: the source is empty, .*'Zwei große"),
        (ENGLISH, b"Ein\nzwei\xff\ndrei\n", r"de.txt:2 is not UTF-8: byte 0xff.*iconv"),
        (["", ""], ["", ""], "there is no pair of sentences"),
        (ENGLISH, ENGLISH, "source and target are equal in 3 of 3 lines"),
        (["1", "2"], ["3", "4"], "no source has a letter in it"),
        (
            ["один дом", "two", "three", "four"],
            ["eins", "zwei", "drei", "vier"],
            r"of 4 source sentences 1 are not written in latin letters .* 'один дом'",
        ),
    ],
)
def test_mistakes_in_parallel_files_are_named(tmp_path, source, target, message):
    with pytest.raises(DataError, match=message):
        read_parallel(*files(tmp_path, source, target))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b\tc d\nno tab here\n", r"both.tsv:2 has 0 tabs: 'no tab here'"),
        ("a\tb\tc\n", r"both.tsv:1 has 2 tabs"),
        ("a b\tc d\n\te f\n", r"both.tsv:2: the source is empty"),
        ("a b\tc d\ne f\t\n", r"both.tsv:2: the target is empty"),
    ],
)
def test_mistakes_in_a_table_are_named(tmp_path, text, message):
    path = tmp_path / "both.tsv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_tsv(path)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_tsv(tmp_path / "nowhere.tsv")


def test_scripts():
    assert main_script("größer, 12!") == "LATIN"
    assert main_script("Дом №7 (IBM)") == "CYRILLIC"
    assert main_script("12 + 3") == ""


# ---- cleaning and dividing -------------------------------------------------------------------


def test_cleaning_counts_its_reasons():
    pairs = [
        Pair("d", "a small house", "ein kleines haus"),
        Pair("e", "a small house", "ein kleines haus"),
        Pair("d", "no change", "no change"),
        Pair("d", "one", "ein ding"),
        Pair("d", "w " * 61, "w " * 61 + "x"),
        Pair("d", "two words", "aber hier sind sieben worte zu viel"),
        Pair("d", "1 2", "3 4"),
    ]
    kept, counts = clean(pairs, Cleaning())
    assert kept == pairs[:1]
    assert counts == {"repeated": 1, "untranslated": 1, "length": 2, "ratio": 1, "letters": 1}
    assert statistics(kept)["source words (median)"] == 3


def corpus(documents=60, each=10):
    return [
        Pair(
            f"d{d}",
            f"sentence {'abcdefghij'[k]} of text number {'x' * d}",
            f"Satz {'abcdefghij'[k]} von Text Nummer {'x' * d}",
        )
        for d in range(documents)
        for k in range(each)
    ]


def test_held_out_documents_are_whole_and_do_not_leak():
    pairs = corpus()
    leaks = [Pair(f"d{d}", f"Shared sentence, {d}!", f"Gemeinsamer Satz Nummer {'x' * d}") for d in range(60)]
    division = divide([*pairs, *leaks], 0.1)
    held = dict.fromkeys(p.document for p in division.held_out)
    trained = dict.fromkeys(p.document for p in division.train)
    assert not held.keys() & trained.keys()
    assert 0.08 < len(division.held_out) / 660 < 0.12
    # "Shared sentence, 3!" is "shared sentence 0" but for digits: not one is trained on.
    assert division.leaking == 60 - len(held)
    assert not any(p.source.startswith("Shared") for p in division.train)
    assert divide([*pairs, *leaks], 0.1) == division
    # In an order of their own: the first ones are of several documents.
    assert len(dict.fromkeys(p.document for p in division.held_out[:10])) > 3


def test_too_few_documents_to_hold_out():
    with pytest.raises(DataError, match=r"of 10 pairs in 1 documents, .* 0 to train with and 10"):
        divide(corpus(1), 0.1)


# ---- Debian's texts --------------------------------------------------------------------------

PAGE = """<html><body><p>no id</p><h1 id="hd_1" dir="auto"><a name="x"></a>Saving &amp; more</h1>
<p id="par_2" class="paragraph">Click <b>Save</b>.<br>Then wait.</p>
<p id="par_3" class="code">x = 1</p><table><tr><td><p id="par_4">A cell</p></td></tr></table>
<p id="par_2">again</p><p id="other">not this</p><p id="par_5"> </p></body></html>"""


def test_paragraphs_of_a_help_page():
    assert debian_pairs.paragraphs(PAGE.encode()) == {
        "hd_1": "Saving & more",
        "par_2": "Click Save. Then wait.",
        "par_4": "A cell",
    }


LIST = """Package: libfoo2-dev
Description-md5: aa11
Description-en: library of foo
 It does foo. It is fast.
 .
 Features:
  * one thing
  * another thing
    over two lines

Package: bar
Description-md5: bb22
Description-en: bar
 Text."""
GERMAN_LIST = """Package: libfoo2-dev
Description-md5: aa11
Description-de: Bibliothek für Foo
 Macht Foo. Ist schnell.
 .
 Merkmale:
  * eine Sache
  * noch eine Sache
    über zwei Zeilen
"""


def test_descriptions_are_joined_and_divided(monkeypatch):
    lists = {"en": LIST, "de": GERMAN_LIST}
    monkeypatch.setattr(debian_pairs, "_translation_lists", lambda languages: lists)
    pages = {
        "libreoffice-help-en-us": [("x/text/a.html", PAGE.encode())],
        "libreoffice-help-de": [("y/text/a.html", PAGE.replace("A cell", "Eine Zelle").encode())],
    }
    monkeypatch.setattr(debian_pairs, "debian_files", lambda package, *_: pages[package])
    found = debian_pairs.debian_pairs("debian-en-de")
    assert Pair("help/a.html", "A cell", "Eine Zelle") in found
    described = [p[1:] for p in found if p.document == "description/foo"]
    assert described == [
        ("library of foo", "Bibliothek für Foo"),
        ("It does foo.", "Macht Foo."),
        ("It is fast.", "Ist schnell."),
        ("Features:", "Merkmale:"),
        ("one thing", "eine Sache"),
        ("another thing over two lines", "noch eine Sache über zwei Zeilen"),
    ]
    turned = debian_pairs.debian_pairs("debian-de-en")
    assert sorted((p.target, p.source) for p in turned) == sorted(p[1:] for p in found)


def test_sentences_are_paired_only_where_both_sides_have_as_many():
    found = list(debian_pairs.sentence_pairs("d", "One. Two.", "Eins und zwei."))
    assert found == [Pair("d", "One. Two.", "Eins und zwei.")]


def test_families_of_packages():
    names = {"libfoo2-dev": "foo", "foo-doc": "foo", "python3-numpy": "python-numpy", "4g8": "4g"}
    assert {n: debian_pairs.family(n) for n in names} == names


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (FileNotFoundError(), "fetched with apt-get, which is not installed.*files of your own"),
        (subprocess.TimeoutExpired("apt-get", 600), "took more than 600 s"),
        (100, "ended with status 100: no route to host"),
        (0, "brought no list of descriptions in en and de"),
    ],
)
def test_without_a_network_the_remedy_is_told(monkeypatch, fault, message):
    def broken(command, **_):
        assert command[:2] == ["apt-get", "update"]
        if isinstance(fault, Exception):
            raise fault
        return subprocess.CompletedProcess(command, fault, "", "no route to host\n")

    monkeypatch.setattr(debian_pairs, "_help_pairs", lambda *_: iter(()))
    monkeypatch.setattr(subprocess, "run", broken)
    with pytest.raises(DataError, match=message):
        debian_pairs.debian_pairs("debian-en-de")


# ---- BLEU ------------------------------------------------------------------------------------


def test_bleu():
    pytest.importorskip("sacrebleu")
    assert bleu(GERMAN, GERMAN).score == pytest.approx(100)
    low = bleu(["Ein Haus."] * 3, GERMAN)
    assert low.score < 20 and low.chrf < 60 and "tok:13a" in low.signature
    with pytest.raises(DataError, match="there are 1 translations and 3 references"):
        bleu(["Ein"], GERMAN)
