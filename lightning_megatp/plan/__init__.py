"""What is split where. Everything in here is pure: no process group, no ranks but as numbers."""
