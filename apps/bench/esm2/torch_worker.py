"""Worker of the peers' environment: logits of an ESM2 by transformers on PyTorch."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers

from apps.bench.esm2 import inputs
from apps.bench.step.yardstick import emit, pin


def main() -> None:
    """Runs the batch again and again and prints the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.threads == 1:
        pin(0)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.EsmForMaskedLM.from_pretrained(options.model).eval()
    tokens = torch.from_numpy(inputs.tokens(options.batch, options.length)).long()
    mask = (tokens != inputs.PAD).long()
    with torch.inference_mode():
        seconds = inputs.timed(lambda: model(tokens, mask).logits, options.steps)
        found = model(tokens, mask).logits.numpy()
    version = f"transformers {transformers.__version__} on torch {torch.__version__}"
    emit(rank=0, seconds=seconds, checked=inputs.checked(found), version=version)


if __name__ == "__main__":
    main()
