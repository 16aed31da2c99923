"""Masked tokens: the noise, crops and windows of sequences, and the task that is made of them."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from apps.esm2.masked import HeldOutMasks, unigram_losses
from apps.esm2.masking import Masking
from apps.esm2.sequences import Crops, Sequences, Windows, below, row_numbers
from apps.fetching import archives
from apps.fetching.debian import debian_files
from meshmpi.errors import ConfigError, DataError

PAD, MASK = 1, 9
RULE = Masking(MASK, (0, PAD, 2), 3, 6, PAD)


def rows(*lengths: int, seed: int = 0) -> Sequences:
    draw = np.random.default_rng(seed)
    return Sequences([np.concatenate([[0], draw.integers(3, 9, n), [2]]) for n in lengths])


# ---- noise -----------------------------------------------------------------------------------


def test_numbers_depend_on_seed_step_and_row_only():
    whole = row_numbers(5, 7, 3, 40)
    np.testing.assert_array_equal(row_numbers(5, 7, 3, 9), whole[:9])
    others = [row_numbers(*key, 40) for key in ((6, 7, 3), (5, 8, 3), (5, 7, 4), (-5, 7, 3))]
    assert len({a.tobytes() for a in (whole, *others)}) == 5
    found = below(row_numbers(0, 0, 0, 60_000), 6)
    assert np.abs(np.bincount(found) / 10_000 - 1).max() < 0.04


def test_shares_of_hidden_tokens():
    tokens = np.tile(np.arange(10, dtype=np.int32), (200, 50))
    seen, targets = RULE.apply(tokens, 3, 8)
    chosen = targets != PAD
    assert not chosen[np.isin(tokens, RULE.special)].any()
    np.testing.assert_array_equal(targets[chosen], tokens[chosen])
    np.testing.assert_array_equal(seen[~chosen], tokens[~chosen])
    usual = ~np.isin(tokens, RULE.special)
    assert chosen.sum() / usual.sum() == pytest.approx(0.15, abs=0.005)
    hidden, kept = seen[chosen] == MASK, seen[chosen] == tokens[chosen]
    # Number 9 is the mask itself and a random token equals the old one in a sixth of the cases.
    ordinary = tokens[chosen] != MASK
    assert hidden[ordinary].mean() == pytest.approx(0.8, abs=0.01)
    assert kept[ordinary].mean() == pytest.approx(0.1 + 0.1 / 6, abs=0.01)
    replaced = seen[chosen][~hidden & ~kept]
    assert set(replaced) == set(range(3, 9))


def test_a_block_of_rows_sees_the_noise_of_the_whole():
    tokens = np.full((7, 33), 5, np.int32)
    whole = RULE.apply(tokens, 1, 2)
    for first, last in ((0, 3), (3, 7), (4, 4)):
        part = RULE.apply(tokens[first:last], 1, 2, (first, last))
        for a, b in zip(part, whole, strict=True):
            np.testing.assert_array_equal(a, b[first:last])
    assert (RULE.apply(tokens, 1, 3)[1] != whole[1]).any()


@pytest.mark.parametrize(
    "options", [{"share": 0.0}, {"share": 1.5}, {"masked": 0.8, "replaced": 0.3}, {"masked": -0.1}]
)
def test_shares_that_are_none(options):
    with pytest.raises(ConfigError, match="masking"):
        Masking(MASK, (), 3, 6, PAD, **options)


# ---- sequences -------------------------------------------------------------------------------


def test_crops_are_parts_of_sequences_and_blocks_of_the_batch():
    found = rows(4, 30, 9, 55)
    crops = Crops(found, 64, 12, PAD, seed=3)
    whole = crops.block(5)
    texts = [
        bytes(found.tokens[a:b].astype(np.uint8)) for a, b in zip(found.starts[:-1], found.starts[1:], strict=True)
    ]
    for row in whole:
        real = row[row != PAD]
        assert any(bytes(real.astype(np.uint8)) in t for t in texts)
        assert len(real) in (6, 11, 12)
        assert (row[len(real) :] == PAD).all()
    np.testing.assert_array_equal(crops.block(5, (10, 13)), whole[10:13])
    assert (crops.block(6) != whole).any()


def test_sequences_are_drawn_by_their_length():
    found = rows(8, 98)  # 10 and 100 tokens
    drawn = Crops(found, 3000, 20, PAD).block(0)
    short = (drawn[:, 10:] == PAD).all(axis=1)
    assert short.mean() == pytest.approx(10 / 110, abs=0.02)
    assert Crops(found, 1, 20, PAD).padding_share() == pytest.approx(10 / 110 * 0.5)


def test_windows_show_every_token_once():
    found = rows(4, 30, 9, 55)
    windows = Windows(found, 4, 12, PAD)
    shown = [windows.block(k) for k in range(windows.batches)]
    cells = np.concatenate(shown)
    np.testing.assert_array_equal(cells[cells != PAD], found.tokens)
    assert windows.count == 1 + 3 + 1 + 5 and windows.batches == 3
    np.testing.assert_array_equal(windows.block(1, (1, 3)), shown[1][1:3])
    few = Windows(found, 4, 12, PAD, limit=3)
    assert few.count == 3 and few.batches == 1


def test_sequences_that_are_none():
    with pytest.raises(DataError, match="there is no sequence"):
        Sequences([])
    with pytest.raises(DataError, match="sequence 1 is empty among 2"):
        Sequences([np.ones(3), np.ones(0)])


# ---- held-out measures -----------------------------------------------------------------------


def test_the_baseline_is_that_of_the_frequencies():
    train = Sequences([np.array([0, 3, 3, 4, 2])])
    losses = unigram_losses(train, 6, (0, 1, 2))
    # Counts 2, 1, 0 of tokens 3, 4, 5, and one for each of them.
    np.testing.assert_allclose(losses[3:], -np.log(np.array([3, 2, 1]) / 6))
    assert np.isinf(losses[:3]).all()


def test_held_out_tokens_are_hidden_alike_and_by_the_mask_only():
    found, baseline = rows(40, 50, 20), np.arange(10.0)
    masks = [HeldOutMasks(Windows(found, 3, 16, PAD), RULE, baseline) for _ in range(2)]
    total, loss = 0, 0.0
    for index in range(masks[0].batches):
        held = {"held_out_tokens": None}
        first, second = (m.feeds(index, held) for m in masks)
        np.testing.assert_array_equal(first["held_out_tokens"], second["held_out_tokens"])
        seen, targets = first["held_out_tokens"], first["held_out_targets"]
        assert ((targets != PAD) == (seen == MASK)).all()
        total, loss = total + (targets != PAD).sum(), loss + baseline[targets[targets != PAD]].sum()
        block = masks[0].feeds(index, {"held_out_tokens": ((1, 3), (4, 9))})
        for name, value in block.items():
            np.testing.assert_array_equal(value, first[name][1:3, 4:9])
    assert (masks[0].hidden, masks[0].seen) == (total, len(found.tokens))
    assert masks[0].baseline_loss == pytest.approx(loss)
    with pytest.raises(DataError, match="none is hidden"):
        HeldOutMasks(Windows(Sequences([np.array([0, 2])]), 1, 8, PAD), RULE, baseline)


# ---- packages --------------------------------------------------------------------------------


def package(members: dict[str, bytes], name: bytes = b"data.tar.xz") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as tar:
        for path, data in members.items():
            info = tarfile.TarInfo(path)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    out = b"!<arch>\n"
    for key, data in ((b"debian-binary", b"2.0"), (name, packed.getvalue())):
        header = key.ljust(16) + b"0".ljust(12) + b"0".ljust(6) + b"0".ljust(6) + b"644".ljust(8)
        out += header + str(len(data)).encode().ljust(10) + b"`\n" + data + b"\n" * (len(data) % 2)
    return out


def fetching(monkeypatch, archive: bytes) -> list[list[str]]:
    seen: list[list[str]] = []

    def run(command, cwd, **_):
        seen.append(list(command))
        Path(cwd, "some_1_all.deb").write_bytes(archive)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(archives.subprocess, "run", run)
    return seen


def test_files_of_a_debian_package(monkeypatch):
    archive = package({"./usr/share/b.txt": b"two", "./usr/share/a.txt": b"one", "./c.md": b"x"})
    seen = fetching(monkeypatch, archive)
    assert debian_files("some", r"\.txt$") == [("./usr/share/a.txt", b"one"), ("./usr/share/b.txt", b"two")]
    assert seen == [["apt-get", "download", "--quiet", "some"]]


@pytest.mark.parametrize(
    ("archive", "sha256", "message"),
    [
        (b"no package", "", "not a whole package"),
        (package({"a": b"x"})[:90], "", "not a whole package"),
        (package({"a": b"x"}, b"other.tar.xz"), "", "not a whole package"),
        (package({"a": b"x"}), "0" * 64, "damaged or has changed"),
    ],
)
def test_damaged_packages(monkeypatch, archive, sha256, message):
    fetching(monkeypatch, archive)
    with pytest.raises(DataError, match=message):
        debian_files("some", "a", sha256)
