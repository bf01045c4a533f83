"""Training: one optimizer step, the loop around it, precision, optimizers, schedules, compilation and checkpoints."""
