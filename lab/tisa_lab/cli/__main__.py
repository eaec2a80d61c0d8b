"""`python -m tisa_lab.cli`: what launchers of several processes start."""

from tisa_lab.cli import main

main()
