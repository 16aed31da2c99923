"""The protein app: files read strictly, scores and embeddings the same in every layout and as
transformers has them, one copy of the weights, plans of the largest model; no download.
"""

from __future__ import annotations

import gzip
import math
import time
from pathlib import Path

import numpy as np
import pytest

import meshmpi as mm
from apps.esm2 import embedding, fasta, layouts, models, planning, proteins, scoring, similarity
from apps.esm2.__main__ import main
from apps.esm2.alphabet import CLS, EOS, MASK, PAD, RESIDUES, TOKENS, UNKNOWN, letters, numbers
from apps.esm2.inference import Inference, residue_losses, residue_vectors, sums_of_vectors
from apps.esm2.rows import batches, bucket, windows
from meshmpi.errors import ConfigError, DataError

TINY = models.esm2("8M", 64, layers=2, d_model=24, d_ff=40, heads=3, d_kv=8, dtype="float64")
MESHES = [
    ("replicated", "all:1"),
    ("replicated", "all:3"),
    ("megatron", "all:4"),
    ("2d", "rows:3;cols:2"),
    ("2d", "rows:1;cols:3"),
]


def protein(n: int, seed: int) -> str:
    """Random residues of our own making."""
    return "".join(np.random.default_rng(seed).choice(list(RESIDUES[:20]), n))


def written(path: Path, sequences: dict[str, str], width: int = 60) -> Path:
    lines = []
    for name, text in sequences.items():
        lines += [f">{name} made up", *(text[k : k + width] for k in range(0, len(text), width))]
    path.write_text("\n".join(lines) + "\n")
    return path


SEQUENCES = {"a": protein(23, 1), "b": protein(5, 2), "c": protein(70, 3), "d": protein(16, 4)}


@pytest.fixture
def file(tmp_path) -> Path:
    return written(tmp_path / "some.fasta", SEQUENCES)


# ---- alphabet and files ------------------------------------------------------------------------


def test_the_alphabet_is_that_of_the_checkpoints():
    assert len(TOKENS) == len(set(TOKENS)) == 33
    assert (CLS, PAD, EOS, UNKNOWN, MASK) == (0, 1, 2, 3, 32)
    wanted = {
        "L": 4,
        "A": 5,
        "S": 8,
        "R": 10,
        "W": 22,
        "C": 23,
        "X": 24,
        "B": 25,
        "U": 26,
        "Z": 27,
        "O": 28,
        ".": 29,
        "-": 30,
    }
    assert {k: TOKENS.index(k) for k in wanted} == wanted
    assert letters(numbers(RESIDUES)) == RESIDUES
    with pytest.raises(ValueError, match="'J' at position 3"):
        numbers("MKJ")


def test_records_of_a_file(tmp_path):
    path = tmp_path / "x.fasta"
    path.write_text("\n>one  first of all\r\nMKV\nLLA\n\n>two\nGXB\n")
    found = fasta.read(path)
    assert found == [fasta.Record("one", "MKVLLA", 2), fasta.Record("two", "GXB", 6)]
    packed = tmp_path / "x.fasta.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert fasta.read(packed) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no record"),
        ("\n\n", "has no record"),
        ("MKV\n>a\nMKV\n", r":1: letters come before the first header"),
        (">a\nMKV\n>\nMKV\n", r":3: the header has no name"),
        (">a\n>b\nMKV\n", r":1: record 'a' has no letters"),
        (">a\nMKV\n>b\n\n", r":3: record 'b' has no letters"),
        (">a\nMKV\n>b\nMK\n>a x\nMKV\n", r":5: the name 'a' is that of line 1 too"),
        (">a\nMKV\nMJV\n", r":3: letter 'J' \(column 2\) is not an amino acid"),
        (">a\nMKVmkv\n", r":2: letter 'm' \(column 4\) is lower-case"),
        (">a\nMKV*\n", r":2: letter '\*' \(column 4\) marks a stop codon"),
        (">a\nMK-V\n", r":2: letter '-' \(column 3\) is a gap"),
        (">a\nMK.V\n", r":2: letter '.' \(column 3\) is a gap"),
        (">a\nMK V\n", r":2: letter ' ' \(column 3\) is not an amino acid"),
        (">a\nMK3V\n", r":2: letter '3' \(column 3\) is not an amino acid"),
        (">a\nMKV>b\n", r":2: letter '>' \(column 4\) is inside a line"),
        (">a\nMKV\n>b\n" + "ACGT" * 8 + "\n", r":3: record 'b' .* A, C, G, T only, so it is DNA"),
        (">a\n" + "ACGUN" * 8 + "\n", r":1: record 'a' .* DNA or RNA"),
    ],
)
def test_files_that_are_no_proteins(tmp_path, text, message):
    path = tmp_path / "bad.fasta"
    path.write_text(text)
    with pytest.raises(DataError, match=f"bad.fasta.*{message}"):
        fasta.read(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="none.fasta cannot be read: No such file"):
        fasta.read(tmp_path / "none.fasta")
    binary, packed = tmp_path / "b.fasta", tmp_path / "c.fasta.gz"
    binary.write_bytes(b">a\nMKV\nM\xffK\n")
    with pytest.raises(DataError, match=r"b.fasta:3: byte 0xff is not text"):
        fasta.read(binary)
    for data in (b"no archive", gzip.compress(b">a\nMKV\n" * 99)[:-20]):
        packed.write_bytes(data)
        with pytest.raises(DataError, match="c.fasta.gz is a damaged archive"):
            fasta.read(packed)


def test_unknown_letters_may_be_read_as_x(tmp_path):
    path = tmp_path / "odd.fasta"
    path.write_text(">a\nmkJ-V*\n>short\nACGT\n")
    assert [r.sequence for r in fasta.read(path, unknown_as_x=True)] == ["MKXXV", "ACGT"]


# ---- families ----------------------------------------------------------------------------------


def relatives(text: str, share: float, seed: int) -> str:
    """A sequence of which a share of the residues is another."""
    draw = np.random.default_rng(seed)
    other = draw.choice(list(RESIDUES[:20]), len(text))
    return "".join(np.where(draw.random(len(text)) < share, other, list(text)))


FAMILIES = {
    f"{name}{k}": relatives(protein(n, seed), 0.1, k) + protein(k, 90 + k)
    for name, n, seed in (("p", 150, 5), ("q", 80, 6), ("r", 200, 7))
    for k in range(4)
} | {f"single{k}": protein(60, 20 + k) for k in range(30)}


def test_links_are_those_of_counting_words(monkeypatch):
    monkeypatch.setattr(similarity, "_ROWS", 7)
    lists = [similarity.words(numbers(s)) for s in FAMILIES.values()]
    for found, text in zip(lists, FAMILIES.values(), strict=True):
        assert len(found) == len({text[k : k + 5] for k in range(len(text) - 4)})
    wanted = set()
    for a in range(len(lists)):
        for b in range(a + 1, len(lists)):
            shared = len(set(lists[a].tolist()) & set(lists[b].tolist()))
            if shared >= max(6, 0.03 * min(len(lists[a]), len(lists[b]))):
                wanted.add((a, b))
    assert set(similarity.links(lists)) == wanted and len(wanted) >= 18


def test_families_are_held_out_as_a_whole():
    names = list(FAMILIES)
    family = similarity.families([numbers(s) for s in FAMILIES.values()])
    assert family.tolist() == [k // 4 * 4 for k in range(12)] + list(range(12, 42))
    chosen = similarity.held_out(names, family, 0.3)
    assert 12 <= chosen.sum() <= 13
    assert all(len(set(chosen[family == f])) == 1 for f in family)
    large = similarity.held_out(names, np.zeros(42, int), 0.3)
    assert not large.any()  # one family only: all of it is trained on
    assert similarity.words(numbers("MKVL")).tolist() == []
    assert similarity.families([numbers("MKV"), numbers("MKV")]).tolist() == [0, 1]


def test_proteins_of_a_file_are_divided(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path / "cache"))
    path = written(tmp_path / "f.fasta", FAMILIES)
    for _ in range(2):  # the second time families come from the cache
        found = proteins.load(str(path), 0.3)
        assert found.families == 33 and len(found.sequences) == 42
        assert 12 <= found.held_out.sum() <= 13
        monkeypatch.setattr(similarity, "families", None)
    with pytest.raises(DataError, match="0 would be held out"):
        proteins.load(str(path), 0.0)


def test_a_package_that_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path))
    monkeypatch.setattr(proteins, "debian_files", lambda *_, **__: [("DB.fasta.gz", b"x")])
    with pytest.raises(DataError, match="damaged or has changed: checksum 2d711642b726.. of 1"):
        proteins.fetched()
    monkeypatch.setattr(proteins, "debian_files", lambda *_, **__: [])
    with pytest.raises(DataError, match="of 0 bytes"):
        proteins.fetched()


# ---- rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [2, 3, 7, 10, 30])
@pytest.mark.parametrize("n", [31, 32, 45, 100])
def test_windows_keep_every_residue_once(n, window):
    record = fasta.Record("x", protein(n, n), 1)
    whole = [CLS, *numbers(record.sequence), EOS]
    kept = np.zeros(n, int)
    for w in windows([record], 32, window):
        kept[w.kept[0] : w.kept[1]] += 1
        assert w.tokens.tolist() == whole[w.first + 1 : w.first + 1 + len(w.tokens)]
        assert len(w.tokens) <= window + 2 and w.sequence == 0
        assert w.tokens[w.columns()].tolist() == whole[w.kept[0] + 1 : w.kept[1] + 1]
    assert (kept == 1).all()


def test_short_sequences_are_one_row_each():
    found = windows([fasta.Record("x", protein(30, 1), 1)], 32, 10)
    assert len(found) == 1 and found[0].tokens[0] == CLS and found[0].tokens[-1] == EOS


def test_sequences_that_are_too_long():
    records = [fasta.Record("x", "MKV", 1), fasta.Record("long", protein(31, 1), 7)]
    with pytest.raises(DataError, match="some:7: record 'long' has 31 residues, but at most 30"):
        windows(records, 32, 0, "some")
    for window in (1, 31):
        with pytest.raises(DataError, match=f"--window is {window} residues.*2 to 30"):
            windows(records, 32, window)


def test_buckets_waste_a_quarter_at_most():
    found = {n: bucket(n) for n in range(1, 5000)}
    assert all(n <= b and (b == 16 or b <= 1.25 * n) for n, b in found.items())
    assert len(set(found.values())) < 40 and found[1024] == 1024


def test_batches_hold_every_row_once():
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 90, 200).tolist()
    seen = []
    for batch in batches(lengths, lambda k: np.full(lengths[k], 5), tokens=500, multiple=3):
        assert batch.tokens.shape[0] % 3 == 0
        assert batch.tokens.size <= 500 + 3 * batch.tokens.shape[1]
        for line, k in zip(batch.tokens, batch.rows, strict=False):
            assert (line[: lengths[k]] == 5).all() and (line[lengths[k] :] == PAD).all()
        for line in batch.tokens[len(batch.rows) :]:
            assert line[0] == CLS and (line[1:] == PAD).all()
        seen += batch.rows
    assert sorted(seen) == list(range(200))
    (first, second) = batches([16] * 33, lambda k: np.full(16, 5), tokens=512)
    assert first.tokens.shape == second.tokens.shape == (17, 16) and len(second.rows) == 16
    assert [lengths[k] for k in seen[:3]] == sorted(lengths)[-3:][::-1]


# ---- scores and embeddings -----------------------------------------------------------------------


def records() -> list[fasta.Record]:
    return [fasta.Record(name, text, 1) for name, text in SEQUENCES.items()]


def inference(name: str, mesh: str, build, config=TINY, fill=lambda variables: None) -> Inference:
    splits = layouts.splits(name, 0, mesh)
    return Inference(config, mm.SimulatedMesh(mesh), splits, build, fill)


def scored(name: str, mesh: str, share=None, window=0, config=TINY, **options):
    parts = windows(records(), 80 if not window else 48, window)
    run = inference(name, mesh, residue_losses, config, **options)
    return scoring.score(records(), parts, run, 256, share, 2), run


@pytest.fixture(scope="module")
def reference():
    return [s.residues for s in scored("replicated", "all:1")[0]]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "mesh"), MESHES[1:])
def test_scores_are_the_same_in_every_layout(name, mesh, reference):
    found, run = scored(name, mesh)
    for s, want in zip(found, reference, strict=True):
        np.testing.assert_allclose(s.residues, want, rtol=1e-9, atol=1e-9)
        assert s.perplexity == pytest.approx(math.exp(-want.mean()))
    assert run.tokens == sum((len(s) + 2) * len(s) for s in SEQUENCES.values())
    assert "in collectives" in run.report()


def test_a_share_hides_every_residue_once():
    one, run = scored("replicated", "all:1", share=0.3)
    # Of four rows of 'a', those that hide residues 0, 4, 8 ... score what they score alone.
    text = SEQUENCES["a"]
    row = np.array([[CLS, *numbers(text), EOS]], np.int32)
    seen, targets = row.copy(), np.full_like(row, PAD)
    seen[0, 1:-1:4], targets[0, 1:-1:4] = MASK, row[0, 1:-1:4]
    (batch,) = batches([len(row[0])], lambda k: seen[0], 1)
    padded = np.full(batch.tokens.shape, PAD, np.int32)
    padded[:, : row.shape[1]] = targets
    alone = run(batch, targets=padded)[0, 1 : 1 + len(text) : 4]
    np.testing.assert_allclose(one[0].residues[::4], -alone, rtol=1e-9)
    assert all(np.isfinite(s.residues).all() for s in one)
    assert [scoring.rounds(s) for s in (None, 1.0, 0.5, 0.3, 0.1)] == [None, 1, 2, 4, 10]
    for share in (0, 1.01, -1, math.nan):
        with pytest.raises(ConfigError, match="--masked-share"):
            scoring.rounds(share)


@pytest.mark.parametrize(("name", "mesh"), MESHES[3:4])
def test_windows_score_as_their_rows_do(name, mesh):
    whole = [s.residues for s in scored("replicated", "all:1", 0.5, 40)[0]]
    for s, want in zip(scored(name, mesh, 0.5, 40)[0], whole, strict=True):
        np.testing.assert_allclose(s.residues, want, rtol=1e-9, atol=1e-9)


def embedded(name: str, mesh: str) -> tuple[np.ndarray, np.ndarray]:
    parts = windows(records(), 48, 40)
    vectors, starts = embedding.per_residue(records(), parts, inference(name, mesh, residue_vectors), 256, 2)
    means = embedding.means(records(), parts, inference(name, mesh, sums_of_vectors), 256, 2)
    pooled = np.add.reduceat(vectors, starts[:-1]) / np.diff(starts)[:, None]
    np.testing.assert_allclose(means, pooled, rtol=1e-5, atol=1e-6)
    return vectors, means


@pytest.fixture(scope="module")
def vectors():
    return embedded("replicated", "all:1")


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "mesh"), MESHES[2:4])
def test_embeddings_are_the_same_in_every_layout(name, mesh, vectors):
    for found, want in zip(embedded(name, mesh), vectors, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-6)
    assert vectors[0].shape == (sum(map(len, SEQUENCES.values())), 24)


# ---- one copy of the weights -------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "ranks", "mesh"),
    [("2d", 2, ""), ("2d", 4, ""), ("2d", 4, "rows:4;cols:1"), ("megatron", 2, ""), ("megatron", 4, "")],
)
def test_weights_are_held_once(name, ranks, mesh):
    config = models.esm2("8M")
    splits = layouts.splits(name, ranks, mesh)
    planned = planning.planned(config, splits, 4, 32, "score")
    found = planning.weights(planned.program)
    assert found.total == 4 * models.weight_count(config)
    assert found.split_held == found.split > 0.95 * found.total
    assert max(found.by_rank) <= 1.02 * found.total / ranks
    assert sum(found.by_rank) <= 1.02 * found.total
    run = Inference(config, mm.SimulatedMesh(splits.mesh), splits, residue_losses, lambda v: None)
    (batch,) = batches([16] * 4, lambda k: np.full(16, 5, np.int32), 64, 4)
    run(batch, targets=np.full((4, 16), PAD, np.int32))
    assert list(run.held_weights().values()) == found.by_rank


def test_layouts_that_do_not_fit():
    assert layouts.splits("2d", 8).mesh == "rows:2;cols:4"
    assert layouts.splits("2d", 6).mesh == "rows:2;cols:3"
    with pytest.raises(ConfigError, match="no layout 'megatrn'.*Did you mean 'megatron'"):
        layouts.splits("megatrn", 2)
    for name, mesh in (("2d", "all:4"), ("megatron", "rows:2;cols:2")):
        with pytest.raises(ConfigError, match=f"layout '{name}' on the mesh"):
            layouts.splits(name, 4, mesh)


def test_every_size_has_as_many_weights_as_its_formula():
    published = {"8M": 7.5e6, "35M": 33.5e6, "150M": 148e6, "650M": 651e6, "3B": 2.84e9, "15B": 15.1e9}
    assert list(published) == list(models.SIZES)
    for size, about in published.items():
        assert models.weight_count(models.esm2(size)) == pytest.approx(about, rel=0.01)
    with pytest.raises(ConfigError, match="no ESM2 of size '7B'"):
        models.esm2("7B")


@pytest.mark.parametrize("name", ["2d", "megatron"])
def test_the_largest_model_is_planned_without_weights(name, capsys):
    began = time.process_time()
    assert main(["plan", "--size", "15B", "--ranks", "8", "--layout", name]) == 0
    assert time.process_time() - began < 30  # seconds; it takes 2 to 8
    text = capsys.readouterr().out
    count = models.weight_count(models.esm2("15B"))
    assert count == 15_129_098_273
    assert f"{count:,} parameters by formula; {count:,} in the program" in text
    on_a_rank = int(text.split("on a rank ")[1].split(" (")[0].replace(",", ""))
    assert 4 * count / 8 <= on_a_rank <= 1.02 * 4 * count / 8
    assert int(text.split("took ")[1].split(" MB")[0]) < 2000
