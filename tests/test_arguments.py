"""Every public function, each argument of every wrong kind: it works, or says so in five parts.

The functions are found by walking over ``mm`` and its modules, the arguments by their annotations,
so that a new function is in here from its first day.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import MeshmpiError, without_library

HERE = Path(__file__).name
MODULES = {"": mm} | {f"{n}.": getattr(mm, n) for n in ("data", "extend", "optimize", "schedules", "transformer")}
BELOW = ("Dimension", "Layout", "MeshShape", "Shape")
"""Classes of rooms below that of arguments: Python itself reports too many arguments, at the user's line."""
LEFT_OUT = {
    "Tensor": "made by operations",
    "Update": "made by mm.assign",
    "ShardedArray": "made by steps",
    "Plan": "made by mm.plan",
    "ExpertsOutput": "a result",
    "Initializer": "a protocol",
    "Variable": "made by mm.get_variable",
    "transformer.PackedPairs": "a result",
    "Mesh": "needs ranks",
    "optimize.Optimizer": "a base class",
    "Callback": "a base class",
    "extend.register": "takes a class; see tests/kinds/test_extend.py",
    "data.Reader": "made by mm.data.reader",
}


def _public() -> Iterator[tuple[str, Callable[..., Any]]]:
    for prefix, module in MODULES.items():
        names = (None if module is mm else getattr(module, "__all__", None)) or dir(module)
        for name in names:
            value = getattr(module, name)
            error = isinstance(value, type) and issubclass(value, BaseException)
            home = getattr(value, "__module__", "meshmpi")
            foreign = home.partition(".")[0] != "meshmpi" or (prefix == "extend." and home != module.__name__)
            if name.startswith("_") or isinstance(value, ModuleType) or error or foreign:
                continue
            if callable(value) and prefix + name not in LEFT_OUT:
                yield prefix + name, value


PUBLIC = dict(_public())


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    """Where names that are given are names of files."""
    monkeypatch.chdir(tmp_path)
    np.save("tokens.npy", np.arange(99))


class World:
    """A graph with something of everything, and a right value for each kind of argument."""

    def __init__(self) -> None:
        batch, length, model = (mm.Dimension(*d) for d in (("b", 2), ("length", 4), ("d_model", 8)))
        self.x = mm.placeholder("x", [batch, length, model])
        self.ids = mm.placeholder("ids", [batch, length], "int32")
        self.mask = mm.greater(self.ids, 0)
        self.w = mm.get_variable("w", [model])
        self.memory = mm.rename(self.x, {"length": "memory_length"})
        self.loss = mm.reduce_mean(mm.square(self.x * self.w))
        self.image = mm.placeholder("image", "b:2;depth:4;height:4;width:4;color:3")
        self.graph = self.loss.graph
        self.dims = (batch, length, model)
        self.new = mm.Dimension("new", 4)


def base_arguments(name: str, function: Callable[..., Any], world: World) -> dict[str, Any]:
    """Arguments with which the function works."""
    found = {}
    for p in inspect.signature(function).parameters.values():
        own = SPECIAL.get((name, p.name))
        required = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if own is not None:
            found[p.name] = own(world)
        elif required:
            value = _by_annotation(str(p.annotation), world)
            anybody = SPECIAL.get(("", p.name))
            found[p.name] = anybody(world) if value is None and anybody else value
    return found


def _by_annotation(annotation: str, w: World) -> Any:
    table = {
        "Tensor": w.x,
        "TensorLike": w.x,
        "Sequence[Tensor]": [w.x],
        "DimLike": "d_model",
        "DimsLike": ["d_model"],
        "Dimension": w.new,
        "ShapeLike": w.x.shape,
        "int": 2,
        "float": 0.5,
        "str": "name",
        "Graph": w.graph,
        "Tensor | None": None,
        "Dims": [w.new],
        "bool": False,
    }
    return table.get(annotation)


def _config() -> Any:
    return mm.transformer.TransformerConfig(vocab=8, length=4, d_model=8, d_ff=8, heads=2, d_kv=4, layers=1)


_BOOL = ("logical_and", "logical_or")
_OF_CONFIG = (
    "encoder encoder_decoder encoder_decoder_loss encoder_decoder_parameter_count"
    " lm lm_loss masked_lm masked_lm_loss parameter_count"
)
_POSITIONS = ("attention_mask_autoregressive", "attention_mask_local", "sinusoid_positions")
SPECIAL: dict[tuple[str, str], Callable[[World], Any]] = {
    **{(n, p): lambda w: w.mask for n in _BOOL for p in ("x1", "x2")},
    **{(n, "x"): lambda w: w.mask for n in ("logical_not", "reduce_all", "reduce_any")},
    **{(n, "x"): lambda w: w.image for n in PUBLIC if n.endswith(("3d", "3d_transpose"))},
    **{(n, "learning_rate"): lambda w: 0.1 for n in PUBLIC if n.startswith("optimize.")},
    **{(f"transformer.{n}", "config"): lambda w: _config() for n in _OF_CONFIG.split()},
    **{
        (n, p): lambda w: w.ids
        for n in PUBLIC
        if n.startswith("transformer.")
        for p in ("tokens", "targets", "source", "decoder_tokens")
    },
    ("transformer.masked_lm_loss", "weights"): lambda w: mm.to_float(w.ids),
    ("transformer.TransformerConfig", "heads"): lambda w: 2,
    ("relative_position_bias", "memory_length"): lambda w: mm.Dimension("memory", 4),
    ("relative_position_bucket", "distance"): lambda w: w.ids,
    ("rotary", "length_dim"): lambda w: "length",
    ("scatter_add", "indices"): lambda w: w.ids,
    ("put", "dim"): lambda w: "d_model",
    ("put", "updates"): lambda w: mm.to_float(w.ids),
    ("optimize.serialize_training_step", "features"): lambda w: {"x": w.x},
    ("optimize.serialize_training_step", "batch_dim"): lambda w: "b",
    ("optimize.serialize_training_step", "model_fn"): lambda w: lambda part: {"loss": mm.reduce_mean(part["x"] * w.w)},
    ("local_function", "fn"): lambda w: lambda block: block,
    ("local_function", "outputs"): lambda w: [w.x],
    ("extend.check_operation", "operation"): lambda w: mm.exp,
    ("extend.check_operation", "inputs"): lambda w: [("a:3;b:2", np.ones((3, 2)))],
    ("extend.check_operation", "expected"): lambda w: np.exp,
    ("Distribution", "kind"): lambda w: "normal",
    ("Distribution", "scale"): lambda w: 1.0,
    ("Distribution", "shift"): lambda w: 0.0,
    ("MeshShape", "axes"): lambda w: "rows:2",
    ("RotaryScaling", "kind"): lambda w: "linear",
    ("SimulatedMesh", "shape"): lambda w: "rows:2",
    **{(name, p): lambda w, p=p: p for name in ("ConvDims", "Slide") for p in ("x", "w", "y")},
    ("as_stored", "variable"): lambda w: w.graph.variables["w"],
    ("read_stored", "variable"): lambda w: w.graph.variables["w"],
    ("assign", "variable"): lambda w: w.w,
    ("assign", "value"): lambda w: w.w * 2.0,
    ("attention_mask_autoregressive", "memory_length"): lambda w: mm.Dimension("memory", 4),
    ("attention_mask_local", "memory_length"): lambda w: mm.Dimension("memory", 4),
    ("sinusoid_positions", "d_model"): lambda w: mm.Dimension("other", 8),
    ("", "dtype"): lambda w: "float32",
    ("clip_by_global_norm", "tensors"): lambda w: [w.x],
    ("global_norm", "tensors"): lambda w: [w.x],
    ("clip_by_value", "minval"): lambda w: 0.0,
    ("clip_by_value", "maxval"): lambda w: 1.0,
    ("", "mesh"): lambda w: mm.SimulatedMesh("rows:2"),
    ("compile", "fetches"): lambda w: [w.loss],
    ("constant", "value"): lambda w: 1.0,
    ("", "slides"): lambda w: [mm.ConvDims("height", "width", "height")],
    ("conv", "x"): lambda w: mm.placeholder("px", "b:2;height:4"),
    ("conv", "w"): lambda w: mm.placeholder("pw", "width:2"),
    ("conv", "output_shape"): lambda w: "b:2;height:3",
    ("custom_gradient", "fn"): lambda w: mm.square,
    ("", "inputs"): lambda w: [w.x],
    ("custom_gradient", "grad_fn"): lambda w: lambda xs, ys, dys: dys,
    ("", "function"): lambda w: mm.square,
    ("default_initializer", "shape"): lambda w: "a:2",
    ("depthwise_conv", "filter_size"): lambda w: [2],
    ("dropout", "rate"): lambda w: 0.5,
    ("dynamic_shift", "offset"): lambda w: 1,
    ("embedding", "indices"): lambda w: w.ids,
    ("embedding", "vocab_dim"): lambda w: mm.Dimension("vocab", 8),
    ("embedding_weights", "vocab_dim"): lambda w: mm.Dimension("vocab", 8),
    ("gather", "indices"): lambda w: w.ids,
    ("gather", "weights"): lambda w: w.w,
    ("gradients", "ys"): lambda w: w.loss,
    ("gradients", "xs"): lambda w: [w.w],
    ("interpret", "feeds"): lambda w: {"x": np.ones((2, 4, 8))},
    ("interpret", "fetches"): lambda w: [w.loss],
    ("", "name"): lambda w: "name",
    ("load_machine", "name"): lambda w: "tpuv2",
    **{("local_attention_1d", n): lambda w: w.x for n in ("q", "k", "v")},
    ("local_attention_1d", "length_dim"): lambda w: "length",
    **{("local_attention_2d", n): lambda w: w.image for n in ("q", "k", "v")},
    **{("local_attention_2d", n): lambda w: "color" for n in ("key_dim", "value_dim")},
    ("", "dims"): lambda w: ["height", "width"],
    ("", "window"): lambda w: (1, 1),
    **{(n, "heads"): lambda w: mm.Dimension("heads", 2) for n in PUBLIC if not n.startswith("transformer.")},
    ("local_self_attention_2d", "x"): lambda w: w.image,
    ("mixture_of_experts", "experts"): lambda w: mm.Dimension("experts", 2),
    ("", "paddings"): lambda w: [1, 1],
    ("", "mesh_shape"): lambda w: "rows:2",
    ("predict_time", "program"): lambda w: mm.plan(w.graph, "rows:2").program,
    ("predict_time", "machine"): lambda w: mm.load_machine("tpuv2"),
    ("put", "indices"): lambda w: w.ids,
    ("put", "x"): lambda w: w.w,
    ("recompute_grad", "fn"): lambda w: mm.square,
    ("", "body"): lambda w: mm.square,
    ("", "names"): lambda w: {"length": "other"},
    ("rename_dimension", "old_name"): lambda w: "length",
    ("repeat", "inputs"): lambda w: [w.x],
    ("relative_position_bucket", "relative_position"): lambda w: w.ids,
    ("replace_dimensions", "old_dims"): lambda w: "length",
    ("replace_dimensions", "new_dims"): lambda w: mm.Dimension("other", 4),
    ("", "sublayers"): lambda w: mm.square,
    ("split", "num_or_size_splits"): lambda w: 2,
    ("where", "condition"): lambda w: w.mask,
    ("while_loop", "cond_fn"): lambda w: lambda v: mm.less(mm.reduce_sum(v), 1.0),
    ("while_loop", "body_fn"): lambda w: mm.square,
    ("search_layouts", "seconds"): lambda w: 0.02,
    ("search_layouts", "fetches"): lambda w: [w.loss],
    ("search_layouts", "ranks"): lambda w: 2,
    ("verify", "sample"): lambda w: 1,
    ("verify", "warm_steps"): lambda w: 0,
    ("verify", "fetches"): lambda w: [w.loss],
    ("verify", "mesh"): lambda w: "rows:2",
    **{
        (f"transformer.{n}", "source"): lambda w: mm.rename(w.ids, {"length": "source_length"})
        for n in ("encoder_decoder", "encoder_decoder_loss")
    },
    ("schedules.cosine", "total_steps"): lambda w: 9,
    ("schedules.slanted_triangular", "total_steps"): lambda w: 99,
    ("CSVLogger", "path"): lambda w: "steps.csv",
    ("fit", "step"): lambda w: mm.compile(
        w.graph, mm.SimulatedMesh("rows:2"), fetches=[w.loss], updates=mm.optimize.SGD(0.1).minimize(w.loss)
    ),
    ("fit", "data"): lambda w: lambda n: {"x": np.ones((2, 4, 8))},
    ("fit", "steps"): lambda w: 1,
    ("fit", "folder"): lambda w: "a_run",
    ("fit", "log"): lambda w: {"plot": False},
    ("fit", "say"): lambda w: lambda line: None,
    ("data.reader", "source"): lambda w: {"x": np.ones((4, 3))},
    ("data.tokens", "path"): lambda w: "tokens.npy",
    ("schedules.parse_schedule", "text"): lambda w: "linear_warmup*0.1",
}
"""(function or "" for any, argument) -> a right value, where its annotation does not tell."""


def wrong_values(world: World) -> list[Any]:
    """One of everything that a user may take for what is meant."""
    numbers = [-1, 0, 5, 2.5, float("nan"), True, np.float32(1.5), np.array(3)]
    texts = ["x", "no such", "", "d_model", b"bytes"]
    several = [[], [1], ["x"], (2,), ("a", 2), {}, {"x": 1}, [world.x], np.ones((2, 4, 8))]
    of_a_graph = [world.x, world.ids, world.x.variable, world.loss, world.new, world.graph, world.w.variable]
    others = [None, np.int32, object(), len, lambda: 3, mm.SimulatedMesh("rows:2")]
    return [*numbers, *texts, *several, *of_a_graph, *others]


def complaint(call: Callable[[], Any]) -> str:
    """What is wrong with how a call ends; empty where it works or is refused as it should be."""
    try:
        call()
    except MeshmpiError as e:
        if not (e.problem and e.remedy):
            return f"no remedy: {e}"
        if HERE not in e.where:
            return f"not the user's line: {e}"
        frames = traceback.extract_tb(without_library(e, e.__traceback__))
        inside = [f.filename for f in frames if "/meshmpi/" in f.filename and HERE not in f.filename]
        return f"frames of the library: {inside}" if inside else ""
    except RecursionError as e:
        return repr(e)
    except Exception as e:
        last = traceback.extract_tb(e.__traceback__)[-1]
        if last.name == "asked" or Path(last.filename).name == HERE:
            return ""  # what the function given raises is its own
        return f"{type(e).__name__}: {e} ({Path(last.filename).name}:{last.lineno})"
    return ""


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Breakpoints that were reached: here nobody is asked anything."""
    found: list[str] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: found.append("reached"))
    return found


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_of_a_wrong_kind_is_taken_or_refused(name: str, reached: list[str]):
    function, wrong = PUBLIC[name], []
    with mm.Graph():
        world = World()
        base = base_arguments(name, function, world)
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            for k, value in enumerate(wrong_values(world)):
                with mm.scope(f"{parameter.name}_{k}"):
                    said = complaint(lambda p=parameter, v=value: function(**{**base, p.name: v}))
                if said:
                    wrong.append(f"{name}({parameter.name}={value!r}): {said}")
    assert not wrong, f"{len(wrong)} of them:\n" + "\n".join(wrong[:12])
    assert bool(reached) == (name == "interpret"), "of which breakpoints are an argument"


@pytest.mark.parametrize("name", PUBLIC)
def test_a_right_call_works(name: str):
    with mm.Graph():
        world = World()
        PUBLIC[name](**base_arguments(name, PUBLIC[name], world))


@pytest.mark.parametrize("name", PUBLIC)
def test_arguments_forgotten_misspelt_or_too_many(name: str):
    function = PUBLIC[name]
    with mm.Graph():
        world = World()
        base = base_arguments(name, function, world)
        kinds = [p.kind for p in inspect.signature(function).parameters.values()]
        calls = [lambda: function(**base, no_such_argument=1)]
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            calls.append(lambda: function(*[world.x] * 40))
        calls += [lambda n=n: function(**{k: v for k, v in base.items() if k != n}) for n in base]
        said = [c for c in map(complaint, calls) if c]
    assert not said or name in BELOW, said
