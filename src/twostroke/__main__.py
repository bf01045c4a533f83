"""`python -m twostroke` is the command `twostroke`."""

from twostroke.cli.main import main

main()
