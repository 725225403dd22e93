"""How stale data misleads: measurements on frozen trajectories while the policy moves on."""
