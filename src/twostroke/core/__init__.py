"""What every room speaks of: model specification, machine profile, recipes, dtypes, units, errors; standard library only."""
