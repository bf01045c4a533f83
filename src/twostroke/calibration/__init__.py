"""Measures the machine into a ``MachineProfile`` in under two minutes. The planner predicts from it."""
