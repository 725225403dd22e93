"""Where training batches come from: replay of rollouts, or demonstrations."""
