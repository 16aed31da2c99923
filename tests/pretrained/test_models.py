"""Logits and gradients of tiny random models equal those of `transformers`, in every layout."""

from __future__ import annotations

import functools

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import meshmpi as mm
from meshmpi.errors import ConfigError
from meshmpi.transformer.pretrained.architectures import architecture, model_inputs, model_logits
from meshmpi.transformer.pretrained.model import open_model
from tests.pretrained.models import BATCH, LENGTH, MODELS, SOURCE, Reference, made, reference
from tests.pretrained.whole import variables_of

BOUND = 2e-5
"""Allowed share of the largest logit, and of the largest element of a gradient: float32 sums in other orders."""
LAYOUTS = {
    "replicated": ("all:1", "", ""),
    "model_parallel": ("all:2", "heads?:all;d_ff:all;vocab:all", ""),
    "data_parallel": ("all:2", "batch:all;experts?:all", ""),
    "storage": ("all:4", "batch:all", "d_model:all"),
    "2d": ("rows:2;cols:2", "batch:rows;heads:cols;d_ff:cols;vocab:cols", "d_model:rows"),
    "2d_d_model": ("rows:2;cols:2", "d_model:rows;heads:cols;d_ff:cols;vocab:cols;experts?:cols", ""),
    "length": ("rows:2;cols:2", "length:rows;source_length?:rows;memory_length:cols;d_transform?:cols", ""),
}
FIRST = ("gpt2", "pythia", "llama_gqa", "olmo2", "t5_v1_1", "switch", "esm2", "roberta")


@functools.cache
def known(name: str) -> Reference:
    return reference(name)


def ours(found: Reference, layout: str, kernels: str = "numpy", checkpoint=None):
    """(Logits, gradients by variable, shapes by variable) in a layout."""
    mesh, rules, storage = LAYOUTS[layout]
    model = found.architecture
    with mm.Graph() as graph:
        source = SOURCE if model.kind == "encoder_decoder" else 0
        logits = model_logits(model, model_inputs(model, BATCH, LENGTH, source))
        probe = mm.placeholder("probe", logits.shape)
        loss = mm.reduce_sum(mm.multiply(logits, probe))
        variables = graph.trainable_variables
        gradients = mm.gradients(loss, variables)
    if model.config.experts and "d_ff:" in rules:  # experts and d_ff of one tensor
        rules = rules.replace("experts?:cols", "").replace(";;", ";")
    step = mm.compile(
        graph, mm.SimulatedMesh(mesh), rules, storage=storage, kernels=kernels, fetches=[logits, *gradients]
    )
    shapes = {v.name: v.shape for v in variables}
    if checkpoint is None:
        step.assign(variables_of(model, found.arrays, shapes))
    else:
        checkpoint.load(step)
    out = step(**found.feeds, probe=found.probe)
    pairs = zip(variables, gradients, strict=True)
    return np.asarray(out[logits]), {v.name: np.asarray(out[g]) for v, g in pairs}, shapes


def check(found: Reference, logits, gradients, shapes) -> None:
    real = found.feeds["mask"] == 1
    bound = BOUND * np.abs(found.logits[real]).max()
    np.testing.assert_allclose(logits[real], found.logits[real], rtol=0, atol=bound)
    wanted = variables_of(found.architecture, found.gradients, shapes)
    assert sorted(wanted) == sorted(gradients)
    largest = max(np.abs(g).max() for g in wanted.values())
    for name, gradient in wanted.items():
        # A gradient that is a difference of larger ones, as that of keys' biases, has their errors.
        scale = max(np.abs(gradient).max(), 0.05 * largest)
        np.testing.assert_allclose(gradients[name], gradient, rtol=0, atol=BOUND * scale, err_msg=name)


OTHERS = ("2d",)
"""Layouts of the models that differ from another by options only."""
PAIRS = [
    (name, layout)
    for name in MODELS
    for layout in (LAYOUTS if name in FIRST else OTHERS)
    # "storage" splits the batch as well; here experts are split with it.
    if layout != "data_parallel" or name == "switch"
]


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_logits_and_gradients(name, layout):
    found = known(name)
    check(found, *ours(found, layout))


@pytest.mark.parametrize("name", ["llama_gqa", "switch", "esm2"])
def test_generated_kernels(name):
    """The same with kernels in C, where a compiler is there."""
    found = known(name)
    check(found, *ours(found, "2d", "auto"))


@pytest.mark.parametrize("name", MODELS)
def test_every_option_that_transformers_writes_is_known(name):
    """Nothing of a config that it saves is refused, though an unknown key would be."""
    values = dict(known(name).architecture.values)
    assert architecture(values).kind == known(name).architecture.kind
    with pytest.raises(ConfigError, match="sparkle=1"):
        architecture({**values, "sparkle": 1})


@pytest.mark.parametrize("name", MODELS)
def test_files_that_transformers_writes(name, tmp_path):
    """Also with legacy names, ties left out, and what no model needs."""
    model, _ = made(name)
    model.save_pretrained(tmp_path)
    found = open_model(tmp_path)
    reference = known(name)
    assert found.config == reference.architecture.config
    logits, _, _ = ours(reference, "model_parallel", checkpoint=found)
    real = reference.feeds["mask"] == 1
    bound = BOUND * np.abs(reference.logits[real]).max()
    np.testing.assert_allclose(logits[real], reference.logits[real], rtol=0, atol=bound)
