"""What is on disk: canonical names and full shapes, whatever the layout was."""
