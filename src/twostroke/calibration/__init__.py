"""Measures the machine into a ``MachineProfile``. The planner predicts from it."""
