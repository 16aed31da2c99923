"""Under mpirun: texts drawn and searched by a language model and an encoder-decoder, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import meshmpi as mm
from meshmpi.transformer.decoding.decoding import Generator, Sampling
from meshmpi.transformer.models import TransformerConfig, lm

CONFIG = TransformerConfig(vocab=13, length=12, d_model=8, d_ff=10, heads=4, d_kv=4, layers=1, padding_id=0)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 1, 2], [3, 3]]
MESHES = {
    1: ("a:1", ""),
    2: ("a:2", "heads:a;vocab:a;d_ff:a"),
    4: ("rows:2;cols:2", "batch:rows;memory_length:cols;vocab:cols;d_ff:cols"),
}
"""Ranks -> mesh and layout."""


def texts(mesh: Any, layout: str) -> dict[str, Any]:
    """All that is compared; equal on every rank, mesh and layout."""
    out: dict[str, Any] = {}
    for model in ("lm", "encoder_decoder"):
        made = Generator(CONFIG, mesh, layout, model=model, batch=2, source_length=8, vocabulary_size=11)
        out[model] = [
            made.generate(PROMPTS, 6, sampling=sampling, stop=[7], seed=5)
            for sampling in (Sampling(0), Sampling(1.0), Sampling(0.8, 5, 0.9))
        ]
        beams = made.beam_search(PROMPTS, 5, beams=3, stop=[7])
        out[f"{model} beams"] = [[list(h.tokens) for h in row] for row in beams]
    return out


def decodes_by_variables_of_a_step(mesh: Any) -> None:
    """The variables of another step, which a host holds once, as those of a training, make the same texts."""
    config = CONFIG.with_options(d_model=512)
    with mm.Graph() as graph:
        logits = lm(config, mm.placeholder("tokens", "batch:2;length:1", "int32"))
    step = mm.compile(graph, mesh, fetches=[logits])
    assert step.program.variables["decoder/embedding"].type.used_axes
    found = []
    for variables in (step.variables, None):
        made = Generator(config, mesh, "", batch=2, vocabulary_size=11, variables=variables)
        found.append(made.generate(PROMPTS, 6, sampling=Sampling(0), stop=[7], seed=5))
    assert found[0] == found[1]


def main(folder: Path) -> None:
    """Every rank writes what it has found."""
    from mpi4py import MPI

    name, layout = MESHES[MPI.COMM_WORLD.size]
    mesh = mm.Mesh(name)
    found = texts(mesh, layout)
    decodes_by_variables_of_a_step(mesh)
    (folder / f"rank_{mesh.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
