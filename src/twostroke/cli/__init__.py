"""The command line: one file a verb, imported only when that verb runs."""
