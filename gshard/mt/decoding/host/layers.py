"""The layers of the Transformer on a CPU: attention in NumPy, everything with weights in graphs.

Dims: B sentences, K tokens of each, R = B * K rows, M model dim, N heads, D key and U value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gshard.mt.decoding.host.products import (
    ZERO,
    Graph,
    Output,
    Rows,
    Session,
    Weight,
    floats,
)
from gshard.mt.decoding.texts import Choices
from gshard.mt.training.quantized import Quantized
from gshard.nn.config import TransformerConfig

Weights = Callable[[str], Weight]  # by name within a layer


@dataclass
class Cache:
    """Keys and values of one attention, heads before positions, as products read them.

    Memory beyond `length` is allocated and not touched, so that it costs nothing.
    """

    keys: np.ndarray  # [B, N, L, D]
    values: np.ndarray  # [B, N, L, U]
    length: int = 0

    @staticmethod
    def empty(sentences: int, length: int, c: TransformerConfig) -> Cache:
        """Room for `length` positions."""
        shape = (sentences, c.heads, length)
        return Cache(
            np.empty((*shape, c.key_dim), np.float32), np.empty((*shape, c.value_dim), np.float32)
        )

    def write(self, keys_BKX: np.ndarray, values_BKX: np.ndarray) -> None:
        """Append positions."""
        end = self.length + keys_BKX.shape[1]
        for into, new in ((self.keys, keys_BKX), (self.values, values_BKX)):
            N, dim = into.shape[1], into.shape[3]
            into[:, :, self.length : end] = _heads(new, N, dim)
        self.length = end

    def keep(self, rows: np.ndarray) -> None:
        """Only these sentences."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = np.empty((len(rows), *old.shape[1:]), np.float32)
            new[:, :, : self.length] = old[rows, :, : self.length]
            setattr(self, name, new)


def attend(q_BKX: np.ndarray, cache: Cache, hidden_BKL: np.ndarray) -> np.ndarray:
    """Attention from scaled queries to a cache, [R, N * U]; `hidden_BKL` is added to the scores."""
    keys, values = (x[:, :, : cache.length] for x in (cache.keys, cache.values))
    B, N, _, D = keys.shape
    scores_BNKL = _heads(q_BKX, N, D) @ keys.swapaxes(2, 3)
    scores_BNKL += hidden_BKL[:, None]
    scores_BNKL -= scores_BNKL.max(axis=3, keepdims=True)
    np.exp(scores_BNKL, out=scores_BNKL)
    sums_BNK1 = scores_BNKL.sum(axis=3, keepdims=True)
    out_BNKU = scores_BNKL @ values
    out_BNKU /= sums_BNK1
    return out_BNKU.swapaxes(1, 2).reshape(B * q_BKX.shape[1], -1)


def _heads(x_BKX: np.ndarray, heads: int, dim: int) -> np.ndarray:
    return x_BKX.reshape(*x_BKX.shape[:2], heads, dim).swapaxes(1, 2)


class Layer:
    """One layer; `cross` has weights where it belongs to the decoder."""

    def __init__(self, weights: Weights, c: TransformerConfig, *, cross: bool, sparse: bool):
        self._ends = (c.heads * c.key_dim, 2 * c.heads * c.key_dim)  # of queries and keys
        self._project = _projections(weights, c, "self", ("wq", "wk", "wv"))
        self._after_self = _after(weights, c, "self", "cross") if cross else None
        last = "cross" if cross else "self"
        self._feed_forward: Session | None = None
        self._experts: Experts | None = None
        if sparse:
            self._experts = Experts(weights, c, last)
        else:
            self._feed_forward = _feed_forward(weights, c, last)

    def record(self, listener: Listener | None) -> None:
        """Have the choices of a router told to `listener`, or to nobody again."""
        if self._experts is not None:
            self._experts.listener = listener

    def own(self, x_RM: np.ndarray) -> list[np.ndarray]:
        """Queries, keys and values of self-attention."""
        (joint_RX,) = self._project(x_RM)
        first, second = self._ends
        return [joint_RX[:, :first], joint_RX[:, first:second], joint_RX[:, second:]]

    def queries(self, x_RM: np.ndarray, out_RX: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows after self-attention, and the queries of cross-attention."""
        assert self._after_self is not None
        x_RM, q_RX = self._after_self(x_RM, out_RX)
        return x_RM, q_RX

    def finish(self, x_RM: np.ndarray, out_RX: np.ndarray) -> np.ndarray:
        """The rows after the last attention and the feed-forward layer."""
        if self._experts is not None:
            return self._experts(x_RM, out_RX)
        assert self._feed_forward is not None
        (x_RM,) = self._feed_forward(x_RM, out_RX)
        return x_RM


Listener = Callable[[Choices], None]


class Experts:
    """A layer with experts: those that a row needs are run on their rows, and no others."""

    def __init__(self, weights: Weights, c: TransformerConfig, last: str):
        self.listener: Listener | None = None
        graph = Graph()
        x, h = _residual(graph, weights, c, last)
        logits = graph.product(h, floats(weights("moe.gate")))
        expert, weight = choices(graph, logits, c.gating.top_k)
        outputs = [Output(h)]
        if isinstance(weights("moe.experts.wi"), Quantized):  # once for all experts
            rows = graph.quantized(h)
            outputs = [Output(rows.values, "uint8"), Output(rows.scale)]
        if c.shared_hidden_dim:
            x = graph.add("Add", x, _two_products(graph, h, weights, c))
        self._before = graph.compile(x, Output(expert, "int64"), weight, *outputs)
        leaves = ("wi", "wo", "bi", "bo") if c.biases else ("wi", "wo")
        found = [weights(f"moe.experts.{leaf}") for leaf in leaves]
        self._each = [_expert(*(leaf[n] for leaf in found)) for n in range(c.experts)]

    def __call__(self, x_RM: np.ndarray, out_RX: np.ndarray) -> np.ndarray:
        """The rows after the last attention and the experts."""
        x_RM, expert_RC, weight_RC, *read = self._before(x_RM, out_RX)
        if self.listener is not None:
            self.listener(Choices(expert_RC.T, weight_RC.T))
        # Y = R * C choices, in the order of their experts: each expert reads adjacent rows.
        order_Y = np.argsort(expert_RC, axis=None, kind="stable")
        inputs = [given[order_Y // expert_RC.shape[1]] for given in read]
        count_E = np.bincount(expert_RC.reshape(-1))
        end_E = np.cumsum(count_E).tolist()
        found: list[np.ndarray] = []
        for expert in np.flatnonzero(count_E).tolist():
            begin, end = end_E[expert - 1] if expert else 0, end_E[expert]
            found += self._each[expert](*(given[begin:end] for given in inputs))
        y_YM = np.empty((len(order_Y), x_RM.shape[1]), np.float32)
        y_YM[order_Y] = np.concatenate(found)
        y_RCM = y_YM.reshape(*expert_RC.shape, -1)
        y_RCM *= weight_RC[:, :, None]
        for choice in range(expert_RC.shape[1]):
            x_RM += y_RCM[:, choice]
        return x_RM


def choices(graph: Graph, logits: str, top_k: int) -> tuple[str, str]:
    """Each row's experts and their weights, as `gshard.nn.gating.route` without a capacity."""
    gates = graph.add("Softmax", logits, axis=-1)
    weight, expert = graph.add("TopK", gates, graph.constant(np.array([top_k])), outputs=2)
    if top_k > 1:
        total = graph.add("ReduceSum", weight, graph.constant(np.array([-1])))
        total = graph.add("Add", total, graph.constant(np.float32(1e-9)))
        weight = graph.add("Div", weight, total)
    return expert, weight


def _norm(graph: Graph, x: str, weights: Weights, name: str) -> str:
    return graph.norm(x, weights(f"{name}_norm.scale"), weights(f"{name}_norm.bias"))


def _projections(
    weights: Weights, c: TransformerConfig, kind: str, names: tuple[str, ...]
) -> Session:
    """The normalized rows times the weights of queries, keys and values side by side."""
    graph = Graph()
    h = _norm(graph, graph.input("x"), weights, kind)
    return graph.compile(graph.product(h, *side_by_side(weights, c, kind, names)))


def side_by_side(
    weights: Weights, c: TransformerConfig, kind: str, names: tuple[str, ...]
) -> tuple[Weight, Weight | None]:
    """Weights of projections as one, [M, outputs], and their bias; queries are scaled."""
    found = [weights(f"{kind}_attention.{name}").reshape(c.model_dim, -1) for name in names]
    scales = [np.float32(c.key_dim**-0.5 if name == "wq" else 1) for name in names]
    both = list(zip(found, scales, strict=True))
    bias = None
    if c.biases:
        flat = (floats(weights(f"{kind}_attention.b{name[1:]}")).reshape(-1) for name in names)
        bias = np.concatenate([b * by for b, by in zip(flat, scales, strict=True)])
    quantized = [Quantized(w.values, w.scale * by) for w, by in both if isinstance(w, Quantized)]
    if not quantized:
        return np.concatenate([floats(w) * by for w, by in both], axis=1), bias
    joint = Quantized(
        np.concatenate([w.values for w in quantized], axis=1),
        np.concatenate([w.scale for w in quantized], axis=1),
    )
    return joint, bias


def _bias(weights: Weights, c: TransformerConfig, name: str) -> Weight | None:
    return weights(name) if c.biases else None


def _added(graph: Graph, weights: Weights, c: TransformerConfig, kind: str) -> str:
    """The rows after an attention."""
    x, out = graph.input("x"), graph.input("out")
    wo = weights(f"{kind}_attention.wo").reshape(-1, c.model_dim)
    return graph.add("Add", x, graph.product(out, wo, _bias(weights, c, f"{kind}_attention.bo")))


def _residual(graph: Graph, weights: Weights, c: TransformerConfig, kind: str) -> tuple[str, str]:
    """The rows after an attention, and these normalized for the feed-forward layer."""
    x = _added(graph, weights, c, kind)
    return x, _norm(graph, x, weights, "feed_forward")


def _after(weights: Weights, c: TransformerConfig, kind: str, following: str) -> Session:
    """From the result of one attention to the queries of the next."""
    graph = Graph()
    x = _added(graph, weights, c, kind)
    h = _norm(graph, x, weights, following)
    return graph.compile(x, graph.product(h, *side_by_side(weights, c, following, ("wq",))))


def _feed_forward(weights: Weights, c: TransformerConfig, last: str) -> Session:
    graph = Graph()
    x, h = _residual(graph, weights, c, last)
    return graph.compile(graph.add("Add", x, _two_products(graph, h, weights, c)))


def _two_products(graph: Graph, h: str, weights: Weights, c: TransformerConfig) -> str:
    given = (weights("feed_forward.wi"), weights("feed_forward.wo"))
    biases = (_bias(weights, c, f"feed_forward.{leaf}") for leaf in ("bi", "bo"))
    return _through(graph, h, *given, *biases)


def _through(
    graph: Graph,
    h: str | Rows,
    wi: Weight,
    wo: Weight,
    bi: Weight | None = None,
    bo: Weight | None = None,
) -> str:
    inner = graph.add("Relu", graph.product(h, wi, bi))
    quantized = isinstance(wo, Quantized)
    return graph.product(graph.quantized(inner, positive=True) if quantized else inner, wo, bo)


def _expert(wi: Weight, *others: Weight) -> Session:
    """An expert by itself, from its weights and biases."""
    graph = Graph()
    if isinstance(wi, Quantized):
        rows = Rows(graph.input("h", "uint8"), graph.input("scale"), ZERO)
        return graph.compile(_through(graph, rows, wi, *others))
    return graph.compile(_through(graph, graph.input("h"), wi, *others))
