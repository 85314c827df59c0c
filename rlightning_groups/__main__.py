"""``python -m rlightning_groups``: the command."""

from rlightning_groups.cli import main

if __name__ == "__main__":
    main()
