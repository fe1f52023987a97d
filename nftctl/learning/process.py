"""The process of one run: an order as JSON on stdin, one JSON object a line on stdout for each look and for the result.

One thread computes. Ends with an exit code of its own; what went wrong is on stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def main() -> None:
    """Read the order, make the run, say what came out."""
    import torch

    from nftctl.learning.order import Order
    from nftctl.learning.race import run

    torch.set_num_threads(1)
    order = Order.of(json.load(sys.stdin))

    def say(kind: str, what: Mapping[str, Any]) -> None:
        print(json.dumps({kind: what}), flush=True)

    say("result", run(order, lambda point: say("look", point)))


if __name__ == "__main__":
    main()
