"""What a training step computes and keeps, and the loop around it."""
