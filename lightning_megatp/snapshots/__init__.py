"""What a trial must not change on a module, and what a step or a hook leaves there."""
