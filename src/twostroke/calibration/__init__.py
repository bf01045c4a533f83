"""Measures the machine into a ``MachineProfile`` in about a minute: what the planner's predictions stand on."""
