"""What every other room speaks of: model specification, machine profile, recipes, dtypes, units, errors. Standard library only."""
