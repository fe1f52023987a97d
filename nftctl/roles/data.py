"""Which prompts a step uses: a function of the cursor alone, so all ranks read the same rows and no row is repeated."""

from __future__ import annotations

from collections.abc import Sequence

from nftctl.algorithm.draws import row_line
from nftctl.profile.prompts import Prompt
from nftctl.roles.trajectory import SourceRow


class DataRole:
    """The prompt file, read once."""

    def __init__(self, prompts: Sequence[Prompt], *, rows_per_step: int, shuffle: bool, seed: int) -> None:
        self.prompts = list(prompts)
        self._rows_per_step = rows_per_step
        self._shuffle = shuffle
        self._seed = seed

    def next(self, cursor: int) -> list[SourceRow]:
        """The rows with running numbers cursor .. cursor + rows_per_step - 1. The cursor itself is the driver's."""
        rows = []
        for number in range(cursor, cursor + self._rows_per_step):
            line = row_line(number, len(self.prompts), shuffle=self._shuffle, seed=self._seed)
            rows.append(SourceRow(number, line, self.prompts[line]))
        return rows
