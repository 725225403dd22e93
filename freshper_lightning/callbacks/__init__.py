"""What happens between and around the updates: rollouts, evaluation, monitoring, progress."""
