"""The search of `transformers`: against it token for token, and its rules worked out by hand."""

import json
import math

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.transformer.decoding.beams import Beams
from meshmpi.transformer.decoding.decoding import Generator
from meshmpi.transformer.pretrained.model import open_model
from tests.pretrained.models import MODELS

STOP = 0


def run(steps, **rule):
    """Beams that see the same log probabilities after every text: {token: probability} a step."""
    beams = Beams(2, 0.0, (STOP,), len(steps), 1.0, **rule)
    for step in steps:
        if beams.done:
            break
        ordered = sorted(step.items(), key=lambda item: -item[1])
        tokens = np.array([[t for t, _ in ordered]] * 2)
        values = np.array([[math.log(p) for _, p in ordered]] * 2)
        beams.extend(values, tokens)
    return beams


SAME = {0: 0.3, 1: 0.4, 2: 0.2, 3: 0.1}


def test_only_the_best_candidates_may_end():
    found = run([{1: 0.4, 2: 0.3, STOP: 0.2, 3: 0.1}])
    assert [(h.tokens, h.ended) for h in found.ended] == [((1,), False), ((2,), False)]


def test_early_stopping():
    steps = [{STOP: 0.5, 1: 0.3, 2: 0.2}, {STOP: 0.5, 1: 0.4, 2: 0.1}, SAME, SAME, SAME]
    first, later = run(steps, early=True), run(steps, early="never")
    assert [h.tokens for h in first.ended] == [(), (1,)] and first.done
    assert len(later.ended) == 2 and max(len(h.tokens) for h in later.ended) >= 1


def made(folder, name, ends):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    kind, model, options = MODELS[name]
    torch.manual_seed(3)
    found = getattr(transformers, model)(getattr(transformers, kind)(**options)).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.25)
    found.generation_config.eos_token_id = ends
    found.generation_config.pad_token_id = 0
    found.save_pretrained(folder)
    return torch, found


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("power", [1.0, 0.0, 2.0])
@pytest.mark.parametrize(("name", "ends"), [("gpt2", [2, 5]), ("t5", [1])])
def test_beams_of_transformers(tmp_path, name, ends, power, early):
    torch, theirs = made(tmp_path, name, ends)
    model = open_model(tmp_path)
    assert list(model.ends) == ends
    prompts = [[3, 4, 7], [8, 6, 9], [11, 10, 12]]
    start = model.special.get("decoder_start")
    ours = Generator(
        model.config,
        mm.SimulatedMesh("a:1"),
        model=model.kind,
        batch=3,
        max_length=12,
        source_length=3,
        start=start,
        kernels="numpy",
    )
    model.load(ours.variables)
    found = ours.beam_search(prompts, 8, beams=3, stop=model.ends, power=power, early_stopping=early)
    for prompt, beams in zip(prompts, found, strict=True):
        wanted = theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=8,
            num_beams=3,
            num_return_sequences=3,
            length_penalty=power,
            early_stopping=early,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            attention_mask=torch.ones(1, len(prompt), dtype=int),
        )
        skip = len(prompt) if model.kind == "lm" else 1
        for beam, row, score in zip(beams, wanted.sequences, wanted.sequences_scores, strict=True):
            tokens = row[skip:].tolist()
            end = next((k for k, t in enumerate(tokens) if t in ends), len(tokens))
            assert list(beam.tokens) == tokens[:end]
            assert beam.score == pytest.approx(float(score), rel=1e-3)


def test_a_generation_config_counts_and_is_checked(tmp_path):
    from tests.pretrained.test_commands import GPT2
    from tests.pretrained.test_commands import made as written

    written(tmp_path, {**GPT2, "eos_token_id": [256, 7]})
    assert open_model(tmp_path).ends == (256, 7)
    beside = tmp_path / "generation_config.json"
    beside.write_text(json.dumps({"eos_token_id": [5, 9], "bos_token_id": 3}))
    model = open_model(tmp_path)
    assert model.ends == (5, 9) and model.special["bos"] == 3
    for bad in ({"eos_token_id": "5"}, {"eos_token_id": [True]}, {"early_stopping": 3}, [1]):
        beside.write_text(json.dumps(bad))
        with pytest.raises(mm.CheckpointError, match=r"generation_config.json"):
            open_model(tmp_path)
