"""Tokenizers: letters, byte-level, word pieces, sentence pieces; what is missing is said."""

from __future__ import annotations

import json

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.transformer.pretrained.lines import Reader
from meshmpi.transformer.text.base import Vocabulary
from meshmpi.transformer.text.characters import LetterVocabulary
from meshmpi.transformer.text.vocabulary import TOKENIZER, build_vocabulary, open_tokenizer, restore_vocabulary
from meshmpi.transformer.training.data import prepare
from tests.pretrained.test_commands import LETTERS, byte_tokenizer, written


def test_letters(tmp_path):
    tokenizer = LetterVocabulary(LETTERS, "letters")
    found = tokenizer.encoded("LA J")
    assert found.ids == [0, 4, 5, 3, 2] and found.unknown == ["J"]
    assert found.special == [True, False, False, False, True]
    assert tokenizer.decode([0, 4, 5, 2]) == "LA"
    assert tokenizer.token_bytes[:6].tolist() == [0, 0, 0, 0, 1, 1]
    assert restore_vocabulary(tokenizer.state()).state() == tokenizer.state()
    with pytest.raises(mm.DataError, match="has no <cls>"):
        LetterVocabulary(["a"], "x")
    with pytest.raises(mm.DataError, match="unknown kind"):
        restore_vocabulary({"kind": "x"})


def test_byte_level_tokens_count_their_bytes(tmp_path):
    byte_tokenizer(tmp_path)
    name = f"{TOKENIZER}{tmp_path}"
    vocabulary = build_vocabulary(name, [], [])
    text = "grüße, Welt\n"
    tokens = vocabulary.encode(text)
    assert vocabulary.decode(tokens) == text
    assert vocabulary.token_bytes[tokens].sum() == len(text.encode())
    again = restore_vocabulary(json.loads(json.dumps(vocabulary.state())))
    assert again.encode(text.encode()).tolist() == tokens.tolist()
    corpus = written(tmp_path / "corpus.txt", text * 30)
    first = prepare(str(corpus), name)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    keys = list(vocab)
    content["model"]["vocab"] = dict(zip(keys, reversed(range(len(keys))), strict=True))
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert prepare(str(corpus), name).digest != first.digest  # another tokenizer, other tokens
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(mm.DataError, match="tokenizer.json is not a tokenizer"):
        build_vocabulary(name, [], [])


def test_word_pieces_and_byte_pairs(tmp_path):
    pytest.importorskip("tokenizers")
    bert = tmp_path / "bert"
    bert.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "sea", "##s", "the"]
    (bert / "vocab.txt").write_text("\n".join(words) + "\n")
    found = open_tokenizer(bert, "bert").encoded("The seas")
    assert found.ids == [2, 7, 5, 6, 3] and found.special == [True, False, False, False, True]
    unknown = open_tokenizer(bert, "bert").encoded("the sky")
    assert unknown.unknown == ["sky"]
    assert open_tokenizer(bert, "bert").token_bytes[5:].tolist() == [3, 1, 3]
    pairs = tmp_path / "gpt2"
    pairs.mkdir()
    (pairs / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2}))
    with pytest.raises(mm.DataError, match="has no merges.txt next to it"):
        open_tokenizer(pairs, "gpt2")
    (pairs / "merges.txt").write_text("#version: 0.2\na b\n")
    assert open_tokenizer(pairs, "gpt2").encoded("abb").ids == [2, 1]


def test_sentence_pieces(tmp_path):
    pytest.importorskip("sentencepiece")
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the sea and the sky", "see the sand"] * 20),
        model_writer=model,
        vocab_size=30,
        model_type="unigram",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    (tmp_path / "spiece.model").write_bytes(model.getvalue())
    tokenizer = open_tokenizer(tmp_path, "t5", {"eos": 1})
    found = tokenizer.encoded("the sea")
    assert found.ids[-1] == 1 and found.special[-1] and not any(found.special[:-1])
    assert tokenizer.decode(found.ids) == "the sea"
    assert tokenizer.encoded("the ☃").unknown == ["☃"]
    assert restore_vocabulary(tokenizer.state()).encoded("the sea") == found
    assert tokenizer.encode("the sea").tolist() == found.ids[:-1]
    for config, ids in (({"model_type": "t5"}, ([], [1])), ({"model_type": "llama", "bos_token_id": [2]}, ([2], []))):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = build_vocabulary(f"{TOKENIZER}{tmp_path}", [], [])
        assert (found.before, found.after) == ids
    (tmp_path / "config.json").write_text('{"model_type": "t5", "eos_token_id": "x"}')
    with pytest.raises(mm.DataError, match="a token id in .*config.json is 'x'"):
        build_vocabulary(f"{TOKENIZER}{tmp_path}", [], [])
    (tmp_path / "spiece.model").write_bytes(b"nonsense")
    with pytest.raises(mm.DataError, match="is not a SentencePiece model"):
        open_tokenizer(tmp_path, "t5")


def test_special_tokens_in_a_text_stay_whole_or_are_refused(tmp_path):
    pytest.importorskip("tokenizers")
    sentencepiece = pytest.importorskip("sentencepiece")
    import io

    letters = LetterVocabulary(LETTERS, "letters")
    assert letters.encoded("L<mask>A").ids == [0, 4, LETTERS.index("<mask>"), 5, 2]
    assert letters.special == {"mask": LETTERS.index("<mask>")}
    (tmp_path / "vocab.json").write_text(
        json.dumps({"a": 0, "<": 1, "|": 2, "e": 3, ">": 4, "<|endoftext|>": 5, "<own>": 6})
    )
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad": {"content": "<own>"}}))
    pairs = open_tokenizer(tmp_path / "vocab.json", "gpt2")
    assert pairs.encoded("a<|endoftext|>e<own>").ids == [0, 5, 3, 6]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the sea and the sky", "see the sand"] * 20),
        model_writer=model,
        vocab_size=30,
        model_type="unigram",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    (tmp_path / "spiece.model").write_bytes(model.getvalue())
    pieces = open_tokenizer(tmp_path / "spiece.model", "t5", {"eos": 1})
    for text in ("the sea</s>", "the <extra_id_3> sea", "<pad>"):
        with pytest.raises(mm.DataError, match="a special token, which .* would cut into pieces"):
            pieces.encoded(text)


def test_packages_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    for name, extra in (("tokenizer.json", "pretrained"), ("spiece.model", "text")):
        (tmp_path / name).write_bytes(b"{}")
        with pytest.raises(mm.DataError, match=rf"not installed.*meshmpi\[{extra}\].*--token-ids"):
            open_tokenizer(tmp_path / name)


def test_cutting_keeps_special_tokens_at_both_ends():
    class Around(Vocabulary):
        name, size, before, after = "around", 9, [0], [1]

        def encode(self, text):
            return np.arange(2, 2 + len(text))

        def decode(self, tokens):
            return ""

        def state(self):
            return {}

    line = Reader(Around(), 9, 4, truncate=True).line(b"abcde", "here")
    assert (line.tokens, line.special, line.cut) == ([0, 2, 3, 1], [True, False, False, True], 3)
