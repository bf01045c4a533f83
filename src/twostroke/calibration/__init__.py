"""Measures the machine into a ``MachineProfile`` in some seven minutes. The planner predicts from it."""
