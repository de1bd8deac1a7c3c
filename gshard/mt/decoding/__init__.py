"""From weights to text: beam search, and lines of any length."""
