"""The paper's section 9: a Transformer language model, at any size and in any layout."""
