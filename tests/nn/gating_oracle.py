"""Algorithm 1 as the paper writes it: a loop over tokens, in plain Python and NumPy.

Gates, second choices and random numbers come from outside, so that this file holds only decisions.
"""

from __future__ import annotations

import numpy as np


def gate_group(gates, second, uniform, real, capacity, *, top_k=2, policy="random"):
    """One group: combine weights {(s, e, c): weight}, and the counts behind the metrics."""
    S, E = gates.shape
    count = [0] * E
    taken = {}
    first_choices = [0] * E
    overflow = [0, 0]
    asked = [0, 0]
    for s in range(S):
        if not real[s]:
            continue
        e1 = int(np.argmax(gates[s]))
        g1 = gates[s, e1]
        if top_k == 2:
            g1 = g1 / (gates[s, e1] + gates[s, second[s]] + np.float32(1e-9))
        asked[0] += 1
        first_choices[e1] += 1
        if count[e1] < capacity:
            taken[s, e1, count[e1]] = g1
            count[e1] += 1
        else:
            overflow[0] += 1
    for s in range(S):
        if not real[s] or top_k == 1:
            continue
        e1, e2 = int(np.argmax(gates[s])), int(second[s])
        g2 = gates[s, e2] / (gates[s, e1] + gates[s, e2] + np.float32(1e-9))
        if policy == "random" and not uniform[s] < 2 * g2:
            continue
        asked[1] += 1
        if count[e2] < capacity:
            taken[s, e2, count[e2]] = g2
            count[e2] += 1
        else:
            overflow[1] += 1
    n = max(int(np.sum(real)), 1)
    mean_gates = [sum(gates[s, e] for s in range(S) if real[s]) / n for e in range(E)]
    paper_aux = sum(first_choices[e] / n * mean_gates[e] for e in range(E)) / E
    return taken, count, overflow, asked, paper_aux


def best_second(gates):
    """The best expert after the first, ties to the lower index."""
    rest = gates.copy()
    for s in range(len(gates)):
        rest[s, np.argmax(gates[s])] = -np.inf
    return rest.argmax(-1)
