"""What a device holds: shardings, tiles, padding, meshes."""
