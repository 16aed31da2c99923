"""In which order to contract three or more operands: opt_einsum's answer for local sizes.

Kept apart so that opt_einsum is imported only when such an einsum is lowered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import opt_einsum  # pyright: ignore[reportMissingTypeStubs]


def contraction_path(operands: Sequence[Mapping[str, int]], output: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of positions; each pair is taken out and its product appended, as in opt_einsum.

    Args:
        operands: For each operand, dimension name -> local size, in order.
        output: Names of the dims of the result.
    """
    letters: dict[str, str] = {}
    for operand in operands:
        for n in operand:
            letters.setdefault(n, opt_einsum.get_symbol(len(letters)))
    left = ",".join("".join(letters[n] for n in operand) for operand in operands)
    equation = f"{left}->{''.join(letters[n] for n in output)}"
    shapes = [tuple(max(1, s) for s in operand.values()) for operand in operands]
    path, _ = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize="auto")
    pairs: list[tuple[int, int]] = []
    count = len(operands)
    for step in path:
        positions = sorted(step)
        # A step may name one operand or more than two; take them pair by pair from the end.
        while len(positions) > 1:
            j, i = positions.pop(), positions.pop()
            pairs.append((i, j))
            count -= 1
            positions.append(count - 1)
        # (the product of a pair stands at the end of the list)
    return pairs
