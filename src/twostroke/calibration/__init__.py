"""Measures the machine into a ``MachineProfile`` in some four minutes. The planner predicts from it."""
