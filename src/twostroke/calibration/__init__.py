"""Measures the machine into a ``MachineProfile`` in some six minutes. The planner predicts from it."""
