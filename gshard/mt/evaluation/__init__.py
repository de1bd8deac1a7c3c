"""BLEU by language, and the bilingual baselines to compare it with."""
