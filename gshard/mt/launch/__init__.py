"""Several processes for one training: found in the environment, or started and watched here."""
