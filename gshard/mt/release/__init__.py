"""A trained model for others: its weights in one file, its vocabularies, and a card."""
