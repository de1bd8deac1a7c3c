"""From a traced function to one flat program: calls inlined, JAX's own shardings as annotations."""
