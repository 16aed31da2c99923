"""Data of translation models: pairs of sentences, their vocabulary, packed rows and BLEU."""
