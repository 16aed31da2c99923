"""Choosing tokens from logits: drawing, and the candidates of beams."""

from meshmpi.nn.decoding.choosing import beam_candidates, draw, most_probable

__all__ = ["beam_candidates", "draw", "most_probable"]
