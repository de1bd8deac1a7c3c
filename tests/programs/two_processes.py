"""Run by test_processes: one of two processes with 4 virtual devices each, on loopback."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import gshard


def main(port: str, number: int) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
    assert len(jax.devices()) == 8
    assert len(jax.local_devices()) == 4
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(13, 6)), rng.normal(size=(6, 6))
    x, w = x.astype(np.float32), w.astype(np.float32)

    def step(x, w):
        x = jnp.tanh(gshard.split(x, 0, 8) @ gshard.split(w, 1, 3))
        return gshard.split(x, 0, 8), gshard.shard(jnp.sum(x), np.array(0)), w - 0.1 * (x.T @ x)

    run = gshard.jit(step)
    whole, reference = np.asarray, (x, w)
    for _ in range(3):
        x, total, w = run(x, w)
        reference = plain(*reference)
        assert isinstance(x, gshard.UnevenArray)
        assert not x.stack.is_fully_addressable
        np.testing.assert_allclose(whole(x), reference[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(whole(total), reference[0].sum(), rtol=1e-4)
        np.testing.assert_allclose(
            gshard.jit(gshard.replicate)(w), reference[1], rtol=1e-5, atol=1e-5
        )

    order = np.array([5, 0, 7, 2, 4, 1, 6, 3])
    shuffled = gshard.jit(lambda x: gshard.shard(x, order[:, None]) * 2)(
        np.ones((16, 2), np.float32)
    )
    assert not shuffled.is_fully_addressable
    again = gshard.jit(lambda x: gshard.replicate(gshard.shard(x, order[:, None]) + 1))(shuffled)
    np.testing.assert_array_equal(again, 3.0)
    print("process", number, "done")


def plain(x, w):
    x = np.tanh(x @ w)
    return x, w - 0.1 * (x.T @ x)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
