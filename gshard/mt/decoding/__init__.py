"""From weights to text: beam search, lines of any length, and the local page."""
