"""`python -m nftctl`: the same program as the `nftctl` command, for environments without the script on PATH."""

from nftctl.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
