"""Pages and plots from the ledger and the planner."""
