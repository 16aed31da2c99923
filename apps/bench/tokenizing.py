"""Learning a byte-pair vocabulary and encoding a text with it, beside Hugging Face's `tokenizers`.

    python -m apps.bench.tokenizing FILE [--megabytes 100] [--size 8192] [--rounds 3]

The text is that of FILE, repeated or cut to the size asked for.  Both learn from all of it and encode all of it in
pieces of 1 MB, in turns; times are processor seconds, since `tokenizers` uses all cores, and medians count.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from apps.bench.__main__ import processor_name
from meshmpi.transformer.text.sentence_pieces import SentencePieceVocabulary

PIECE = 1 << 20


def pieces_of(text: str) -> Iterator[str]:
    """Parts of about 1 MB that end with a line."""
    at = 0
    while at < len(text):
        end = text.find("\n", at + PIECE)
        end = len(text) if end < 0 else end + 1
        yield text[at:end]
        at = end


def ours(text: str, size: int) -> tuple[float, float, int]:
    """Processor seconds of learning and of encoding, and the number of tokens."""
    began = time.process_time()
    vocabulary = SentencePieceVocabulary.train(text.split("\n"), size)
    learnt = time.process_time()
    count = sum(len(vocabulary.encode(piece)) for piece in pieces_of(text))
    return learnt - began, time.process_time() - learnt, count


def theirs(text: str, size: int) -> tuple[float, float, int]:
    """The same of `tokenizers`: byte pairs of its ByteLevel words, as GPT-2's."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    began = time.process_time()
    tokenizer.train_from_iterator(text.split("\n"), trainers.BpeTrainer(vocab_size=size, show_progress=False))
    learnt = time.process_time()
    count = sum(len(tokenizer.encode(piece).ids) for piece in pieces_of(text))
    return learnt - began, time.process_time() - learnt, count


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    text, wanted = options.file.read_text(encoding="utf-8", errors="replace"), options.megabytes * 10**6
    text = (text * -(-wanted // max(1, len(text))))[:wanted]
    ways: dict[str, Callable[[str, int], tuple[float, float, int]]] = {"meshmpi": ours, "tokenizers": theirs}
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            found[name].append(way(text, options.size))
    print(f"{processor_name()}; {len(text) / 1e6:.0f} MB of {options.file.name}, {options.size} tokens")
    for name, rows in found.items():
        learning, encoding = (statistics.median(row[k] for row in rows) for k in (0, 1))
        print(f"{name:10}  learns {learning:6.1f} s  encodes {encoding:6.1f} s  {rows[0][2]:,} tokens")
    print(f"this process took {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB of memory")


if __name__ == "__main__":
    main()
