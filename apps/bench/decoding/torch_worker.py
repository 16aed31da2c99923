"""Worker of the peers' environment: greedy continuations by transformers on PyTorch."""

from __future__ import annotations

import torch
import transformers

from apps.bench.decoding import inputs
from apps.bench.step.yardstick import emit, pin


def main() -> None:
    """Continues the prompts again and again, with its cache of keys and values."""
    parser = inputs.options()
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.threads == 1:
        pin(0)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.GPT2LMHeadModel.from_pretrained(options.model).eval()
    prompts = torch.from_numpy(inputs.prompts(options.batch, options.prompt, options.vocab))
    mask = torch.ones_like(prompts)

    def generate() -> list[list[int]]:
        found = model.generate(
            prompts,
            attention_mask=mask,
            max_new_tokens=options.new,
            min_new_tokens=options.new,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
        return found[:, options.prompt :].tolist()

    with torch.inference_mode():
        found = inputs.measured(generate, options.steps)
    version = f"transformers {transformers.__version__} on torch {torch.__version__}"
    emit(rank=0, version=version, **found)


if __name__ == "__main__":
    main()
