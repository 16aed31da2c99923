"""Checkpoints that `transformers` wrote, and checkpoints that it reads: files, ranks, bits."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import meshmpi as mm
from meshmpi.launch.launch import launch
from meshmpi.transformer.pretrained import load, save, suggested_layout
from meshmpi.transformer.pretrained.lines import Line
from meshmpi.transformer.pretrained.model import Model, open_model
from meshmpi.transformer.pretrained.scoring import Scorer
from tests.pretrained.bridge import LAYOUTS, compiled, feeds_of
from tests.pretrained.models import MODELS, made

BOUND = 2e-5
"""Allowed share of the largest logit: float32 sums in other orders."""
SHARD = 3000
"""Bytes of a shard: several for each model."""
PAIRS = [(model, layout) for m, model in enumerate(MODELS) for n, layout in enumerate(LAYOUTS) if (m - n) % 2 == 0]
"""Every model in two layouts."""
ON_RANKS = ("gpt2", "t5_v1_1", "esm2")


def theirs(model, feeds) -> np.ndarray:
    import torch

    call = {"input_ids": "tokens", "attention_mask": "mask"}
    if "source" in feeds:
        call = {
            "input_ids": "source",
            "attention_mask": "source_mask",
            "decoder_input_ids": "tokens",
            "decoder_attention_mask": "mask",
        }
    with torch.no_grad():
        return model(**{k: torch.tensor(feeds[v]).long() for k, v in call.items()}).logits.numpy()


def check_logits(found: np.ndarray, feeds, expected: np.ndarray) -> None:
    real = feeds["mask"] == 1
    bound = BOUND * np.abs(expected[real]).max()
    np.testing.assert_allclose(found[real], expected[real], rtol=0, atol=bound)


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    """A model of transformers, and its files: one, and several."""
    model, _ = made(request.param)
    folder = tmp_path_factory.mktemp("models") / request.param
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "several", max_shard_size=SHARD)
    assert len(list((folder / "several").glob("*.safetensors"))) > 1
    return model, folder


@pytest.mark.parametrize(("saved", "layout"), PAIRS, indirect=["saved"])
def test_files_to_logits_and_back(saved, tmp_path, layout):
    import torch
    import transformers

    reference, folder = saved
    mesh, rules, storage = LAYOUTS[layout]
    files, most = ("one", SHARD) if layout in ("replicated", "2d") else ("several", None)
    model = open_model(folder / files)
    step = compiled(model, mm.SimulatedMesh(mesh), rules, storage)
    load(step, model.architecture, folder / files)
    feeds = feeds_of(model)
    check_logits(np.asarray(step(feeds)["logits"]), feeds, theirs(reference, feeds))
    out = save(step, model.architecture, tmp_path / "out", max_shard_bytes=most, like=folder / files)
    again, report = type(reference).from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    for key, value in reference.named_parameters():
        assert torch.equal(value, again.get_parameter(key)), key
    config = transformers.AutoConfig.from_pretrained(out)
    assert config.model_type == reference.config.model_type


def test_scores_are_those_of_transformers(saved):
    import torch

    reference, folder = saved
    if "switch" in folder.name:
        pytest.skip("experts drop tokens by what else is in a batch")
    model = open_model(folder / "one")
    draw = np.random.default_rng(5)
    lines = []
    for number, n in enumerate((5, 3, 7, 16)):
        tokens = [int(t) for t in draw.integers(3, model.config.vocab - 1, n)]
        source = [int(t) for t in draw.integers(3, model.config.vocab, 2 * n % 11 + 1)]
        special = [False] * n
        special[0] = model.kind == "encoder"
        lines.append(Line(number + 1, tokens, special, source))
    if model.kind == "encoder" and "mask" not in model.special:
        with pytest.raises(mm.ConfigError, match="no mask_token_id"):
            list(Scorer(model, mm.SimulatedMesh("all:1")).scores(lines))
        return
    layout = suggested_layout(model.config, "rows:2;cols:2", "2d")
    found = Scorer(model, mm.SimulatedMesh("rows:2;cols:2"), *layout, batch=3).scores(lines)
    for score, line in zip(found, lines, strict=True):
        expected, count = 0.0, 0
        for tokens, targets, source in _asked(model, line):
            feeds = {"tokens": np.array([tokens]), "mask": np.ones((1, len(tokens)))}
            if source:
                feeds |= {"source": np.array([source]), "source_mask": np.ones((1, len(source)))}
            logits = torch.log_softmax(torch.tensor(theirs(reference, feeds)[0]), -1).numpy()
            expected += sum(logits[i, t] for i, t in targets)
            count += len(targets)
        assert (score.number, score.tokens) == (line.number, count)
        np.testing.assert_allclose(score.log_likelihood, expected, rtol=1e-4)


def _asked(model: Model, line: Line):
    """(tokens in, [(position, target)], source) of each call that a score consists of."""
    if model.kind == "lm":
        yield line.tokens[:-1], list(enumerate(line.tokens[1:])), []
    elif model.kind == "encoder_decoder":
        start = model.special["decoder_start"]
        yield [start, *line.tokens[:-1]], list(enumerate(line.tokens)), line.source
    else:
        for k in range(1, len(line.tokens)):
            hidden = [*line.tokens]
            hidden[k] = model.special["mask"]
            yield hidden, [(k, line.tokens[k])], []


def test_bfloat16_files(tmp_path):
    import torch

    reference, _ = made("llama")
    reference = reference.to(torch.bfloat16)
    reference.save_pretrained(tmp_path / "model")
    model = open_model(tmp_path / "model")
    step = compiled(model, mm.SimulatedMesh("all:2"), "heads:all;d_ff:all")
    load(step, model.architecture, tmp_path / "model")
    save(step, model.architecture, tmp_path / "out", dtype="bfloat16")
    again = type(reference).from_pretrained(tmp_path / "out")
    for key, value in reference.named_parameters():
        there = again.get_parameter(key)
        assert there.dtype == torch.bfloat16 and torch.equal(value, there), key


# ---- under mpirun ----------------------------------------------------------------------------

SCRIPT = """
import sys
import numpy as np
import meshmpi as mm
from meshmpi.transformer.pretrained import load, save
from meshmpi.transformer.pretrained.model import open_model
from tests.pretrained.bridge import LAYOUTS, compiled, feeds_of
folder, layout, *names = sys.argv[1:]
mesh, rules, storage = LAYOUTS[layout]
for name in names:
    model = open_model(f"{folder}/{name}")
    step = compiled(model, mm.Mesh(mesh), rules, storage)
    report = load(step, model.architecture, f"{folder}/{name}")
    held = sum(b.nbytes for x in step.variables.blocks.values() for b in x.values())
    assert report.bytes_read == held, (report.bytes_read, held)
    found = step(feeds_of(model))["logits"].numpy()
    if step.mesh.rank == 0:
        np.save(f"{folder}/{name}-{layout}.npy", found)
    save(step, model.architecture, f"{folder}/{name}-{layout}", max_shard_bytes=3000,
         like=f"{folder}/{name}")
"""


@pytest.mark.matrix
@pytest.mark.parametrize(("ranks", "layout"), [(2, "model_parallel"), (4, "2d")])
def test_under_mpirun(tmp_path, ranks, layout):
    import torch

    references = {}
    for name in ON_RANKS:
        references[name], _ = made(name)
        references[name].save_pretrained(tmp_path / name, max_shard_size=SHARD)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = launch(
        ranks,
        [str(script), str(tmp_path), layout, *ON_RANKS],
        timeout_seconds=240,
        capture_output=True,
        environment={"PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stderr
    for name, reference in references.items():
        feeds = feeds_of(open_model(tmp_path / name))
        expected = theirs(reference, feeds)
        check_logits(np.load(tmp_path / f"{name}-{layout}.npy"), feeds, expected)
        again = type(reference).from_pretrained(tmp_path / f"{name}-{layout}")
        for key, value in reference.named_parameters():
            assert torch.equal(value, again.get_parameter(key)), (name, key)
        about = json.loads((tmp_path / f"{name}-{layout}" / "config.json").read_text())
        assert about["dtype"] == "float32"
