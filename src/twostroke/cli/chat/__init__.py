"""The parts of ``twostroke chat``: what is said, who answers, and the terminal."""
