"""Tokens to experts and back on one device: gathers at the edges of the experts' products.

On one device groups need not be separate: a slot of an expert looks up its token among all tokens,
and a token its slots among all slots, so that nothing is transposed. Forward and backward,
each move is one gather; where a row is weighted or summed on its way, that is done in the same
pass. Dims: R tokens of all groups, K choices, X slots of all experts, each expert's side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from gshard.nn.gating import Routing
from gshard.nn.grouped import ROWS

RunExperts = Callable[[Array], Array]  # [E, C, M] to [E, C, M]


class AnyExperts(Protocol):
    """What dropless tokens need of `gshard.nn.experts.Experts`."""

    def in_place(self, x_ECM: Array) -> Array:
        """Every expert on its own tokens."""

    def in_blocks(self, x_NCM: Array, expert_N: Array) -> Array:
        """Each block of tokens by the expert of its number; E is none, and gives zeros."""

    def by_kernel(self, x: Array) -> bool:
        """Whether all blocks are computed by one kernel, no slower than a batched product."""


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


def flat_dropless(experts: AnyExperts, routing: Routing, x_GSM: Array, E: int) -> Array:
    """The experts on all tokens, none dropped: the result is independent of the method.

    If there is a kernel, each expert's tokens are computed in entire blocks. Otherwise all experts
    get the capacity that the fullest one needs, which depends on data: a few times its balanced
    share is often enough, and if not, a branch with a larger capacity runs. If a few of many
    experts get most tokens, they are computed in blocks, one after another.
    """
    G, S, M = x_GSM.shape
    K, R = len(routing.expert), G * S
    x_RM, weight_KR = x_GSM.reshape(R, M), routing.weight.reshape(K, R)
    queue = ExpertQueue.of(routing.expert.reshape(K, R), routing.kept.reshape(K, R), E)
    if experts.by_kernel(x_RM):
        return in_blocks(experts, x_RM, weight_KR, queue, ROWS).reshape(G, S, M)

    def with_room(room: int) -> Callable[[], Array]:
        slot_KR = jnp.where(queue.kept, queue.expert * room + queue.place, E * room)
        return lambda: through(experts.in_place, x_RM, weight_KR, slot_KR, E, room)

    rooms = sorted({min(R, _round_up(times * K * R // E)) for times in _SHARES})
    ways = [with_room(room) for room in rooms]
    if rooms[-1] < R:
        ways.append(lambda: in_blocks(experts, x_RM, weight_KR, queue, _BLOCK))
    way = jnp.sum(jnp.max(queue.load) > jnp.array(rooms))
    return jax.lax.switch(way, ways).reshape(G, S, M)


_SHARES = (2, 4, 8)  # capacity of an expert, in multiples of its balanced share
_BLOCK = 32  # rows of a block


def in_blocks(
    experts: AnyExperts, x_RM: Array, weight_KR: Array, queue: ExpertQueue, rows: int
) -> Array:
    """The experts on the blocks of rows before them, however full each is."""
    (K, R), E = queue.expert.shape, len(queue.load)
    most = K * R // rows + E
    end_E = jnp.cumsum(-(-queue.load // rows))  # of the blocks of each
    first_E = jnp.concatenate([jnp.zeros(1, end_E.dtype), end_E[:-1]])
    slot_KR = first_E[queue.expert] * rows + queue.place
    slot_KR = jnp.where(queue.kept, slot_KR, most * rows)
    # Compared with all ends at once: a binary search is a loop of small kernels.
    expert_N = jnp.sum(end_E <= jnp.arange(most)[:, None], axis=1, dtype=jnp.int32)

    def run(x_NCM: Array) -> Array:
        return experts.in_blocks(x_NCM, expert_N)

    return through(run, x_RM, weight_KR, slot_KR, most, rows)


def _round_up(rows: int) -> int:
    """Rows of a matrix product come in multiples of 16."""
    return max(-(-rows // 16) * 16, 16)


class ExpertQueue(NamedTuple):
    """The queue of choices at each expert, without a capacity."""

    expert: Array  # [K, R]
    kept: Array  # [K, R]
    place: Array  # [K, R], position in the queue
    load: Array  # [E]

    @staticmethod
    def of(expert_KR: Array, kept_KR: Array, E: int) -> ExpertQueue:
        """Line them up in the order of the choices, then of the tokens."""
        K, R = expert_KR.shape
        wanted_KRE = jax.nn.one_hot(expert_KR, E, dtype=jnp.int32) * kept_KR[..., None]
        wanted_YE = wanted_KRE.reshape(K * R, E)
        place_Y = _places(expert_KR.ravel(), wanted_YE)
        return ExpertQueue(expert_KR, kept_KR, place_Y.reshape(K, R), jnp.sum(wanted_YE, axis=0))


_COMPARED = 64  # choices of a block


def _places(expert_Y: Array, wanted_YE: Array) -> Array:
    """How many choices before each one are of its expert; 0 for those that are not wanted.

    Within a block choices are compared with each other, and only the blocks' counts are summed up:
    on a GPU a cumulative sum over all choices takes as long as reading an expert's weights.
    """
    (Y, E), B = wanted_YE.shape, _COMPARED
    more = -Y % B
    expert_NB = jnp.pad(expert_Y, (0, more)).reshape(-1, B)
    wanted_NBE = jnp.pad(wanted_YE, ((0, more), (0, 0))).reshape(-1, B, E)
    kept_NB = jnp.sum(wanted_NBE, axis=-1)
    same_NBB = (expert_NB[:, :, None] == expert_NB[:, None, :]) & jnp.tri(B, k=-1, dtype=bool)
    within_NB = jnp.sum(same_NBB * kept_NB[:, None, :], axis=-1)
    count_NE = jnp.sum(wanted_NBE, axis=1)
    before_NE = jnp.cumsum(count_NE, axis=0) - count_NE
    place_NB = within_NB * kept_NB + jnp.sum(before_NE[:, None, :] * wanted_NBE, axis=-1)
    return place_NB.reshape(-1)[:Y]


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


@jax.custom_vjp
def dispatch(x_RM: Array, places: Places) -> Array:
    """For each slot the token that has it, or zeros."""
    return _rows(x_RM, places.token)


def _dispatch_forward(x_RM: Array, places: Places) -> tuple[Array, Places]:
    return dispatch(x_RM, places), places


def _dispatch_backward(places: Places, grads_XM: Array) -> tuple[Array, None]:
    rows = [_rows(grads_XM, slot_R).astype(jnp.float32) for slot_R in places.slot]
    return sum(rows[1:], rows[0]).astype(grads_XM.dtype), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def combine(y_XM: Array, weight_KR: Array, places: Places) -> Array:
    """For each token the results in its slots, mixed by weight."""
    mixed = [
        weight_R[:, None] * _rows(y_XM, slot_R).astype(jnp.float32)
        for weight_R, slot_R in zip(weight_KR, places.slot, strict=True)
    ]
    return sum(mixed[1:], mixed[0]).astype(y_XM.dtype)


def _combine_forward(y_XM: Array, weight_KR: Array, places: Places) -> tuple[Array, Any]:
    return combine(y_XM, weight_KR, places), (y_XM, weight_KR, places)


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


combine.defvjp(_combine_forward, _combine_backward)


def _rows(x: Array, index: Array) -> Array:
    """Rows by index; one past the end gives zeros."""
    return x.at[index].get(mode="fill", fill_value=0)
