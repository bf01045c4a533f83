"""Measures the machine into a ``MachineProfile`` in under two minutes: what the planner's predictions stand on."""
