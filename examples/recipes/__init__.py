"""The usual ways to train on many devices, one short file each: annotations, and what they send.

    python -m examples.recipes.fsdp        one recipe's table of collectives
    python -m benchmarks.recipes           all of them, beside XLA and an expert's program by hand

Every file has the training step as a user would write it, and the bytes that an expert would send.
"""
