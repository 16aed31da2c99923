"""The generator: equal to computing everything again, in every layout; beams against an oracle."""

from __future__ import annotations

import doctest
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import ConfigError, DataError, LayoutError, VariableError
from meshmpi.launch.launch import launch
from meshmpi.nn.decoding import draw
from meshmpi.transformer.decoding import decoding
from meshmpi.transformer.decoding.beams import length_penalty
from meshmpi.transformer.decoding.decoding import Generator, Hypothesis, Sampling
from meshmpi.transformer.models import TransformerConfig, encoder_decoder, lm
from tests.runtime.mpi_programs import decode

ROOT = Path(__file__).parents[2]

CONFIG = TransformerConfig(
    vocab=13, length=12, d_model=8, d_ff=10, heads=4, d_kv=4, layers=1, dtype="float64", padding_id=0
)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 1, 2], [3, 3], []]
LAYOUTS = [
    ("a:1", ""),
    ("rows:2;cols:2", "heads:rows;batch:cols;vocab:rows;d_ff:rows"),
    ("rows:2;cols:2", "memory_length:cols;vocab:rows;heads:rows"),
    ("a:2", "length:a"),
]


def generator(mesh: str = "a:1", layout: str = "", batch: int = 2, **options) -> Generator:
    config = options.pop("config", CONFIG)
    options = {"vocabulary_size": 11, **options}
    return Generator(config, mm.SimulatedMesh(mesh), layout, batch=batch, **options)


class Whole:
    """Logits after any text, by the whole model in one program: the oracle of the caches."""

    def __init__(self, made: Generator, source: list[int] | None = None):
        self.length, config = made.config.length, made.config
        with mm.Graph() as graph:
            tokens = mm.placeholder("tokens", f"batch:1;length:{self.length}", "int32")
            if source is None:
                self.logits, self.feeds = lm(config, tokens), {}
            else:
                ids = mm.placeholder("source", f"batch:1;source_length:{len(source)}", "int32")
                self.logits = encoder_decoder(config, ids, tokens)
                self.feeds = {"source": np.array([source], np.int32)}
        self.step = mm.compile(graph, mm.SimulatedMesh("a:1"), fetches=[self.logits], optimize=False)
        self.step.assign({n: made.variables[n] for n in self.step.variables})
        self.known = made.vocabulary_size

    def __call__(self, text: list[int]) -> np.ndarray:
        """Log probabilities of the next token."""
        padded = np.zeros((1, self.length), np.int32)
        padded[0, : len(text)] = text
        logits = self.step(tokens=padded, **self.feeds)[self.logits].numpy()[0, len(text) - 1]
        logits[self.known :] = -1e9
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


# -- one token after the other ---------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_equals_computing_everything_again(batch: int):
    """Texts of other rows, refilled rows and padding change nothing."""
    made = generator(batch=batch)
    whole = Whole(made)
    texts = made.generate(PROMPTS, 5, sampling=Sampling(0))
    for prompt, found in zip(PROMPTS, texts, strict=True):
        text = list(prompt) or [0]
        for token in found:
            assert token == int(whole(text).argmax())
            text.append(token)
        assert len(found) == 5


def test_a_text_that_does_not_fit_is_read_again_from_its_last_half():
    made = generator(max_length=6)
    whole = Whole(made)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    (found,) = made.generate([prompt], 12, sampling=Sampling(0))
    text = prompt[-6:]
    for token in found:
        assert token == int(whole(text).argmax())
        text.append(token)
        text = text[-3:] if len(text) > 6 else text
    assert made.generate([prompt[-6:]], 12, sampling=Sampling(0)) == [found]


@pytest.mark.parametrize(
    "sampling", [Sampling(0), Sampling(1.0), Sampling(0.7, 4), Sampling(1.3, top_p=0.8), Sampling(1.0, 5, 0.7)], ids=str
)
def test_same_text_in_every_layout(sampling: Sampling):
    expected = None
    for mesh, layout in LAYOUTS[: 2 if sampling.top_p == 0.8 else None]:
        made = generator(mesh, layout, config=CONFIG.with_options(dtype="float32"))
        found = made.generate(PROMPTS, 9, sampling=sampling, stop=[7], seed=3)
        expected = found if expected is None else expected
        assert found == expected, layout
        assert all(t < 11 and t != 7 for text in found for t in text)
    assert expected is not None and len({tuple(t) for t in expected}) > 1


def test_a_row_depends_on_seed_prompt_number_and_nothing_else():
    made = generator()
    found = made.generate(PROMPTS, 6, seed=3)
    assert made.generate(PROMPTS, 6, seed=3) == found
    assert made.generate(PROMPTS, 6, seed=4) != found
    assert made.generate(PROMPTS[:2], 6, seed=3) == found[:2]
    assert generator(batch=4).generate(PROMPTS, 6, seed=3) == found
    longer = made.generate(PROMPTS, 8, seed=3)
    assert [t[:6] for t in longer] == found
    same = made.generate([[1]] * 4, 6, seed=3)
    assert len({tuple(t) for t in same}) > 1


def test_stop_tokens_and_streams():
    made = generator()
    free = made.generate(PROMPTS, 9, seed=3)
    stop = {free[0][4], free[2][1]}
    stopped = made.generate(PROMPTS, 9, seed=3, stop=sorted(stop))
    for whole, found in zip(free, stopped, strict=True):
        ends = [k for k, t in enumerate(whole) if t in stop]
        assert found == (whole[: ends[0]] if ends else whole)
    rows: dict[int, list[int]] = {}
    ended = []
    for token in made.stream(PROMPTS, 9, seed=3, stop=sorted(stop)):
        rows.setdefault(token.row, []).append(token.token)
        ended += [token.row] if token.last else []
    assert sorted(ended) == list(range(len(PROMPTS)))
    assert [[t for t in rows[k] if t not in stop] for k in range(len(PROMPTS))] == stopped
    assert made.generate(PROMPTS, 0) == [[] for _ in PROMPTS] and made.generate([], 5) == []


# -- draws -----------------------------------------------------------------------------------------

LOGITS = np.random.default_rng(2).normal(0, 2, 23)


def nucleus(top_k: int, top_p: float, temperature: float) -> np.ndarray:
    """Probabilities of draws, from their definition."""
    p = np.exp(LOGITS / temperature) / np.exp(LOGITS / temperature).sum()
    order = np.argsort(-p)[: top_k or len(p)]
    kept, total = [], p[order].sum()
    for k in order:
        if sum(p[kept]) >= top_p * total:
            break
        kept.append(k)
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


@pytest.mark.parametrize(("mesh", "layout"), [("a:1", ""), ("a:4", "vocab:a"), ("a:2", "row:a")])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (6, 1.0), (0, 0.8), (6, 0.7), (1, 1.0)])
def test_draws_have_the_right_probabilities(mesh: str, layout: str, top_k: int, top_p: float):
    rows = 4000
    with mm.Graph() as graph:
        logits = mm.placeholder("logits", f"row:{rows};vocab:{len(LOGITS)}", "float64")
        uniform = mm.placeholder("uniform", f"row:{rows}")
        temperature, p = mm.placeholder("temperature", ()), mm.placeholder("p", ())
        token = draw(logits, "vocab", uniform, temperature, p if top_p < 1 else None, top_k)
    step = mm.compile(graph, mm.SimulatedMesh(mesh), layout, fetches=[token])
    feeds = {"p": np.float32(top_p)} if top_p < 1 else {}
    evenly = (np.arange(rows) + 0.5) / rows  # so that shares are exact to one row
    found = step(
        logits=np.tile(LOGITS, (rows, 1)), uniform=evenly.astype(np.float32), temperature=np.float32(1.5), **feeds
    )[token].numpy()
    shares = np.bincount(found, minlength=len(LOGITS)) / rows
    np.testing.assert_allclose(shares, nucleus(top_k, top_p, 1.5), atol=2 / rows)


@pytest.mark.parametrize("top_p", [None, 0.999])
def test_the_largest_uniform_number_draws_a_possible_token(top_p):
    with mm.Graph() as graph:
        logits = mm.constant(0.0, "row:1;vocab:50000")
        never = mm.where(mm.less(mm.range(mm.Dimension("vocab", 50000)), 40000), logits, -1e9, logits.shape)
        uniform = mm.constant(float(np.nextafter(np.float32(1), np.float32(0))), "row:1")
        one = mm.constant(1.0, "")
        token = draw(never, "vocab", uniform, one, None if top_p is None else one * top_p)
    step = mm.compile(graph, mm.SimulatedMesh("a:1"), fetches=[token])
    assert 39000 < int(step()[token].numpy()[0]) < 40000


# -- beams -----------------------------------------------------------------------------------------


def beams_by_hand(whole, begin: list[int], beams: int, alpha: float, stop: list[int], longest: int) -> list[Hypothesis]:
    """Beam search from its definition, to the greatest length and without any early end."""
    alive, ended = [((), 0.0)], []
    for length in range(1, longest + 1):
        found = []
        for tokens, logp in alive:
            following = whole([*begin, *tokens])
            found += [((*tokens, t), logp + following[t]) for t in range(whole.known)]
        found.sort(key=lambda f: -f[1])
        alive = []
        for tokens, logp in found[: beams * (1 + len(stop))]:
            if tokens[-1] in stop:
                ended.append((tokens[:-1], logp, length, True))
            elif len(alive) < beams:
                alive.append((tokens, logp))
    ended += [(tokens, logp, longest, False) for tokens, logp in alive]
    made = [Hypothesis(t, logp / length_penalty(n, alpha), logp, e) for t, logp, n, e in ended]
    return sorted(made, key=lambda h: -h.score)[:beams]


def check_beams(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [(h.tokens, h.ended) for h in found] == [(h.tokens, h.ended) for h in expected]
    np.testing.assert_allclose([h.score for h in found], [h.score for h in expected], rtol=1e-9)
    np.testing.assert_allclose([h.log_probability for h in found], [h.log_probability for h in expected], rtol=1e-9)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0, -0.5])
@pytest.mark.parametrize("stop", [[1], [1, 4], []])
def test_beams_of_a_language_model(alpha: float, stop: list[int]):
    made = generator(batch=2)
    whole = Whole(made)
    found = made.beam_search(PROMPTS[:3], 5, beams=3, alpha=alpha, stop=stop)
    assert any(h.ended for row in found for h in row) == bool(stop)
    for prompt, row in zip(PROMPTS, found, strict=False):
        check_beams(row, beams_by_hand(whole, prompt, 3, alpha, stop, 5))


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        *LAYOUTS[:3],
        ("rows:2;cols:2", "beam:cols;heads:rows"),
        ("a:3", "beam:a"),
        ("rows:2;cols:2", "batch:rows;beam:cols"),
        ("a:3", "source_length:a"),
    ],
)
def test_beams_of_an_encoder_decoder_in_layouts(mesh: str, layout: str):
    sources = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 1, 2]]
    made = generator(mesh, layout, model="encoder_decoder", source_length=8)
    found = made.beam_search(sources, 6, beams=4, stop=[1])
    for source, row in zip(sources, found, strict=True):
        check_beams(row, beams_by_hand(Whole(made, source), [0], 4, 0.6, [1], 6))
    greedy = made.generate(sources, 6, sampling=Sampling(0))
    one = made.beam_search(sources, 6, beams=1, alpha=0.0)
    assert [list(row[0].tokens) for row in one] == greedy


def test_beams_as_many_as_there_are_texts_find_the_best_of_all():
    made = generator(vocabulary_size=5, batch=1)
    whole, longest, alpha = Whole(made), 3, 1.3
    every = []
    for n in range(longest + 1):
        for tokens in itertools.product([0, 2, 3, 4], repeat=n):
            logp, text = 0.0, [1]
            for t in tokens:
                logp, text = logp + whole(text)[t], [*text, t]
            if n < longest:
                ended = logp + whole(text)[1]
                every.append(Hypothesis(tokens, ended / length_penalty(n + 1, alpha), ended, True))
            else:
                every.append(Hypothesis(tokens, logp / length_penalty(n, alpha), logp, False))
    assert len(every) == 1 + 4 + 16 + 64
    (found,) = made.beam_search([[1]], longest, beams=len(every), alpha=alpha, stop=[1])
    check_beams(found, sorted(every, key=lambda h: -h.score))


def test_a_search_ends_as_soon_as_nothing_can_change():
    """Fewer steps than the greatest length, and the same result as without an early end."""
    config = CONFIG.with_options(length=40)
    made = generator(config=config, batch=1, vocabulary_size=4)
    whole = Whole(made)
    taken = []
    original = made._programs.beam_step
    made._programs.beam_step = lambda *a: taken.append(a) or original(*a)  # type: ignore
    (found,) = made.beam_search([[2]], 39, beams=2, alpha=0.6, stop=[1])
    assert len(taken) < 39
    check_beams(found, beams_by_hand(whole, [2], 2, 0.6, [1], 39))


# -- real ranks ------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_texts_of_real_ranks_are_those_of_one(ranks: int, tmp_path: Path):
    program = ["-m", "tests.runtime.mpi_programs.decode", str(tmp_path)]
    done = launch(ranks, program, timeout_seconds=150, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = decode.texts(mm.SimulatedMesh("a:1"), "")
    for rank in range(ranks):
        assert json.loads((tmp_path / f"rank_{rank}.json").read_text()) == expected


def test_the_examples_run():
    failed, run = doctest.testmod(decoding, extraglobs={"mm": mm})
    assert run and not failed


# -- errors ----------------------------------------------------------------------------------------


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="max_length is 13"):
        generator(max_length=13)
    with pytest.raises(ConfigError, match="no model 'lmm'"):
        generator(model="lmm")
    with pytest.raises(ConfigError, match="padding_id"):
        generator(model="encoder_decoder", config=CONFIG.with_options(padding_id=-1))
    with pytest.raises(LayoutError, match="'headz'"):
        generator("a:2", "headz:a")
    with pytest.raises(ConfigError, match="top_p 0"):
        Sampling(1.0, top_p=0.0)
    made = generator()
    with pytest.raises(DataError, match="token 1 of prompt 2 is 13"):
        made.generate([[1], [2], [3, 13]], 4)
    with pytest.raises(ConfigError, match="prompt 0 has 7 tokens; with 7 more"):
        made.beam_search([PROMPTS[2]], 7)
    translator = generator(model="encoder_decoder", source_length=4)
    with pytest.raises(DataError, match="source 1 has 7 tokens"):
        translator.generate([[1], PROMPTS[2]], 4)
    with pytest.raises(ConfigError, match="max_tokens is 13"):
        translator.generate([[1]], 13)
    with pytest.raises(VariableError, match="lack 'decoder/layer_001/attention_norm/scale' and"):
        deeper = generator(config=CONFIG.with_options(layers=2), variables=made.variables)
        deeper.generate([[1]], 2)


def test_caches_stay_out_of_the_parameters():
    made = generator()
    before = list(made.variables)
    made.generate(PROMPTS, 3)
    made.beam_search(PROMPTS[:2], 3)
    assert list(made.variables) == before and not any("cache" in n for n in before)
    assert sum("cache" in n for n in made._programs._store) == 4
