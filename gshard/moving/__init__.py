"""Everything that moves data between devices: planners, and the collectives under them."""
