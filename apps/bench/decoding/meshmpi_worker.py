"""Worker: greedy continuations by meshmpi, one rank of it; started by the launcher."""

from __future__ import annotations

import meshmpi as mm
from apps.bench.decoding import inputs
from apps.bench.step.yardstick import emit
from meshmpi.transformer.decoding.decoding import Generator, Sampling
from meshmpi.transformer.pretrained.model import open_model


def main() -> None:
    """Continues the prompts again and again and prints this rank's result."""
    parser = inputs.options()
    parser.add_argument("--layout", default="")
    parser.add_argument("--mesh", required=True)
    options = parser.parse_args()
    mesh = mm.Mesh(options.mesh)
    model = open_model(options.model)
    made = Generator(
        model.config,
        mesh,
        options.layout,
        batch=options.batch,
        max_length=options.prompt + options.new,
        kernels="native",
    )
    model.load(made.variables)
    prompts = inputs.prompts(options.batch, options.prompt, options.vocab).tolist()
    found = inputs.measured(lambda: made.generate(prompts, options.new, sampling=Sampling(0)), options.steps)
    emit(rank=mesh.rank, **found)


if __name__ == "__main__":
    main()
