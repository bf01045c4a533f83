"""What ``twostroke doctor`` reads of this machine, what it makes of it, and how it says so."""
