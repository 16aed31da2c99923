"""Attacks by archives that are fetched, arrays, token files and lists of texts."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from apps.fetching import archives
from apps.transformer import corpora as texts
from meshmpi.transformer.pretrained.lines import Reader
from meshmpi.transformer.training.sealed import Sealed, seal
from meshmpi.transformer.translation.pairs import file_lines
from tests.security.document_attacks import gained_by, limited
from tests.security.registry import Scene, attack


def _archive(**files: bytes) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


@attack()
def an_archive_of_another_package_is_fetched(scene: Scene) -> str:
    """An archive whose checksum is wrong is opened before that is found."""
    archive = _archive(a=b"x")
    scene.patch.setattr(archives.urllib.request, "urlopen", lambda *_, **__: io.BytesIO(archive))
    opened: list[object] = []
    scene.patch.setattr(archives.tarfile, "open", lambda *a, **k: opened.append(a))
    return gained_by(texts._shakespeare) or ("it was opened" if opened else "")


@attack()
def building_a_package_is_part_of_fetching_it(scene: Scene) -> str:
    """A text is fetched by a client that runs the package's own build code."""
    ran: list[object] = []
    scene.patch.setattr(archives.subprocess, "run", lambda command, **_: ran.append(command))
    scene.patch.setattr(archives.urllib.request, "urlopen", lambda *_, **__: io.BytesIO(_archive(a=b"x")))
    return gained_by(texts._shakespeare) or (f"{ran} was run" if ran else "")


@attack()
def scripts_of_a_package_are_run(scene: Scene) -> str:
    """npm is called without being told to leave scripts alone."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> None:
        ran.append(command)
        raise FileNotFoundError

    scene.patch.setattr(archives.subprocess, "run", run)
    gained = gained_by(texts._sotu)
    return gained or ("" if "--ignore-scripts" in ran[0] else f"{ran[0]}")


@attack()
def an_archive_unpacks_to_more_than_memory(scene: Scene) -> str:
    """Zeros that pack well are read until memory is gone."""
    scene.patch.setattr(archives, "MOST_UNPACKED_BYTES", 1 << 20)
    bomb = _archive(a=bytes(64 << 20))
    return gained_by(lambda: archives.archive_members(bomb, "a"))


@attack()
def an_archive_is_cut(scene: Scene) -> str:
    """The end of a compressed stream is missing."""
    whole = _archive(a=os.urandom(9999))
    return gained_by(lambda: archives.archive_members(whole[:-2000], "a"))


@attack()
def an_archive_has_links_and_names_above(scene: Scene) -> str:
    """A member is written outside, or a link in the archive is followed."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        link = tarfile.TarInfo("a_link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        above = tarfile.TarInfo("../a_file")
        above.size = 1
        tar.addfile(above, io.BytesIO(b"x"))
    scene.patch.chdir(scene.folder)
    found = archives.archive_members(data.getvalue(), "a_")
    outside = (scene.folder.parent / "a_file").exists()
    return "" if found == [("../a_file", b"x")] and not outside else f"{found}, {outside}"


def _npy_row(name: str, data: bytes) -> None:
    def attempt(scene: Scene) -> str:
        from meshmpi.files import plain

        try:
            with limited():
                return f"it was taken: {plain.parse_npy(data)}"
        except ValueError:
            return ""

    attempt.__name__ = f"an_array_{name}"
    attempt.__doc__ = f"A .npy file that {name}."
    attack()(attempt)


def _npy(header: str) -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(24)


class _Planted:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("planted",)


_SAYS = "{'descr': '<f8', 'fortran_order': False, 'shape': (%s,)}"
_OBJECTS = _npy("{'descr': '|O', 'fortran_order': False, 'shape': (3,)}")[:-24]
for _name, _data in {
    "is_larger_than_its_file": _npy(_SAYS % (1 << 50)),
    "has_a_negative_size": _npy(_SAYS % -3),
    "has_a_size_of_words": _npy(_SAYS % "'x'"),
    "has_code_for_a_header": _npy("__import__('os').mkdir('planted')"),
    "holds_a_pickle": _OBJECTS + pickle.dumps([_Planted()]),
    "has_no_header": b"\x93NUMPY\x01\x00",
    "is_no_array": b"GIF89a",
    "is_of_version_9": b"\x93NUMPY\x09\x00" + bytes(90),
}.items():
    _npy_row(_name, _data)


@attack()
def tokens_are_changed(scene: Scene) -> str:
    """A token file with another token is trained on."""
    folder = scene.folder / "tokens"
    folder.mkdir()
    np.arange(9, dtype=np.uint8).tofile(folder / "train.bin")
    seal(folder)
    (folder / "train.bin").write_bytes(bytes(9))
    return gained_by(lambda: Sealed(folder).array("train.bin", "uint8")[2:4])


@attack()
def a_token_file_is_a_link(scene: Scene) -> str:
    """A link in a folder of tokens is followed."""
    folder = scene.folder / "tokens"
    folder.mkdir()
    (folder / "train.bin").write_bytes(bytes(9))
    seal(folder)
    (folder / "train.bin").rename(scene.folder / "other")
    (folder / "train.bin").symlink_to(scene.folder / "other")
    return gained_by(lambda: Sealed(folder).array("train.bin", "uint8"))


@attack()
def prompts_are_a_pipe(scene: Scene) -> str:
    """Reading prompts waits for a writer."""
    path = scene.folder / "prompts"
    os.mkfifo(path)
    return gained_by(lambda: Reader(None, 9, 9).read(path))


@attack()
def sentences_are_a_device(scene: Scene) -> str:
    """Sentences are read from a device without end."""
    return gained_by(lambda: file_lines(Path("/dev/zero")))
