"""Massively multilingual translation, the paper's section 4: from real text to BLEU."""
