"""Tokens to experts and back on one device: gathers at the edges of the experts' products.

On one device groups need not be separate: a slot of an expert looks up its token among all tokens,
and a token its slots among all slots, so that nothing is transposed. Forward and backward,
each move is one gather; where a row is weighted or summed on its way, that is done in the same
pass. Dims: R tokens of all groups, K choices, X slots of all experts, each expert's side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from gshard.nn.gating import Routing
from gshard.nn.kernels import with_gradient
from gshard.tensors.annotate import target_platform

RunExperts = Callable[[Array], Array]  # [E, C, M] to [E, C, M]
RunBlocks = Callable[..., Array]  # [N, C, M] and the expert of each block to [N, C, M]


class Places(NamedTuple):
    """The maps between choices and slots; what is unassigned has an index past the end."""

    slot: Array  # [K, R], the slot of each choice
    token: Array  # [X], the token in each slot
    choice: Array  # [X], the same as a choice, k * R + r


def flat_groups(run: RunExperts, routing: Routing, x_GSM: Array, E: int, C: int) -> Array:
    """The experts on the tokens of all groups, each with C slots for each group."""
    G, S, M = x_GSM.shape
    groups_GS = jnp.arange(G)[:, None]
    slot_KGS = (routing.expert * G + groups_GS) * C + routing.slot
    K, R, X = len(slot_KGS), G * S, E * G * C
    slot_KR = jnp.where(routing.kept, slot_KGS, X).reshape(K, R)
    y_RM = through(run, x_GSM.reshape(R, M), routing.weight.reshape(K, R), slot_KR, E, G * C)
    return y_RM.reshape(G, S, M)


def flat_dropless(run: RunBlocks, routing: Routing, x_GSM: Array, E: int) -> Array:
    """The experts on all tokens, none dropped: each expert's in entire blocks of rows.

    An expert's tokens are in the order of groups, and of their slots inside a group.
    """
    (G, S, M), K = x_GSM.shape, len(routing.expert)
    R, rows = G * S, _rows_of_block(K * G * S // E)
    most = K * R // rows + E
    wanted_KGSE = jax.nn.one_hot(routing.expert, E) * routing.kept[..., None]
    count_GE = jnp.sum(wanted_KGSE, axis=(0, 2))
    # A product, since a cumulative sum takes long on a GPU; these numbers are exact in float32.
    exact = jax.lax.Precision.HIGHEST
    before_GE = jnp.matmul(jnp.tri(G, k=-1), count_GE, precision=exact).astype(jnp.int32)
    load_E = jnp.sum(count_GE, axis=0).astype(jnp.int32)
    end_E = jnp.cumsum(-(-load_E // rows))  # of the blocks of each
    begin_GE = before_GE + (end_E - -(-load_E // rows)) * rows
    slot_KGS = begin_GE[jnp.arange(G)[:, None], routing.expert] + routing.slot
    slot_KR = jnp.where(routing.kept, slot_KGS, most * rows).reshape(K, R)
    # Compared with all ends at once: a binary search is a loop of small kernels.
    expert_N = jnp.sum(end_E <= jnp.arange(most)[:, None], axis=1, dtype=jnp.int32)
    by_block = functools.partial(run, expert_N=expert_N)
    x_RM, weight_KR = x_GSM.reshape(R, M), routing.weight.reshape(K, R)
    return through(by_block, x_RM, weight_KR, slot_KR, most, rows).reshape(G, S, M)


def _rows_of_block(share: int) -> int:
    """For experts with so many rows on average: matrix units of GPUs need 64 for their speed."""
    if target_platform() != "gpu":
        return 32 if share >= 32 else 16
    return 128 if share >= 512 else 64


def through(
    run: RunExperts, x_RM: Array, weight_KR: Array, slot_KR: Array, E: int, C: int
) -> Array:
    """Bring each token to its slots, run the experts, and mix each token's results by weight."""
    K, R = slot_KR.shape
    empty_X = jnp.full((E * C,), K * R, jnp.int32)
    choice_X = empty_X.at[slot_KR.ravel()].set(jnp.arange(K * R, dtype=jnp.int32), mode="drop")
    token_X = jnp.where(choice_X < K * R, choice_X % R, R)
    places = Places(slot_KR, token_X, choice_X)
    x_XM = dispatch(x_RM, places)
    y_XM = run(x_XM.reshape(E, C, -1)).reshape(E * C, -1)
    return combine(y_XM, weight_KR, places)


def _dispatch_backward(places: Places, grads_XM: Array) -> tuple[Array, None]:
    rows = [_rows(grads_XM, slot_R).astype(jnp.float32) for slot_R in places.slot]
    return sum(rows[1:], rows[0]).astype(grads_XM.dtype), None


@with_gradient(_dispatch_backward, keep=lambda x_XM, x_RM, places: places)
def dispatch(x_RM: Array, places: Places) -> Array:
    """For each slot the token that has it, or zeros."""
    return _rows(x_RM, places.token)


def _combine_backward(
    kept: tuple[Array, Array, Places], grads_RM: Array
) -> tuple[Array, Array, None]:
    y_XM, weight_KR, places = kept
    weight_X = weight_KR.ravel().at[places.choice].get(mode="fill", fill_value=0)
    # Looked up once for both uses: a gather inside a reduction is several times slower.
    found_XM = jax.lax.optimization_barrier(_rows(grads_RM, places.token)).astype(jnp.float32)
    along_X = jnp.sum(y_XM.astype(jnp.float32) * found_XM, axis=1)
    y_grads = (weight_X[:, None] * found_XM).astype(y_XM.dtype)
    return y_grads, _rows(along_X, places.slot), None


@with_gradient(_combine_backward)
def combine(y_XM: Array, weight_KR: Array, places: Places) -> Array:
    """For each token the results in its slots, mixed by weight."""
    mixed = [
        weight_R[:, None] * _rows(y_XM, slot_R).astype(jnp.float32)
        for weight_R, slot_R in zip(weight_KR, places.slot, strict=True)
    ]
    return sum(mixed[1:], mixed[0]).astype(y_XM.dtype)


def _rows(x: Array, index: Array) -> Array:
    """Rows by index; one past the end gives zeros."""
    return x.at[index].get(mode="fill", fill_value=0)
