"""How every operator runs: a plan in which communication is nodes."""
