"""The plans of ``twostroke plan``, one file each; none imports torch."""
