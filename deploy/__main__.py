"""The console script `stepwire`, and `python -P -m deploy`. Apart from deploy.cli, whose imports take a while: Ctrl-C
ends the command without a traceback from the first of them on."""

import sys


def main() -> None:
    """Leaves with the command's status, 130 after Ctrl-C."""
    try:
        from deploy import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
