"""Variables from files and back, without any other library: every layout, byte for byte."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import meshmpi as mm
from meshmpi.dims import Dimension, Shape
from meshmpi.launch.launch import launch
from meshmpi.transformer.pretrained import architecture, load, save, suggested_layout
from meshmpi.transformer.pretrained.architectures import Entry, FileDim
from meshmpi.transformer.pretrained.files import Checkpoint, contiguous_runs
from meshmpi.transformer.pretrained.load import part_of
from tests.pretrained.whole import read_whole, variables_of

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 24,
    "n_head": 3,
    "vocab_size": 37,
    "n_positions": 16,
    "n_inner": 40,
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 37,
    "max_position_embeddings": 16,
}
MODEL_PARALLEL = "heads:cols;d_ff:cols;vocab:cols"
LAYOUTS = [
    ("all:1", "", None),
    ("all:3", "", None),
    ("rows:2;cols:3", f"batch:rows;{MODEL_PARALLEL}", None),
    ("rows:3;cols:2", MODEL_PARALLEL, "d_model:rows"),
    ("all:5", "batch:all", "d_model?:all;d_ff?:all;heads?:all;d_kv?:all"),
    ("all:3", "batch:all", "d_kv?:all;vocab?:all"),
    ("rows:2;cols:2", "vocab:rows;d_ff:rows+cols", "length:cols;d_kv:cols"),
]


def arrays_of(found, seed=0):
    draw = np.random.default_rng(seed)
    keys = {e.keys[0]: e.file_shape for e in found.entries}
    return {k: draw.standard_normal(s).astype(np.float32) for k, s in keys.items()}


def compiled(found, mesh="all:1", layout="", storage=None):
    with mm.Graph() as graph:
        tokens = mm.placeholder("tokens", "batch:2;length:16", "int32")
        logits = mm.transformer.lm(found.config, tokens)
    return mm.compile(graph, mm.SimulatedMesh(mesh), layout, fetches=[logits], storage=storage)


def written(path: Path, arrays) -> Path:
    path.mkdir(exist_ok=True)
    save_file(arrays, path / "model.safetensors")
    return path


def check_variables(step, found, arrays):
    shapes = {name: v.type.shape for name, v in step.variables.types.items()}
    for name, value in variables_of(found, arrays, shapes).items():
        np.testing.assert_array_equal(step.variables[name], value, err_msg=name)


def held_bytes(step):
    return sum(b.nbytes for blocks in step.variables.blocks.values() for b in blocks.values())


# ---- reading and writing in every layout -----------------------------------------------------


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize(("mesh", "layout", "storage"), LAYOUTS)
def test_every_rank_reads_its_own_bytes(tmp_path, config, mesh, layout, storage):
    found = architecture(config)
    arrays = arrays_of(found)
    step = compiled(found, mesh, layout, storage)
    report = load(step, found, written(tmp_path / "model", arrays))
    check_variables(step, found, arrays)
    assert report.bytes_read == held_bytes(step)
    assert sorted(report.variables) == sorted(step.variables)
    for most in (None, 6000):
        folder = save(step, found, tmp_path / f"out-{most}", max_shard_bytes=most)
        files = sorted(folder.glob("*.safetensors"))
        assert (len(files) > 2) == (most is not None)
        back = {k: v for file in files for k, v in load_file(file).items()}
        assert sorted(back) == sorted(arrays)
        for key, value in arrays.items():
            np.testing.assert_array_equal(back[key], value, err_msg=key)
        again = compiled(found)
        load(again, found, folder)
        check_variables(again, found, arrays)


def test_split_tensors_are_read_once_over_all_ranks(tmp_path):
    found = architecture(GPT2)
    arrays = arrays_of(found)
    folder = written(tmp_path / "model", arrays)
    total = sum(a.nbytes for a in arrays.values())
    for style, mesh in (("storage", "all:2"), ("storage", "all:3"), ("megatron", "all:3")):
        found_layout = suggested_layout(found.config, mesh, style)
        step = compiled(found, mesh, *found_layout)
        report = load(step, found, folder)
        twice = report.bytes_read - total
        # What is left over: biases of heads or d_ff with a d_model that the rules split elsewhere.
        assert 0 <= twice <= 0.02 * total, (style, mesh)
    step = compiled(found, "all:3")  # replicated: every rank reads all
    assert load(step, found, folder).bytes_read == 3 * total


@given(st.data())
def test_pieces_are_those_of_the_whole_array(data):
    """Any entry, any block: reading pieces is reading all and cutting; together they cover it."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    dims = [Dimension(name, n) for name, n in zip("abcd", sizes, strict=False)]
    places = data.draw(st.permutations(range(len(dims))))
    cut = data.draw(st.integers(0, len(dims)))
    groups = [places[:cut], places[cut:]]
    file_dims = []
    for group in groups:
        before, after = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
        extent = math.prod(dims[i].size for i in group)
        file_dims.append(FileDim(tuple(dims[i] for i in group), before, before + extent + after))
    expert = Dimension("experts", 3)
    entry = Entry("w", ("w",), tuple(file_dims), at=((expert, 1),))
    order = Shape([expert, *dims])
    array = np.arange(math.prod(entry.file_shape), dtype=np.float32).reshape(entry.file_shape)
    whole = np.full(order.sizes, -1.0, np.float32)
    whole[1] = read_whole(entry, array, order)
    block = tuple(tuple(sorted(data.draw(st.tuples(st.integers(0, d.size), st.integers(0, d.size))))) for d in order)
    expected = whole[tuple(slice(a, b) for a, b in block)]
    part = part_of(entry, order, block)
    got = np.full(expected.shape, -1.0, np.float32)
    if part is not None:
        runs = list(contiguous_runs(entry.file_shape, part.pieces))
        flat = array.reshape(-1)
        read = np.concatenate([flat[s : s + n] for s, n in runs])
        got[part.place] = part.to_block(read)
        np.testing.assert_array_equal(part.from_block(got).reshape(-1), read)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_types_are_rounded_once(tmp_path, dtype):
    found = architecture(GPT2)
    arrays = arrays_of(found)
    step = compiled(found, "all:2", "heads:all;d_ff:all")
    load(step, found, written(tmp_path / "model", arrays))
    folder = save(step, found, tmp_path / "out", dtype=dtype)
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    with Checkpoint(folder) as file:
        stored = file.places["transformer.wte.weight"].stored
        assert stored.stop - stored.start == 37 * 24 * {"float64": 8}.get(dtype, 2)
        for key, value in arrays.items():
            rounded = value.astype(mm.runtime.arrays.numpy_dtype(dtype))
            np.testing.assert_array_equal(file.read(key, dtype="float64"), rounded.astype(float))


# ---- keys ------------------------------------------------------------------------------------


def test_prefixes_ties_and_leftovers(tmp_path):
    found = architecture(GPT2)
    arrays = arrays_of(found)
    step = compiled(found)
    bare = {k.removeprefix("transformer."): v for k, v in arrays.items()}
    bare |= {"h.0.attn.bias": np.zeros((1, 1, 4, 4), np.float32)}  # a mask, of old files
    for n, variant in enumerate(
        (
            bare,
            {f"module.{k}": v for k, v in arrays.items()},
            arrays | {"lm_head.weight": arrays["transformer.wte.weight"]},
        )
    ):
        step.assign({name: np.zeros(v.type.shape.sizes, np.float32) for name, v in step.variables.types.items()})
        load(step, found, written(tmp_path / str(n), variant))
        check_variables(step, found, arrays)
    only_tie = dict(arrays)
    only_tie["lm_head.weight"] = only_tie.pop("transformer.wte.weight")
    load(step, found, written(tmp_path / "tie", only_tie))
    check_variables(step, found, arrays)
    other = arrays | {"lm_head.weight": arrays["transformer.wte.weight"] + 1}
    with pytest.raises(mm.CheckpointError, match=r"wte.weight' and 'lm_head.weight'.*differ"):
        load(step, found, written(tmp_path / "contradiction", other))


def test_wrong_checkpoints_change_nothing(tmp_path):
    found = architecture(GPT2)
    arrays = arrays_of(found)
    step = compiled(found, "all:2", "heads:all")
    before = {name: step.variables[name] for name in step.variables}

    def refused(message, changed, named="bad"):
        with pytest.raises(mm.CheckpointError, match=message):
            load(step, found, written(tmp_path / named, changed))
        for name, value in before.items():
            np.testing.assert_array_equal(step.variables[name], value)

    without = {k: v for k, v in arrays.items() if ".h.1." not in k}
    refused(r"lacks 'transformer.h.1.ln_1.weight', .* and 8 more", without)
    refused(
        r"has 'transformer.h.2.ln_1.bias', which a gpt2 model with this config does not",
        arrays | {"transformer.h.2.ln_1.bias": np.zeros(3, np.float32)},
    )
    refused(
        r"'transformer.wpe.weight' of .* is \[15, 24\], but .*'decoder/positions' needs \[16",
        arrays | {"transformer.wpe.weight": np.zeros((15, 24), np.float32)},
    )
    refused(r"'transformer.wpe.weight' .*type U8", arrays | {"transformer.wpe.weight": np.zeros((16, 24), np.uint8)})


def test_wrong_models(tmp_path):
    found, other = architecture(GPT2), architecture(LLAMA)
    folder = written(tmp_path / "model", arrays_of(found))
    with pytest.raises(mm.CheckpointError, match="the model has .*which a gpt2 checkpoint"):
        load(compiled(other), found, folder)
    larger = architecture({**GPT2, "n_inner": 44})
    with pytest.raises(mm.CheckpointError, match=r"wi/kernel' is .*d_ff=44.* fills .*d_ff=40"):
        load(compiled(larger), found, folder)
    with mm.Graph() as graph:
        w = mm.get_variable("w", "a:3", trainable=False)
    step = mm.compile(graph, mm.SimulatedMesh("all:1"), fetches=[w])
    with pytest.raises(mm.CheckpointError, match="the step has no variable of a gpt2 model"):
        load(step, found, folder)


def test_variables_of_a_training_step_are_filled_and_its_slots_left_alone(tmp_path):
    found = architecture(GPT2)
    with mm.Graph() as graph:
        tokens, targets = (mm.placeholder(n, "batch:2;length:16", "int32") for n in ("tokens", "targets"))
        loss, _ = mm.transformer.lm_loss(found.config, tokens, targets, True)
        updates = mm.optimize.Adam(1e-3).minimize(loss)
    step = mm.compile(
        graph, mm.SimulatedMesh("all:2"), "batch:all", fetches=[loss], updates=updates, storage="d_model?:all"
    )
    arrays = arrays_of(found)
    report = load(step, found, written(tmp_path / "model", arrays))
    check_variables(step, found, arrays)
    slots = [n for n in step.variables if n not in report.variables]
    assert any("embedding" in n for n in slots)
    assert all(not step.variables[n].any() for n in slots)
    save(step, found, tmp_path / "out")
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == sorted(arrays)


# ---- writing ---------------------------------------------------------------------------------


def test_what_cannot_be_written(tmp_path):
    found = architecture(GPT2)
    step = compiled(found)
    with pytest.raises(mm.CheckpointError, match="cannot be written as int8"):
        save(step, found, tmp_path / "x", dtype="int8")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(mm.CheckpointError, match="full exists already"):
        save(step, found, tmp_path / "full")
    with pytest.raises(mm.CheckpointError, match="cannot be written"):
        save(step, found, tmp_path / "full" / "file" / "below")
    partial = dataclasses.replace(found, entries=found.entries[:3] + found.entries[4:])
    with pytest.raises(mm.CheckpointError, match="the model has|the entries of"):
        save(step, partial, tmp_path / "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full"]


def test_what_stands_beside_the_weights(tmp_path):
    found = architecture({**GPT2, "torch_dtype": "float16"})
    source = written(tmp_path / "model", arrays_of(found))
    (source / "tokenizer.json").write_text("{}")
    step = compiled(found)
    (tmp_path / "out").mkdir()  # an empty folder is used
    folder = save(step, found, tmp_path / "out", max_shard_bytes=6000, like=source)
    names = sorted(p.name for p in folder.iterdir())
    assert names[0] == "config.json" and names[-1] == "tokenizer.json"
    config = json.loads((folder / "config.json").read_text())
    assert config == {**GPT2, "dtype": "float32"}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    sizes = {}
    for file in folder.glob("*.safetensors"):
        part = load_file(file)
        assert sum(v.nbytes for v in part.values()) <= 6000 or len(part) == 1
        sizes |= {k: v.nbytes for k, v in part.items()}
        assert all(index["weight_map"][k] == file.name for k in part)
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert sorted(index["weight_map"]) == sorted(sizes)


# ---- memory ----------------------------------------------------------------------------------

MEDIUM = {
    "gpt2": architecture({"model_type": "gpt2", "n_layer": 4}).config,
    "llama": architecture(
        {
            **LLAMA,
            "hidden_size": 512,
            "num_attention_heads": 8,
            "intermediate_size": 1408,
            "vocab_size": 32000,
            "num_hidden_layers": 4,
        }
    ).config,
}


@pytest.mark.parametrize("name", MEDIUM)
@pytest.mark.parametrize(
    ("style", "mesh"),
    [
        ("storage", "all:2"),
        ("storage", "all:4"),
        ("storage", "rows:2;cols:2"),
        ("megatron", "all:2"),
        ("megatron", "all:4"),
        ("megatron", "rows:2;cols:2"),
        ("2d", "rows:2;cols:2"),
        ("2d", "rows:1;cols:2"),
        ("2d", "rows:2;cols:4"),
    ],
)
def test_weights_are_held_once_over_the_mesh(name, style, mesh):
    config = MEDIUM[name]
    found = suggested_layout(config, mesh, style)
    with mm.Graph() as graph:
        logits = mm.transformer.lm(config, mm.placeholder("tokens", "batch:4;length:16", "int32"))
    plan = mm.plan(graph, mesh, found.layout, storage=found.storage, fetches=[logits])
    total = 4 * mm.transformer.parameter_count(config)
    share = plan.cost.memory["variables"] * mm.MeshShape(mesh).size / total
    assert 1.0 <= share <= 1.02


def test_memory_is_the_predicted_one(tmp_path):
    found = architecture(GPT2)
    folder = written(tmp_path / "model", arrays_of(found))
    for style, mesh in (("storage", "all:2"), ("megatron", "all:4"), ("2d", "rows:2;cols:2")):
        step = compiled(found, mesh, *suggested_layout(found.config, mesh, style))
        load(step, found, folder)
        blocks = step.variables.blocks.values()
        assert step.held_memory["variables"] == step.cost.memory["variables"]
        # Each block begins on a cache line of 64 bytes.
        assert step.cost.memory["variables"] == sum(-(-b[0].nbytes // 64) * 64 for b in blocks)


def test_layouts_that_do_not_exist():
    config = MEDIUM["gpt2"]
    with pytest.raises(mm.LayoutError, match="no layout '3d'.* megatron, 2d"):
        suggested_layout(config, "all:4", "3d")
    with pytest.raises(mm.LayoutError, match="'2d' on mesh .* which has one axis.*rows:2;cols:2"):
        suggested_layout(config, "all:4", "2d")


# ---- under mpirun ----------------------------------------------------------------------------

SCRIPT = """
import sys
import numpy as np
import meshmpi as mm
from meshmpi.transformer.pretrained import architecture, load, save
from tests.pretrained.test_load import GPT2, arrays_of, check_variables
folder, mesh, layout, storage = sys.argv[1:]
found = architecture(GPT2)
with mm.Graph() as graph:
    tokens = mm.placeholder("tokens", "batch:2;length:16", "int32")
    logits = mm.transformer.lm(found.config, tokens)
step = mm.compile(graph, mm.Mesh(mesh), layout, fetches=[logits], storage=storage or None)
report = load(step, found, f"{folder}/model")
assert report.bytes_read == sum(b.nbytes for x in step.variables.blocks.values()
                                for b in x.values())
check_variables(step, found, arrays_of(found))
save(step, found, f"{folder}/out-{mesh}", max_shard_bytes=9000)
try:
    load(step, found, f"{folder}/bad")
except mm.CheckpointError as error:
    print("refused:", error)
"""


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("ranks", "mesh", "layout", "storage"),
    [
        (2, "all:2", "heads:all;d_ff:all;vocab:all", "d_model?:all"),
        (4, "rows:2;cols:2", MODEL_PARALLEL, "d_model:rows"),
        (4, "all:4", "", ""),
    ],
)
def test_under_mpirun(tmp_path, ranks, mesh, layout, storage):
    found = architecture(GPT2)
    arrays = arrays_of(found)
    written(tmp_path / "model", arrays)
    written(tmp_path / "bad", {k: v for k, v in arrays.items() if "wpe" not in k})
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = launch(
        ranks,
        [str(script), str(tmp_path), mesh, layout, storage],
        timeout_seconds=120,
        capture_output=True,
        environment={"PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused:") == ranks  # the same error on every rank
    back = {}
    for file in (tmp_path / f"out-{mesh}").glob("*.safetensors"):
        back |= load_file(file)
    assert sorted(back) == sorted(arrays)
    for key, value in arrays.items():
        np.testing.assert_array_equal(back[key], value)
