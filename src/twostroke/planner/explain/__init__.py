"""Every number of a plan as a formula with its numbers substituted: what ``--explain`` prints."""
