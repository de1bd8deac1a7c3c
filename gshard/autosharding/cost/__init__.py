"""What a program costs on a mesh: specs, prices, and the problem that a solver minimizes."""
