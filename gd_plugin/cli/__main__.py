"""`python -m gd_plugin.cli` is `gd-plugin`."""

from gd_plugin.cli import main

if __name__ == "__main__":
    main()
