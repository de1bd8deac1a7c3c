"""BLEU by language, and the bilingual baselines to hold it against."""
