"""The configuration of a model and what follows from it, without JAX.

Batches of sentence pairs, shapes of weights and their numbers in 8 bits, arithmetic of a step,
rematerialization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from jax import Array

    from gshard.nn.strategy import Strategy

AttentionKind = Literal["plain", "flash"]
Dispatch = Literal["einsum", "index", "flat", "dropless"]
Exchange = Literal["dtype", "float8"]
Products = Literal["dtype", "float8"]
Random = Literal["threefry", "hash"]

EPSILON = 1e-6  # added to the variance by layer normalization
LARGEST = 2**31 - 1  # of dims, counts and seeds, which become numbers of 32 bits


class SettingBounds(NamedTuple):
    """The least and the most that a setting may be, where its type allows more."""

    least: float
    most: float


Positive = Annotated[int, SettingBounds(1, LARGEST)]
Count = Annotated[int, SettingBounds(0, LARGEST)]
Dropped = Annotated[float, SettingBounds(0, 0.999)]  # a share
Factor = Annotated[float, SettingBounds(0, 1e12)]


@dataclass(frozen=True)
class GatingConfig:
    """The settings of a router.

    `aux_coefficient` is the k of L = l_nll + k * l_aux, with l_aux in the scaled form of
    `RouterMetrics.aux_loss`: the paper's own form needs a k that is E * E times larger.
    `second_expert` says when the second choice is taken: with probability 2 * g2 (`random`, the
    paper's), always (`all`), or drawn from the gates without the first one (`sampling`).
    `output_masking` is the share of the experts' results that training masks, independently for
    each choice of each token (NLLB's "expert output masking"; the paper has none).
    """

    top_k: Literal[1, 2] = 2
    capacity_factor: Factor = 2.0
    eval_capacity_factor: Factor = 2.0
    min_capacity: Positive = 1
    second_expert: Literal["random", "all", "sampling"] = "random"
    aux_coefficient: float = 0.01
    z_coefficient: float = 0.0
    output_masking: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.output_masking < 1:
            raise ValueError(f"output_masking is {self.output_masking}; it is in [0, 1)")

    def capacity(self, tokens: int, experts: int, *, train: bool, dropless: bool = False) -> int:
        """C, the slots each expert has for one group of `tokens`: floor(S * factor / E).

        A token chooses an expert at most once, so C = S drops nothing: that is `dropless`, and
        also the largest useful capacity.
        """
        if dropless:
            return tokens
        factor = self.capacity_factor if train else self.eval_capacity_factor
        return min(tokens, max(int(tokens * factor / experts), self.min_capacity))


PAPER_GATING = GatingConfig()


Remat = Literal["none", "layer"]
Stacks = Literal["both", "encoder"]


@dataclass(frozen=True)
class TransformerConfig:
    """The dims and settings of a model; `experts=0` is the dense Transformer.

    `groups` is the G of the gating, a property of the model and not of the devices that run it:
    None makes each sequence a group. `remat` trades memory for arithmetic in the backward pass:
    "none", "layer" (keep only what enters each pair of layers), or the bytes that one device has,
    for which `choose_remat` chooses one of these.

    `experts_in` says which stacks have experts; the paper's have them in both. In a decoder without
    them, the layers that replace them are as wide as the experts that a token would visit.
    `expert_dropout` is that between the two products of an expert. `shared_hidden_dim` is the size
    of a feed-forward network beside the experts that every token passes; 0, as in the paper, is
    none.

    `biases`, `first_position` and `experts_every` are for models of others (`gshard import`):
    biases in every product but the router's, the number of the first position, and how many layers
    come to one with experts, which is the last of them.

    `products`: in which numbers the experts, the feed-forward layers and attention's projections
    are multiplied: in `dtype`, or in eight bits (`gshard.nn.float8`), which is faster on GPUs that
    have matrix units for them (Hopper and later), and slower elsewhere. The router, the softmax,
    normalization, embeddings and logits are not affected. `exchange`: in which numbers tokens are
    sent to their experts and back (`gshard.nn.float8`); in eight bits that is half the bytes of
    bfloat16. `dispatch`: how tokens are sent to their experts (`gshard.nn.experts`); "dropless" has
    no capacity, and drops no token.

    The last four say how the same model is computed, not what it is; `tuned` sets them for GPUs.
    `stacked` keeps the weights of all layers in one array and runs them under `lax.scan`, so that
    the program is as long for 36 layers as for 2; without it every layer has arrays of its own,
    which no loop copies. `attention`: by einsums, or by the kernel of
    `gshard.nn.flash`. `random` is where dropout's numbers come from. `loss_chunks`: in how many
    slices the logits are computed, which are then never all in memory.
    """

    source_vocab: int
    target_vocab: int
    encoder_layers: Count
    decoder_layers: Count
    model_dim: Positive
    hidden_dim: Positive
    heads: Positive
    key_dim: Positive
    value_dim: Positive
    experts: Count = 0
    experts_in: Stacks = "both"
    expert_hidden_dim: Annotated[int | None, SettingBounds(1, LARGEST)] = None
    groups: Annotated[int | None, SettingBounds(1, LARGEST)] = None
    gating: GatingConfig = PAPER_GATING
    dispatch: Dispatch = "index"
    input_dropout: Dropped = 0.1
    residual_dropout: Dropped = 0.1
    attention_dropout: Dropped = 0.1
    expert_dropout: Dropped = 0.0
    shared_hidden_dim: Count = 0
    biases: bool = False
    first_position: Count = 0
    experts_every: int = 2
    dtype: Literal["float32", "bfloat16"] = "float32"
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    products: Products = "dtype"
    exchange: Exchange = "dtype"
    remat: Annotated[Remat | int, SettingBounds(0, 2**62)] = "none"  # or bytes
    stacked: bool = True
    attention: AttentionKind = "plain"
    random: Random = "threefry"
    loss_chunks: Positive = 1

    def __post_init__(self) -> None:
        if self.encoder_layers % 2 or self.decoder_layers % 2:
            raise ValueError(
                "layers come in pairs, a dense one and one with experts, but there are "
                f"{self.encoder_layers} encoder and {self.decoder_layers} decoder layers"
            )
        if self.experts_every < 2 or self.experts_every % 2:
            raise ValueError(f"experts_every is {self.experts_every}; it is even and at least 2")
        if self.experts_every > 2 and self.stacked:
            raise ValueError(
                f"experts_every is {self.experts_every}; it is at most 2 with stacked=True, which "
                "needs pairs of one kind"
            )
        if self.biases and self.products != "dtype":
            raise ValueError(f"biases are for products='dtype', and it is {self.products!r}")
        if self.dispatch == "dropless" and (self.biases, self.products, self.exchange) != (
            False, "dtype", "dtype",
        ):  # fmt: skip
            raise ValueError(
                "dispatch='dropless' is for experts without biases, with products='dtype' and "
                f"exchange='dtype'; here biases={self.biases}, products={self.products!r}, "
                f"exchange={self.exchange!r}"
            )

    def tuned(self) -> TransformerConfig:
        """The same model, computed in the ways that are fastest on GPUs."""
        dispatch: Dispatch = "dropless" if self.dispatch == "dropless" else "flat"
        fast = replace(self, dispatch=dispatch, attention="flash", random="hash")
        return replace(fast, stacked=False, loss_chunks=8)

    def kernels(self, strategy: Strategy) -> Strategy | None:
        """The strategy whose devices run kernels, each on its own sequences; None: none do."""
        return strategy if self.attention == "flash" else None


class Batch(NamedTuple):
    """Sentence pairs, all [B, L]; segment 0 is padding, packed sentences carry 1, 2, ...

    `inputs` is the target shifted right by one: at each position the model has seen the tokens up
    to `inputs` there and is to say `labels` there.
    """

    source: Array
    source_segments: Array
    source_positions: Array
    inputs: Array
    labels: Array
    target_segments: Array
    target_positions: Array

    @staticmethod
    def of(source: Array, target: Array, *, pad: int = 0, start: int = 0) -> Batch:
        """One sentence pair per row, padded at the end with `pad`; inputs begin with `start`."""
        import jax.numpy as jnp

        positions = [jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape) for x in (source, target)]
        shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=start)
        return Batch(
            source=source,
            source_segments=(source != pad).astype(jnp.int32),
            source_positions=positions[0],
            inputs=shifted,
            labels=target,
            target_segments=(target != pad).astype(jnp.int32),
            target_positions=positions[1],
        )


Shape = tuple[int, ...]


def weight_shapes(c: TransformerConfig) -> dict[str, Shape]:
    """The shape of every array of a `Transformer`, by its path in the model."""
    M = c.model_dim
    found: dict[str, Shape] = {
        "source.table": (c.source_vocab, M),
        "target.table": (c.target_vocab, M),
    }
    for stack, layers in (("encoder", c.encoder_layers), ("decoder", c.decoder_layers)):
        cross, every = stack == "decoder", c.experts_every // 2  # pairs
        for n in range(1 if c.stacked and layers else layers // 2):
            pair, leading = (f"{stack}", (layers // 2,)) if c.stacked else (f"{stack}.{n}", ())
            placed = c.stacked or n % every == every - 1
            for kind, sparse in (("dense", False), ("sparse", placed)):
                for name, shape in _layer(c, sparse=sparse, cross=cross):
                    found[f"{pair}.{kind}.{name}"] = (*leading, *shape)
    for stack in ("encoder", "decoder"):
        found |= {f"{stack}_norm.{leaf}": (M,) for leaf in ("scale", "bias")}
    return found


def _layer(c: TransformerConfig, *, sparse: bool, cross: bool) -> Iterator[tuple[str, Shape]]:
    M = c.model_dim
    hidden = c.expert_hidden_dim if sparse and c.expert_hidden_dim else c.hidden_dim
    if sparse and cross and c.experts and c.experts_in == "encoder":
        hidden, sparse = c.gating.top_k * hidden + c.shared_hidden_dim, False
    for kind in ("self", "cross") if cross else ("self",):
        yield from _norm(c, kind)
        heads = {"q": (c.heads, c.key_dim), "k": (c.heads, c.key_dim), "v": (c.heads, c.value_dim)}
        for name, outputs in heads.items():
            yield f"{kind}_attention.w{name}", (M, *outputs)
            if c.biases:
                yield f"{kind}_attention.b{name}", outputs
        yield f"{kind}_attention.wo", (*heads["v"], M)
        if c.biases:
            yield f"{kind}_attention.bo", (M,)
    yield from _norm(c, "feed_forward")
    if sparse and c.experts:
        yield "moe.gate", (M, c.experts)
        yield from _products(c, "moe.experts", hidden, (c.experts,))
        hidden = c.shared_hidden_dim
    if hidden:
        yield from _products(c, "feed_forward", hidden, ())


def _norm(c: TransformerConfig, name: str) -> Iterator[tuple[str, Shape]]:
    yield f"{name}_norm.scale", (c.model_dim,)
    yield f"{name}_norm.bias", (c.model_dim,)


def _products(
    c: TransformerConfig, name: str, hidden: int, leading: Shape
) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.wi", (*leading, c.model_dim, hidden)
    yield f"{name}.wo", (*leading, hidden, c.model_dim)
    if c.biases:
        yield f"{name}.bi", (*leading, hidden)
        yield f"{name}.bo", (*leading, c.model_dim)


@dataclass(frozen=True)
class Int8:
    """An array of `values * scale`, NumPy's or JAX's; `scale` has size 1 in dims that share one."""

    values: Any  # int8, of -127 to 127: -128 is not used
    scale: Any  # float32

    @staticmethod
    def of(array: Any, axes: tuple[int, ...]) -> Int8:
        """The nearest numbers of 8 bits, with one scale along `axes`."""
        wide, xp = array.astype("float32"), array.__array_namespace__()
        largest = xp.max(xp.abs(wide), axis=axes, keepdims=True)
        scale = xp.where(largest > 0, largest / 127, 1.0).astype("float32")
        return Int8(xp.rint(wide / scale).astype("int8"), scale)

    @property
    def shape(self) -> Shape:
        """The shape of the values."""
        return self.values.shape

    @property
    def T(self) -> Int8:  # noqa: N802  (as NumPy has it)
        """The transposed array."""
        return Int8(self.values.T, self.scale.T)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Int8:
        """Entries of dim 0, which has a scale for each."""
        return Int8(self.values[index], self.scale[index])

    def reshape(self, *shape: int) -> Int8:
        """Other dims for the values; the scales, one for each entry of the last, in one row."""
        return Int8(self.values.reshape(shape), self.scale.reshape(1, -1))

    def astype(self, dtype: Any, **_: bool) -> Any:
        """The array itself, where no product takes the integers."""
        return (self.values.astype("float32") * self.scale).astype(dtype)


def forward_flops(config: TransformerConfig) -> tuple[int, int]:
    """Multiplications and additions for one source token and for one target token.

    Only products with weights count, which is the useful work: a token visits `top_k` experts
    however many slots their buffers have, and scores between tokens are left out, since they
    depend on how sentences are packed.
    """
    c = config
    attention = c.model_dim * c.heads * 2 * (c.key_dim + c.value_dim)
    dense = 2 * c.model_dim * c.hidden_dim
    hidden = c.expert_hidden_dim or c.hidden_dim
    sparse = 2 * c.model_dim * hidden * (c.gating.top_k if c.experts else 1)
    shared = 2 * c.model_dim * c.shared_hidden_dim if c.experts else 0
    gate = c.model_dim * c.experts
    pair = dense + sparse + shared + gate
    decoder_pair = pair - gate if c.experts_in == "encoder" else pair
    source = c.encoder_layers // 2 * (2 * attention + pair)
    # The decoder's keys and values of the source are made from source tokens.
    cross_source = c.decoder_layers * attention // 2
    target = c.decoder_layers // 2 * (3 * attention + decoder_pair) + c.model_dim * c.target_vocab
    return 2 * (source + cross_source), 2 * target


def step_flops(config: TransformerConfig, source_tokens: float, target_tokens: float) -> float:
    """A training step's: the backward pass does twice the work of the forward pass."""
    source, target = forward_flops(config)
    return 3.0 * (source * source_tokens + target * target_tokens)


def choose_remat(remat: Remat | int, memory: Callable[[Remat], int]) -> Remat:
    """A config's `remat`, or for a budget in bytes the cheapest setting that fits in it.

    `memory` says how many bytes a step holds on each device under a setting, such as
    `gshard.jit(step).lower(...).forecast().memory_bytes` of a `train_step` with this `remat`.
    """
    if not isinstance(remat, int):
        return remat
    settings: tuple[Remat, ...] = get_args(Remat)  # the fastest first
    for setting in settings:
        if (needed := memory(setting)) <= remat:
            return setting
    raise ValueError(
        f"a step holds about {needed:,} bytes on each device even with rematerialization, but "
        f"remat={remat:,}: use more devices, a smaller batch or bfloat16"
    )
