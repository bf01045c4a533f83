"""Load on a served model and timing of the engine alone, by definitions that are written down once."""
