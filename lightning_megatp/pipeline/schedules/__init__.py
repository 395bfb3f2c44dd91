"""Orders of forwards and backwards: made, checked, drawn, and measured."""
