"""`python -m tisa.cli`: what launchers of several processes start."""

from tisa.cli import main

main()
