"""The paper's MoE layer (Algorithms 1 and 2), annotated as in section 3.2, on 8 virtual devices.

Prints the per-device program, and what gshard and XLA's partitioner move for it.
"""

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import gshard

D = 8  # devices


def top2_gating(gates_GSE, capacity):
    """Algorithm 1 in linear algebra: combine weights [G, S, E, C] and the auxiliary loss."""
    E = gates_GSE.shape[-1]
    first_GSE = jax.nn.one_hot(jnp.argmax(gates_GSE, -1), E)
    others_GSE = gates_GSE * (1 - first_GSE)
    second_GSE = jax.nn.one_hot(jnp.argmax(others_GSE, -1), E)
    g1_GS, g2_GS = (jnp.sum(gates_GSE * m, -1) for m in (first_GSE, second_GSE))
    norm_GS = g1_GS + g2_GS + 1e-9
    aux = jnp.mean(jnp.mean(first_GSE, 1) * jnp.mean(gates_GSE, 1))

    place1_GSE = jnp.cumsum(first_GSE, 1) - first_GSE
    first_GSE *= place1_GSE < capacity
    place2_GSE = jnp.cumsum(second_GSE, 1) - second_GSE + jnp.sum(first_GSE, 1, keepdims=True)
    second_GSE *= place2_GSE < capacity

    def combine(gate_GS, mask_GSE, place_GSE):
        slot_GS = jnp.sum(place_GSE * mask_GSE, -1).astype(jnp.int32)
        slot_GSC = jax.nn.one_hot(slot_GS, capacity)
        return (gate_GS / norm_GS)[..., None, None] * mask_GSE[..., None] * slot_GSC[:, :, None]

    combine_GSEC = combine(g1_GS, first_GSE, place1_GSE) + combine(g2_GS, second_GSE, place2_GSE)
    return combine_GSEC, aux


def moe_layer(x_GSM, wg_ME, wi_EMH, wo_EHM, devices=D):
    """Algorithm 2. Five annotations; everything else is inferred."""
    x_GSM = gshard.split(x_GSM, 0, devices)
    wg_ME = gshard.replicate(wg_ME)
    wi_EMH, wo_EHM = gshard.split(wi_EMH, 0, devices), gshard.split(wo_EHM, 0, devices)

    gates_GSE = jax.nn.softmax(jnp.einsum("GSM,ME->GSE", x_GSM, wg_ME))
    capacity = 2 * x_GSM.shape[1] // wg_ME.shape[1]
    combine_GSEC, aux = top2_gating(gates_GSE, capacity)
    mask_GSEC = (combine_GSEC > 0).astype(x_GSM.dtype)
    inputs_EGCM = jnp.einsum("GSEC,GSM->EGCM", mask_GSEC, x_GSM)
    inputs_EGCM = gshard.split(inputs_EGCM, 0, devices)
    h_EGCH = jax.nn.relu(jnp.einsum("EGCM,EMH->EGCH", inputs_EGCM, wi_EMH))
    outputs_GECM = jnp.einsum("EGCH,EHM->GECM", h_EGCH, wo_EHM)
    outputs_GECM = gshard.split(outputs_GECM, 0, devices)
    return jnp.einsum("GSEC,GECM->GSM", combine_GSEC, outputs_GECM), aux


def moe_loss(*args, devices=D):
    y_GSM, aux = moe_layer(*args, devices=devices)
    return jnp.mean(y_GSM**2) + 0.01 * aux


def shapes(G=D, S=256, M=128, H=512, E=D):
    return [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(G, S, M), (M, E), (E, M, H), (E, H, M)]]


def main():
    jax.config.update("jax_num_cpu_devices", D)
    console = Console()
    console.rule("the per-device program of the MoE layer's forward pass")
    forward = gshard.jit(moe_layer).lower(*shapes())
    console.print(forward.as_text(), markup=False, highlight=False, soft_wrap=True)
    console.rule("its collectives")
    for collective in forward.collectives:
        console.print(str(collective), markup=False, highlight=False, soft_wrap=True)
    table = Table(title="bytes that one device sends, same annotations")
    for column in ("program", "partitioner", "KB", "collectives"):
        table.add_column(column)
    gradient = jax.value_and_grad(moe_loss, argnums=(0, 1, 2, 3))
    for name, fn in [("forward", moe_layer), ("value and gradient", gradient)]:
        for partitioner in ("gshard", "xla"):
            found = gshard.jit(fn, partitioner=partitioner).lower(*shapes()).collectives
            counts = {}
            for c in found:
                counts[c.kind] = counts.get(c.kind, 0) + c.count
            listed = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
            sent = sum(c.total_bytes for c in found)
            table.add_row(name, partitioner, f"{sent / 1000:,.0f}", listed)
    console.print(table)


if __name__ == "__main__":
    main()
