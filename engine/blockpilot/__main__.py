"""`python -m blockpilot`."""

from blockpilot.cli import main

main()
