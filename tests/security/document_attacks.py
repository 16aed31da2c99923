"""Attacks by files: what a checkpoint, a tokenizer, a configuration or an archive may say or be.

An attack succeeds when a reader waits, takes memory for what is not there, leaves its folder, runs
code, or fails with anything but an error of ours.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import socket
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import meshmpi as mm
from meshmpi import checkpoint
from meshmpi.checkpoint.manifest import digest
from meshmpi.checkpoint.tensor_header import make_header
from meshmpi.checkpoint.tools import read_whole
from meshmpi.errors import MeshmpiError
from meshmpi.guard import status
from meshmpi.planner.machine_file import load_machine
from meshmpi.runtime.trace import read_trace
from meshmpi.training.compare import read_run
from meshmpi.transformer.pretrained import files
from meshmpi.transformer.pretrained.files import Checkpoint
from meshmpi.transformer.pretrained.model import open_model
from meshmpi.transformer.text.vocabulary import load_vocabulary, open_tokenizer
from meshmpi.transformer.training import config
from meshmpi.transformer.training.sealed import Sealed
from meshmpi.transformer.training.settings import Settings
from tests.security.registry import Scene, attack

SECONDS, MOST_BYTES = 5, 256 << 20
"""What a reader may take of a hostile file: it looks at it, and says no."""
DEEP = "[" * 100_000


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Ends what waits."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def gained_by(read: Callable[[], object]) -> str:
    """What an attacker gains where our code reads his file."""
    tracemalloc.start()
    try:
        with limited():
            found = read()
        gained = f"it was taken: {str(found)[:80]}"
    except MeshmpiError as error:
        gained = "" if error.remedy else f"no remedy: {error}"
    except TimeoutError:
        gained = f"the reader waited {SECONDS} s"
    except BaseException as error:
        gained = f"a foreign {type(error).__name__}: {error}"
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if not gained and peak > MOST_BYTES:
        gained = f"{peak:,} bytes were taken"
    return gained


# ---- what stands where a file should ---------------------------------------------------------


def _socket(path: Path) -> None:
    # The name of a socket is short; so it is made from within its folder.
    here = os.getcwd()
    os.chdir(path.parent)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind(path.name)
    os.chdir(here)


def _endless(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 42)


def _text(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


HOSTILE: dict[str, Callable[[Path], Any]] = {
    "a_pipe": os.mkfifo,
    "a_folder": Path.mkdir,
    "a_socket": _socket,
    "a_link_to_zeros": lambda path: path.symlink_to("/dev/zero"),
    "a_link_to_itself": lambda path: path.symlink_to(path.name),
    "a_file_of_4_terabytes": _endless,
    "nothing": _text(""),
    "deep_nesting": _text(DEEP),
    "deep_tables": _text("v = " + DEEP),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "a_long_number": _text('{"a": ' + "9" * 5000 + "}"),
    "a_name_twice": _text('{"model_type": "gpt2", "model_type": "t5", "kind": 1, "kind": 2}'),
    "a_list": _text("[1, 2, 3]"),
    "a_table_of_wrong_types": _text('{"kind": [], "model_type": {}, "weight_map": {"a": 3}, "seen": 1, "model": 3}'),
}


def _status(path: Path) -> object:
    return status.read(path.parents[1])


def _index(path: Path) -> object:
    return Checkpoint(path)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a_manifest": ("manifest.json", lambda p: checkpoint.read_manifest(p.parent)),
    "safetensors": ("model.safetensors", Checkpoint),
    "an_index": ("model.safetensors.index.json", _index),
    "a_model_config": ("config.json", lambda p: open_model(p.parent)),
    "a_tokenizer": ("tokenizer.json", lambda p: open_tokenizer(p.parent)),
    "a_vocabulary": ("vocabulary.json", load_vocabulary),
    "a_machine": ("machine.toml", load_machine),
    "a_configuration": ("run.toml", lambda p: config.load(Settings, p)),
    "a_status": (f"{status.FOLDER}/rank-00000.json", _status),
    "settings_of_a_run": ("settings.json", lambda p: read_run(p.parent)),
    "hashes_of_tokens": ("hashes.json", lambda p: Sealed(p.parent)),
    "a_trace": ("trace.json.gz", read_trace),
    "data": ("x.npy", lambda p: mm.data.reader({"x": p}, batch=1)),
    "tokens": ("tokens.bin", lambda p: mm.data.tokens(p, batch=1, length=4, dtype="float32")),
}


FINE = {("nothing", "a_configuration"), ("a_table_of_wrong_types", "settings_of_a_run")}
"""An empty configuration is all defaults; settings of other runs are only shown."""


def _row(hostile: str, reader: str) -> None:
    name, read = READERS[reader]

    def attempt(scene: Scene) -> str:
        path = scene.folder / "place" / name
        path.parent.mkdir(parents=True)
        HOSTILE[hostile](path)
        return gained_by(lambda: read(path))

    attempt.__name__ = f"{hostile}_in_place_of_{reader}"
    attempt.__doc__ = f"{hostile} where {reader} should be: {__doc__.splitlines()[2]}"
    attack()(attempt)


for _hostile in HOSTILE:
    for _reader in READERS:
        if (_hostile, _reader) not in FINE:
            _row(_hostile, _reader)


# ---- traces ------------------------------------------------------------------------------------

_EVENT = {"name": "contract", "ph": "X", "pid": 0, "tid": 0, "dur": 1.0, "args": {"step": 0, "tensor": "y"}}
TRACES: dict[str, object] = {
    "without_events": {"traceEvents": []},
    "of_numbers": {"traceEvents": [1, 2]},
    "without_a_table": [_EVENT],
    "of_an_endless_rank": {"traceEvents": [{**_EVENT, "pid": float("inf")}]},
    "of_an_endless_call": {"traceEvents": [{**_EVENT, "dur": float("inf")}]},
    "of_no_time": {"traceEvents": [{**_EVENT, "dur": float("nan")}]},
    "of_time_that_runs_back": {"traceEvents": [{**_EVENT, "dur": -1.0}]},
    "of_a_list_as_rank": {"traceEvents": [{**_EVENT, "pid": [0]}]},
    "of_text_about_a_call": {"traceEvents": [{**_EVENT, "args": "y"}]},
    "of_other_calls_later": {"traceEvents": [_EVENT, {**_EVENT, "pid": 1, "name": "map"}]},
}


def _trace_row(name: str) -> None:
    def attempt(scene: Scene) -> str:
        path = scene.folder / "trace.json"
        path.write_text(json.dumps(TRACES[name]))
        return gained_by(lambda: read_trace(path))

    attempt.__name__ = f"a_trace_{name}"
    attempt.__doc__ = f"A trace {name}: {__doc__.splitlines()[2]}"
    attack()(attempt)


for _trace in TRACES:
    _trace_row(_trace)


@attack()
def a_trace_that_unpacks_without_end(scene: Scene) -> str:
    """A small file takes all memory."""
    path, packer = scene.folder / "trace.json.gz", zlib.compressobj(9, wbits=31)
    path.write_bytes(packer.compress(b" " * (512 << 20)) + packer.flush())
    return gained_by(lambda: read_trace(path))


@attack()
def a_trace_that_was_cut(scene: Scene) -> str:
    """The first half of a file is taken for all of it, or fails otherwise than by our error."""
    path, whole = scene.folder / "trace.json.gz", json.dumps({"traceEvents": [_EVENT] * 1000}).encode()
    packed = gzip.compress(whole)
    path.write_bytes(packed[: len(packed) // 2])
    return gained_by(lambda: read_trace(path))


# ---- manifests -------------------------------------------------------------------------------


def _saved(scene: Scene) -> Path:
    """A good checkpoint of two ranks."""
    with mm.Graph() as graph:
        w = mm.get_variable("w", "a:4;b:6", initializer=np.ones((4, 6), "f4"))
    step = mm.compile(graph, mm.SimulatedMesh("r:2"), "a:r", fetches=[w])
    return checkpoint.save(scene.folder / "checkpoints", step.variables, 1, {})


def _resigned(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A manifest that says something else, with a checksum that is right."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text().split("\n")[1])
    change(content)
    text = json.dumps(content)
    path.write_text(f"{digest(text)}\n{text}\n")
    return folder


def _all_of(folder: Path) -> object:
    manifest = checkpoint.read_manifest(folder)
    return {name: read_whole(manifest, name) for name in manifest.tensors}


def _renamed(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda c: c["files"].update({name: c["files"].pop("rank-00000.safetensors")})


def _tensor(**parts: Any) -> Callable[[dict[str, Any]], object]:
    return lambda c: c["tensors"]["w"].update(parts)


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a_file_above": _renamed("../rank-00000.safetensors"),
    "a_file_of_the_system": _renamed("/etc/passwd"),
    "a_name_with_a_zero": _renamed("rank-00000\0.safetensors"),
    "itself": _renamed("manifest.json"),
    "no_files": lambda c: c["files"].clear(),
    "files_in_a_list": lambda c: c.update(files=[]),
    "a_negative_length": lambda c: c["files"]["rank-00000.safetensors"].update(bytes=-1),
    "a_length_in_words": lambda c: c["files"]["rank-00000.safetensors"].update(bytes="long"),
    "a_length_without_end": lambda c: c["files"]["rank-00000.safetensors"].update(bytes=1 << 60),
    "a_huge_tensor": _tensor(shape=[1 << 40, 6]),
    "a_huge_tensor_and_files": lambda c: (
        _tensor(shape=[1 << 40, 6])(c),
        c["files"]["rank-00000.safetensors"].update(bytes=1 << 50),
    ),
    "a_negative_shape": _tensor(shape=[-4, -6]),
    "a_shape_of_fractions": _tensor(shape=[4.5, 6]),
    "many_dims": _tensor(dims=[f"d{k}" for k in range(9999)], shape=[1] * 9999, split=[[]] * 9999),
    "an_unknown_type": _tensor(dtype="object"),
    "a_type_of_lists": _tensor(dtype=["float32"]),
    "an_unknown_axis": _tensor(split=[["s"], []]),
    "an_axis_twice": _tensor(split=[["r"], ["r"]]),
    "a_split_of_numbers": _tensor(split=[3, 4]),
    "a_mesh_of_10_to_the_18_ranks": lambda c: c.update(mesh=[["r", 10**18]]),
    "a_mesh_of_nobody": lambda c: c.update(mesh=[["r", 0]]),
    "a_mesh_of_words": lambda c: c.update(mesh="r:2"),
    "a_step_of_words": lambda c: c.update(step="1"),
    "tensors_in_a_list": lambda c: c.update(tensors=[1]),
}


def _manifest_row(name: str) -> None:
    def attempt(scene: Scene) -> str:
        folder = _resigned(_saved(scene), MANIFESTS[name])
        return gained_by(lambda: _all_of(folder))

    attempt.__name__ = f"a_manifest_names_{name}"
    attempt.__doc__ = f"A manifest with a right checksum says: {name}."
    attack()(attempt)


for _name in MANIFESTS:
    _manifest_row(_name)


def _shard_replaced(scene: Scene, by: Callable[[Path], object]) -> str:
    folder = _saved(scene)
    shard = folder / "rank-00001.safetensors"
    shard.rename(folder / "good")
    by(shard)
    return gained_by(lambda: _all_of(folder))


@attack()
def a_shard_is_a_link(scene: Scene) -> str:
    """A link in a checkpoint is followed, even to the right bytes."""
    return _shard_replaced(scene, lambda p: p.symlink_to("good"))


@attack()
def a_shard_is_a_pipe(scene: Scene) -> str:
    """Opening a shard waits for a writer."""
    return _shard_replaced(scene, os.mkfifo)


@attack()
def a_shard_is_a_device(scene: Scene) -> str:
    """A device that never ends is read."""
    return _shard_replaced(scene, lambda p: p.symlink_to("/dev/zero"))


# ---- headers of safetensors ------------------------------------------------------------------


def _entry(shape: list[Any], start: Any, stop: Any, kind: Any = "F32") -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [start, stop]}


HEADERS: dict[str, Any] = {
    "overlapping_tensors": {"a": _entry([2], 0, 8), "b": _entry([2], 4, 12)},
    "a_gap": {"a": _entry([1], 0, 4), "b": _entry([1], 8, 12)},
    "a_place_outside": {"a": _entry([1 << 40], 0, 1 << 42)},
    "a_negative_place": {"a": _entry([3], -12, 0)},
    "huge_dims": {"a": _entry([1 << 62, 1 << 62, 0], 0, 0), "b": _entry([3], 0, 12)},
    "a_size_beyond_64_bits": {"a": _entry([10**4000, 0], 0, 0), "b": _entry([3], 0, 12)},
    "a_million_dims": {"a": _entry([1] * 1_000_000, 0, 4), "b": _entry([2], 4, 12)},
    "a_shape_of_words": {"a": _entry(["x"], 0, 12)},
    "a_shape_that_is_a_word": {"a": _entry("12", 0, 12)},  # type: ignore[arg-type]
    "true_as_a_size": {"a": _entry([True, 3], 0, 12)},
    "a_type_that_is_a_list": {"a": _entry([3], 0, 12, [])},
    "a_tensor_that_is_a_number": {"a": 3},
    "metadata_of_numbers": {"__metadata__": {"a": 3}, "a": _entry([3], 0, 12)},
    "metadata_in_a_list": {"__metadata__": [], "a": _entry([3], 0, 12)},
    "an_unknown_type_longer_than_the_file": {"a": _entry([3], 0, 1 << 50, "Q4")},
}
LENGTHS = {"no_length": 0, "half_a_length": 1 << 31, "a_length_of_2_to_the_63": (1 << 63) + 1}


def _header_row(name: str, write: Callable[[], bytes]) -> None:
    def attempt(scene: Scene) -> str:
        path = scene.folder / "model.safetensors"
        path.write_bytes(write())

        def read() -> object:
            with Checkpoint(path) as found:
                return {key: found.read(key) for key in list(found.places)}

        return gained_by(read)

    attempt.__name__ = f"a_header_has_{name}"
    attempt.__doc__ = f"A file of weights whose header has: {name}."
    attack()(attempt)


def _written(header: Any, length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(12)


for _name, _header in HEADERS.items():
    _header_row(_name, lambda header=_header: _written(header))
_header_row(
    "a_tensor_twice", lambda: _written({"b": _entry([0], 0, 0), "a": _entry([3], 0, 12)}).replace(b'"b"', b'"a"')
)
for _name, _length in LENGTHS.items():
    _header_row(_name, lambda n=_length: _written({"a": _entry([3], 0, 12)}, n))


# ---- numbers in a model's config -------------------------------------------------------------

GPT2 = {"model_type": "gpt2", "n_embd": 4, "n_head": 2, "n_layer": 1, "n_inner": 6, "vocab_size": 5, "n_positions": 3}
NUMBERS = {
    "a_billion": 10**9,
    "a_size_that_fits_no_file": 1 << 24,
    "400_digits": 10**400,
    "nothing_at_all": 0,
    "less_than_nothing": -(10**9),
    "a_half": 0.5,
    "no_number": float("nan"),
    "no_end": float("inf"),
    "a_word": "4",
}


def _number_row(name: str) -> None:
    def attempt(scene: Scene) -> str:
        table = make_header({"wte.weight": ("F32", [5, 4]), "wpe.weight": ("F32", [3, 4])})[0]
        (scene.folder / "model.safetensors").write_bytes(table + bytes(4 * (20 + 12)))
        config = scene.folder / "config.json"
        config.write_text(json.dumps(GPT2))
        open_model(scene.folder)
        gained = dict[str, str]()
        for key in GPT2.keys() - {"model_type"}:
            # Widths that no array of this file has are found when its arrays are looked at.
            inner = key in ("n_inner", "n_head") and name == "a_size_that_fits_no_file"
            config.write_text(json.dumps({**GPT2, key: NUMBERS[name]}))
            gained[key] = "" if inner else gained_by(lambda: open_model(scene.folder))
        return "; ".join(f"{key}: {what}" for key, what in gained.items() if what)

    attempt.__name__ = f"a_model_has_{name}"
    attempt.__doc__ = f"Layers or widths of a model are {name}: time and memory are taken for them."
    attack()(attempt)


for _name in NUMBERS:
    _number_row(_name)


# ---- names in an index -----------------------------------------------------------------------

NAMES = {
    "above": "../secret.safetensors",
    "of_the_system": "/etc/passwd",
    "the_folder": ".",
    "the_folder_above": "..",
    "empty": "",
    "with_a_zero": "a\0b",
    "with_a_newline": "a\nb",
    "of_windows": "..\\secret.safetensors",
    "a_number": 7,
    "very_long": "a" * 5000,
    "half_a_character": "\ud800.safetensors",
}


def _index_row(name: str) -> None:
    def attempt(scene: Scene) -> str:
        header, _ = make_header({"w": ("F32", [3])})
        (scene.folder / "secret.safetensors").write_bytes(header + bytes(12))
        folder = scene.folder / "model"
        folder.mkdir()
        text = json.dumps({"weight_map": {"w": NAMES[name]}})
        (folder / "model.safetensors.index.json").write_text(text)
        right, outside = files.plain.opened, list[Path]()

        def opened(path: Path, links: bool = True) -> int:
            if Path(os.path.abspath(path)).parent != folder:
                outside.append(path)
            return right(path, links)

        scene.patch.setattr(files.plain, "opened", opened)
        return gained_by(lambda: Checkpoint(folder)) or (f"{outside} was opened" if outside else "")

    attempt.__name__ = f"an_index_names_a_file_{name}"
    attempt.__doc__ = f"An index leads out of its folder, or fails otherwise: {name}."
    attack()(attempt)


for _name in NAMES:
    _index_row(_name)
