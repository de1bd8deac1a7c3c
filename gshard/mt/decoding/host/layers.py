"""The layers of the Transformer on a CPU: two graphs each, with a cache in between.

The first graph makes queries, keys and values; keys and values are written into a cache, which a
graph cannot do in place; the second graph does everything else.

Dims: B sentences, K tokens of each, R = B * K rows, M model dim, N heads, D key and U value dim, L
positions of a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gshard.mt.decoding.host.products import (
    MICROSOFT,
    ZERO,
    OnnxGraph,
    OnnxOutput,
    QuantizedRows,
    Session,
    Weight,
    floats,
)
from gshard.mt.decoding.texts import Choices
from gshard.nn.config import Int8, TransformerConfig

Weights = Callable[[str], Weight]  # by name within a layer
HIDDEN = np.float32(-1e9)  # the score of what a query may not see
_ROOM = 32  # positions by which a cache grows at least


@dataclass
class Cache:
    """Keys and values of one attention, heads before positions, as products read them.

    Graphs read arrays without gaps: there are a few more positions than written ones, all zero,
    which are hidden from every query.
    """

    keys: np.ndarray  # [B, N, L, D]
    values: np.ndarray  # [B, N, L, U]
    length: int = 0  # positions that are written

    @staticmethod
    def empty(sentences: int, c: TransformerConfig, length: int = 0) -> Cache:
        """A cache of so many positions, which are not written."""
        shape = (sentences, c.heads, length)
        return Cache(
            np.zeros((*shape, c.key_dim), np.float32), np.zeros((*shape, c.value_dim), np.float32)
        )

    def write(self, keys_BKX: np.ndarray, values_BKX: np.ndarray) -> None:
        """Append positions."""
        end = self.length + keys_BKX.shape[1]
        if end > self.keys.shape[2]:
            self._grow(end)
        for into, new in ((self.keys, keys_BKX), (self.values, values_BKX)):
            N, dim = into.shape[1], into.shape[3]
            heads = new.reshape(*new.shape[:2], N, dim).swapaxes(1, 2)
            into[:, :, self.length : end] = heads
        self.length = end

    def _grow(self, least: int) -> None:
        """Room for a quarter more, so that copying does not cost more than attention."""
        length = -(-(least + least // 4) // _ROOM) * _ROOM
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = np.zeros((*old.shape[:2], length, old.shape[3]), np.float32)
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)

    def hidden(self, hidden_BKL: np.ndarray) -> np.ndarray:
        """What is added to the scores, [B, 1, K, L], from that of the written positions."""
        B, K, written = hidden_BKL.shape
        all_B1KL = np.full((B, 1, K, self.keys.shape[2]), HIDDEN)
        all_B1KL[:, 0, :, :written] = hidden_BKL
        return all_B1KL

    def keep(self, rows: np.ndarray) -> None:
        """Only these sentences."""
        self.keys, self.values = self.keys[rows], self.values[rows]


class HostLayer:
    """One layer, of the encoder or of the decoder."""

    def __init__(self, weights: Weights, c: TransformerConfig, *, decoder: bool, sparse: bool):
        self.own = _projections(weights, c)  # queries, keys and values of self-attention
        make = HostExperts if sparse else _feed_forward
        self._last: HostExperts | Session = make(weights, c, decoder=decoder)

    def record(self, listener: Listener | None) -> None:
        """Have the choices of a router told to `listener`, or to nobody again."""
        if isinstance(self._last, HostExperts):
            self._last.listener = listener

    def finish(self, *inputs: np.ndarray) -> np.ndarray:
        """The rows after the attentions and the feed-forward layer.

        The inputs are the rows, the queries, and what `_attention` reads: of the encoder's layers
        once, and the places of the rows among the queries; of the decoder's for both attentions.
        """
        (x_RM,) = self._last(*inputs)
        return x_RM


Listener = Callable[[Choices], None]


class HostExperts:
    """A layer with experts: those that a row needs are run on their rows, and no others."""

    def __init__(self, weights: Weights, c: TransformerConfig, *, decoder: bool):
        self.listener: Listener | None = None
        graph = OnnxGraph()
        x, h = _attended(graph, weights, c, decoder=decoder)
        logits = graph.product(h, floats(weights("moe.gate")))
        expert, weight = choices(graph, logits, c.gating.top_k)
        outputs = [OnnxOutput(h)]
        if isinstance(weights("moe.experts.wi"), Int8):  # once for all experts
            rows = graph.quantized(h)
            outputs = [OnnxOutput(rows.values, "uint8"), OnnxOutput(rows.scale)]
        if c.shared_hidden_dim:
            x = graph.add("Add", x, _two_products(graph, h, weights, c))
        self._before = graph.compile(x, OnnxOutput(expert, "int64"), weight, *outputs)
        leaves = ("wi", "wo", "bi", "bo") if c.biases else ("wi", "wo")
        found = [weights(f"moe.experts.{leaf}") for leaf in leaves]
        self._each = [_expert(*(leaf[n] for leaf in found)) for n in range(c.experts)]

    def __call__(self, *inputs: np.ndarray) -> Sequence[np.ndarray]:
        """The rows after the attentions and the experts, from the inputs of `HostLayer.finish`."""
        x_RM, expert_RC, weight_RC, *read = self._before(*inputs)
        if self.listener is not None:
            self.listener(Choices(expert_RC.T, weight_RC.T))
        # Y = R * C choices, in the order of their experts: each expert reads adjacent rows.
        order_Y = np.argsort(expert_RC, axis=None, kind="stable")
        sorted_rows = [given[order_Y // expert_RC.shape[1]] for given in read]
        count_E = np.bincount(expert_RC.reshape(-1))
        end_E = np.cumsum(count_E).tolist()
        found: list[np.ndarray] = []
        for expert in np.flatnonzero(count_E).tolist():
            begin, end = end_E[expert - 1] if expert else 0, end_E[expert]
            found += self._each[expert](*(given[begin:end] for given in sorted_rows))
        y_YM = np.empty((len(order_Y), x_RM.shape[1]), np.float32)
        y_YM[order_Y] = np.concatenate(found)
        y_RCM = y_YM.reshape(*expert_RC.shape, -1)
        y_RCM *= weight_RC[:, :, None]
        for choice in range(expert_RC.shape[1]):
            x_RM += y_RCM[:, choice]
        return (x_RM,)


def choices(graph: OnnxGraph, logits: str, top_k: int) -> tuple[str, str]:
    """Each row's experts and their weights, as `gshard.nn.gating.route` without a capacity."""
    gates = graph.add("Softmax", logits, axis=-1)
    weight, expert = graph.add("TopK", gates, graph.constant(np.array([top_k])), outputs=2)
    if top_k > 1:
        total = graph.add("ReduceSum", weight, graph.constant(np.array([-1])))
        total = graph.add("Add", total, graph.constant(np.float32(1e-9)))
        weight = graph.add("Div", weight, total)
    return expert, weight


def _norm(graph: OnnxGraph, x: str, weights: Weights, name: str) -> str:
    return graph.norm(x, weights(f"{name}_norm.scale"), weights(f"{name}_norm.bias"))


def _projections(weights: Weights, c: TransformerConfig) -> Session:
    """Queries, keys and values of self-attention, from one product with the normalized rows."""
    graph = OnnxGraph()
    h = _norm(graph, graph.input("x"), weights, "self")
    joint = graph.product(h, *side_by_side(weights, c, "self", ("wq", "wk", "wv")))
    sizes = c.heads * np.array([c.key_dim, c.key_dim, c.value_dim])
    return graph.compile(*graph.add("Split", joint, graph.constant(sizes), outputs=3, axis=1))


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
    quantized = [Int8(w.values, w.scale * by) for w, by in both if isinstance(w, Int8)]
    if not quantized:
        return np.concatenate([floats(w) * by for w, by in both], axis=1), bias
    joint = Int8(
        np.concatenate([w.values for w in quantized], axis=1),
        np.concatenate([w.scale for w in quantized], axis=1),
    )
    return joint, bias


def _bias(weights: Weights, c: TransformerConfig, name: str) -> Weight | None:
    return weights(name) if c.biases else None


def _attended(
    graph: OnnxGraph, weights: Weights, c: TransformerConfig, *, decoder: bool
) -> tuple[str, str]:
    """The rows after the attentions, and these normalized for the feed-forward layer."""
    x = graph.input("x")
    out = _attention(graph, graph.input("q"), c, "self")
    if not decoder:  # where queries have places for padding, and rows have none
        out = graph.add("Gather", out, graph.input("places", "int64", dims=1), axis=0)
    x = _added(graph, weights, c, "self", x, out)
    if decoder:
        h = _norm(graph, x, weights, "cross")
        q = graph.product(h, *side_by_side(weights, c, "cross", ("wq",)))
        x = _added(graph, weights, c, "cross", x, _attention(graph, q, c, "cross"))
    return x, _norm(graph, x, weights, "feed_forward")


def _added(
    graph: OnnxGraph, weights: Weights, c: TransformerConfig, kind: str, x: str, out: str
) -> str:
    """The rows after an attention whose heads have given `out`."""
    wo = weights(f"{kind}_attention.wo").reshape(-1, c.model_dim)
    return graph.add("Add", x, graph.product(out, wo, _bias(weights, c, f"{kind}_attention.bo")))


def _attention(graph: OnnxGraph, q: str, c: TransformerConfig, kind: str) -> str:
    """Attention from the queries of B * K rows to a cache of B sentences, [R, N * U].

    It reads the keys and values of a `Cache`, and what is added to the scores, [B, 1, K or 1, L].
    """
    keys, values, hidden = (
        graph.input(f"{kind}_{name}", dims=4) for name in ("keys", "values", "hidden")
    )
    sentences = graph.add("Shape", keys, start=0, end=1)
    split = graph.constant(np.array([-1, c.heads, c.key_dim]))
    shape = graph.add("Concat", sentences, split, axis=0)
    q_BNKD = graph.add("Transpose", graph.add("Reshape", q, shape), perm=[0, 2, 1, 3])
    scores = graph.add("FusedMatMul", q_BNKD, keys, transB=1, domain=MICROSOFT)
    shares = graph.add("Softmax", graph.add("Add", scores, hidden), axis=-1)
    out_BNKU = graph.add("MatMul", shares, values)
    rows = graph.constant(np.array([-1, c.heads * c.value_dim]))
    return graph.add("Reshape", graph.add("Transpose", out_BNKU, perm=[0, 2, 1, 3]), rows)


def _feed_forward(weights: Weights, c: TransformerConfig, *, decoder: bool) -> Session:
    graph = OnnxGraph()
    x, h = _attended(graph, weights, c, decoder=decoder)
    return graph.compile(graph.add("Add", x, _two_products(graph, h, weights, c)))


def _two_products(graph: OnnxGraph, h: str, weights: Weights, c: TransformerConfig) -> str:
    given = (weights("feed_forward.wi"), weights("feed_forward.wo"))
    biases = (_bias(weights, c, f"feed_forward.{leaf}") for leaf in ("bi", "bo"))
    return _through(graph, h, *given, *biases)


def _through(
    graph: OnnxGraph,
    h: str | QuantizedRows,
    wi: Weight,
    wo: Weight,
    bi: Weight | None = None,
    bo: Weight | None = None,
) -> str:
    inner = graph.add("Relu", graph.product(h, wi, bi))
    quantized = isinstance(wo, Int8)
    return graph.product(graph.quantized(inner, positive=True) if quantized else inner, wo, bo)


def _expert(wi: Weight, *others: Weight) -> Session:
    """An expert by itself, from its weights and biases."""
    graph = OnnxGraph()
    if isinstance(wi, Int8):
        rows = QuantizedRows(graph.input("h", "uint8"), graph.input("scale"), ZERO)
        return graph.compile(_through(graph, rows, wi, *others))
    return graph.compile(_through(graph, graph.input("h"), wi, *others))
