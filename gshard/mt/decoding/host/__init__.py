"""Decoding on a CPU without compiling: ONNX Runtime's matrix products, and NumPy around them.

XLA's products on CPUs read and rearrange a weight each time; ONNX Runtime arranges each weight once
and is faster the fewer rows there are, and has products in 8 bits on every processor. `translator`
has the Transformer of `gshard.nn` for decoding, tested against it, and runs the beam search of
`gshard.mt.decoding.search` with it.

ONNX Runtime would write a device's id and a queue of events for its makers into the cache folder as
soon as it is imported; it does not, unless the user has set the variable.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
