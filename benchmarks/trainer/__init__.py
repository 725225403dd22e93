"""Time and memory of the trainer, beside TRL's GRPOTrainer; `make bench-trainer` runs it."""
