"""Every touch of a private name of Lightning or torch, each with the version it was seen in and why."""
