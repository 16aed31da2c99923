"""Making text: sampling and beam search."""
