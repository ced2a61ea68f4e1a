"""Changed measures over stored rollouts."""
