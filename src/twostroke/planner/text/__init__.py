"""Plans for people: aligned columns, every number with its unit and its mark. One file a kind of plan."""
