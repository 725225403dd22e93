"""From a policy to trajectories: engines, conversations, collection."""
