"""Measures the machine into a ``MachineProfile`` in some five minutes. The planner predicts from it."""
