"""What a step makes once, between units, for all later steps: masks, tables of positions.

`if self.mask is None: self.mask = make(n)` does other operations in the first step than in the next one, which in a
pipeline is the next microbatch. A table that depends on shapes alone may as well be there before the first.
"""

from __future__ import annotations

from lightning_megatp.pipeline.snapshot import Snapshot
from lightning_megatp.pipeline.tracing import Tracer
from lightning_megatp.shim.torch import is_fake


class Tables:
    """Those of a dry run, before it is undone. What depends on the batch, on its values read by the step's code, on
    chance, or on what is trained, is none.

    Args:
        snapshot: of the module before.
        tracer: after the run.
    """

    def __init__(self, snapshot: Snapshot, tracer: Tracer) -> None:
        constants = [] if tracer.asks_batch else tracer.values.constants()
        tables = {id(x): x for x in constants if not (is_fake(x) or x.requires_grad)}
        self._entries = {plain: snapshot.entries_with(tables, plain) for plain in (False, True)}

    @property
    def made(self) -> bool:
        """Whether there are any."""
        return bool(self._entries[False])

    def keep(self, plain: bool) -> None:
        """Put them where the step had put them.

        Args:
            plain: with the numbers and the like that it set beside them (a table's length).
        """
        for holder, key, value in self._entries[plain]:
            holder[key] = value
