"""Protein language models of the class of ESM2: scores, embeddings, training and plans."""
