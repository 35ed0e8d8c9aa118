"""`python -m jaxgru`: the command `jaxgru`."""

from jaxgru.cli.command import main

if __name__ == "__main__":
    main()
