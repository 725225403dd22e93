"""Speed and memory of the replay buffer, beside others; `make bench-replay` runs it."""
